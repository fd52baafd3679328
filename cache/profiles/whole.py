"""Profiles dense and hidden: the whole distribution, so that any loss can be computed.

profile     column          type              meaning
dense       logprobs        float16, float32  (N, V)
hidden      hidden          int8 or int16     (N, D): multiples of hidden_scale (N,); int16 of
the state h, int8 of its cosines z, where
h = z C and C is the orthonormal DCT-II
(``cache.rounding.make_cosine_basis``)

N   positions      V   vocabulary size      D   width
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.profiles.profile import CodecNumbers, Profile, Reading, Schema
from cache.records import Records
from cache.rounding import RecordPositions

#: The largest root mean square of |delta log p|, weighted by p.
EXACT_STEP = 2e-2
#: The same bound for hidden states in int8, where SmolLM2-135M has 0.03.
INT8_STEP = 1e-1


@dataclass(frozen=True, eq=False, kw_only=True)
class DenseReading(Reading):
    """``logprobs`` (N, V) of every token, in nats."""

    logprobs: NDArray[Any]


@dataclass(frozen=True, eq=False, kw_only=True)
class HiddenReading(Reading):
    """``states`` (N, D) float32: hidden states, or their cosines if ``Codec.cosines`` is true."""

    states: NDArray[Any]


@dataclass(frozen=True)
class _Whole(Profile):
    any_temperature = True
    any_divergence = True
    options = frozenset({"dtype"})
    shard_bytes = 6_000

    def find_fault(self, numbers: CodecNumbers) -> str | None:
        """Refuse bits that no dtype has."""
        known = tuple(sorted(set(self.dtypes.values())))
        if numbers.bits in known:
            return None
        return f"codec.bits of {self.name} must be one of {known}, but got {numbers.bits}."


@dataclass(frozen=True)
class Dense(_Whole):
    """The rules of profile dense."""

    name = "dense"
    reading = DenseReading
    dtypes = {"auto": 16, "float16": 16, "float32": 32}  # noqa: RUF012 (a constant)
    gold_steps = 1
    shown = ("logprobs",)

    def schema(self, numbers: CodecNumbers) -> Schema:
        """Return the column of log-probabilities."""
        return {"logprobs": (np.dtype(np.float16 if numbers.bits == 16 else np.float32), 2)}

    def encode(
        self, numbers: CodecNumbers, reading: DenseReading, places: RecordPositions
    ) -> dict[str, NDArray[Any]]:
        """Encode log-probabilities as floats."""
        ((dtype, _),) = self.schema(numbers).values()
        # A token that cannot come has -inf, which would make a sum of products NaN.
        return {"logprobs": np.maximum(reading.logprobs, np.finfo(dtype).min).astype(dtype)}

    def find_step(self, numbers: CodecNumbers) -> float:
        """Return the bound of float16."""
        return EXACT_STEP

    def estimate_position(self, numbers: CodecNumbers, width: int) -> float:
        """Count the bytes of V numbers; compression makes them fewer."""
        return float(numbers.common_bytes + numbers.vocabulary_size * numbers.bits // 8)

    def list_entries(
        self, numbers: CodecNumbers, records: Records, number: int, said: int
    ) -> tuple[NDArray[Any], NDArray[np.float64]]:
        """List every token."""
        logp_V = records["logprobs"][number].astype(np.float64)
        return np.arange(len(logp_V)), np.exp(logp_V)


@dataclass(frozen=True)
class Hidden(_Whole):
    """The rules of profile hidden."""

    name = "hidden"
    reading = HiddenReading
    needs_lm_head = True
    dtypes = {"auto": 16, "int16": 16, "int8": 8}  # noqa: RUF012 (a constant)
    gold_steps = 2

    def schema(self, numbers: CodecNumbers) -> Schema:
        """Return the columns of the states and of their scales."""
        state = np.dtype(np.int8 if numbers.bits == 8 else np.int16)
        return {"hidden": (state, 2), "hidden_scale": (np.dtype(np.float32), 1)}

    def encode(
        self, numbers: CodecNumbers, reading: HiddenReading, places: RecordPositions
    ) -> dict[str, NDArray[Any]]:
        """Encode each state by one scale."""
        dtype, _ = self.schema(numbers)["hidden"]
        largest = np.maximum(np.abs(reading.states).max(axis=1), np.finfo(np.float32).tiny)
        scale = largest / np.iinfo(dtype).max
        codes = np.rint(reading.states / scale[:, None]).astype(dtype)
        return {"hidden": codes, "hidden_scale": scale.astype(np.float32)}

    def find_step(self, numbers: CodecNumbers) -> float:
        """Return the bound of int8 or of int16."""
        return INT8_STEP if numbers.bits == 8 else EXACT_STEP

    def estimate_position(self, numbers: CodecNumbers, width: int) -> float:
        """Count the bytes of a state and of its scale; compression makes them fewer."""
        return float(numbers.common_bytes + width * numbers.bits // 8 + 4)

    def estimate_once(self, numbers: CodecNumbers, width: int) -> float:
        """Count the bytes of the LM head."""
        return float(numbers.vocabulary_size * width * 4)
