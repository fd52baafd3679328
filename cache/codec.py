"""Records as small integers: the parameters of a cache's records, and the columns of all profiles.

profile     column          type              meaning
every       known           uint16            gold token, then each always_keep id: steps of
2^-8 nats
entropy         uint8             H(p): steps of 2^-4 nats
others      see the modules of ``cache.profiles``

N   positions with a record      A   always_keep ids      V   vocabulary size
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.profiles.profile import BYTE, WORD, CodecNumbers, Profile, Reading, Schema
from cache.profiles.table import FORWARD_KL, PROFILES, SPREAD_ENTROPIES, explain_unsupported
from cache.records import Records
from cache.rounding import TAIL_STEP, RecordPositions, round_entropy, round_known, spread_entropy


@dataclass(frozen=True)
class Codec(CodecNumbers):
    """How the records of a cache are stored."""

    @property
    def rules(self) -> Profile:
        """The rules of the profile."""
        return PROFILES[self.profile].choose(self)

    @property
    def head_step(self) -> float:
        """Nats of a step of ``head_logprobs``."""
        return self.rules.head_step(self)

    @property
    def tail_step(self) -> float:
        """Nats of a step of ``tail_logprobs``."""
        return TAIL_STEP

    @property
    def cosines(self) -> bool:
        """True if hidden states are stored as their cosines.

        In 8 bits one scale must suit all numbers of a state, and cosines are of similar size.
        """
        return self.rules.needs_lm_head and self.bits == 8

    @property
    def proposal_betas(self) -> tuple[float, ...]:
        """The values of 1/T whose mean p_T a tempered tail is drawn from, ascending.

        They are the ends of the range, and values between them at most a factor of 2 apart. The
        weights at any T stay bounded, because p_T at both neighbours is part of the mean.
        """
        low, high = self.temperatures
        # 1e-9: a range of exactly a power of two needs no further value.
        return self.nodes(max(2, math.ceil(math.log2(high / low) - 1e-9) + 1))

    def nodes(self, count: int) -> tuple[float, ...]:
        """Place ``count`` values of 1/T in the range, ascending, in equal ratios."""
        low, high = self.temperatures
        return tuple(float(beta) for beta in np.geomspace(1 / high, 1 / low, count))

    def why_unsupported(
        self,
        divergence: str = FORWARD_KL,
        temperatures: Sequence[float] = (1.0,),
        features: bool = False,
        learned: bool = False,
    ) -> str | None:
        """Explain why these records cannot serve a loss, as ``explain_unsupported`` does."""
        return explain_unsupported(
            self.profile, self.temperatures, divergence, temperatures, features, learned
        )

    @property
    def spreads_entropy(self) -> bool:
        """Whether each position has the mean entropy of its sequence, which costs nothing."""
        return self.rules.dithered and not self.entropies

    @property
    def entropy_of(self) -> str:
        """What the entropy of a record is of: "positions", or "sequences" whose mean it is."""
        return "sequences" if self.spreads_entropy else "positions"

    def why_unweighted(self) -> str | None:
        """Explain why no loss can weigh positions by the entropies of these records.

        None also for records whose entropies are not known, which only reading them tells.
        """
        return SPREAD_ENTROPIES if self.spreads_entropy else None

    def encode(self, reading: Reading, places: RecordPositions) -> Records:
        """Encode a reading of the profile's class.

        Raises ``ValueError`` for an id outside the vocabulary, or a value that does not fit.
        """
        common: dict[str, NDArray[Any]] = {
            "known": round_known(self.seed, reading.known_logprobs, places),
            "entropy": spread_entropy(reading.entropy, places)
            if self.spreads_entropy
            else round_entropy(self.seed, reading.entropy, places),
        }
        return self.require(Records(common | self.rules.encode(self, reading, places)))

    def require(self, records: Records) -> Records:
        """Return ``records``; raise ``ValueError`` naming the column that is not of this codec."""
        expected = self.schema()
        if set(records.columns) != set(expected):
            raise ValueError(
                f"Profile {self.profile} has columns {sorted(expected)}, "
                f"but got {sorted(records.columns)}."
            )
        for name, (dtype, axes) in expected.items():
            column = records[name]
            if column.dtype != dtype or column.ndim != axes:
                got = f"{column.dtype} with {column.ndim}"
                raise ValueError(
                    f"{name} must be of type {dtype} with {axes} dimensions, but got {got}."
                )
            if name.endswith("_ids"):
                self.require_ids(name, column)
        return records

    def schema(self) -> Schema:
        """Return type and dimensions of each column as it is written; a reader picks one draw."""
        return {"known": (WORD, 2), "entropy": (BYTE, 1), **self.rules.schema(self)}
