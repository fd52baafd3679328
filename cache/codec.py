"""Records as small integers: the columns of each profile, and how numbers are rounded to them.

A log-probability l <= 0 is stored as a number of steps below 0. It is rounded at random to one of
the two neighbouring steps, in proportion to *probability*, so that E[exp(decoded)] is exactly p:
the error of a record is noise that averages out over positions, not bias. Entropies are rounded at
random too, in proportion to their values.

    profile     column          type              meaning
    every       known           uint16            gold token, then each always_keep id: steps of
                                                  2^-8 nats
                entropy         uint8             H(p): steps of 2^-4 nats
    threshold,  head_count      uint8, or uint16  entries of the head; uint16 where the threshold is
    tempered                                      below 1/255; tail_count has the same type
                head_ids        id                most probable tokens, without those that are known
                head_logprobs   uint8 / uint16    steps of log(1 / threshold) / 127, or of 2^-6 nats
                tail_ids        id                sampled from all others. threshold: each has the
                                                  weight (1 - rest) / m. tempered: p_T R / (m g),
                                                  see ``kd.loss.sparse_targets``
    tempered    tail_logprobs   uint8             steps of 2^-3 nats
                partition       int16             log sum exp(b l) over the tail at knots b = 1 / T,
                                                  and its derivative in b: steps of 2^-10
    topk        top_ids         id                (N, K), most probable first
                top_logprobs    uint16            steps of 2^-11 nats
                residual        uint16            log of the mass outside the K: steps of 2^-11 nats
    dense       logprobs        float16, float32  (N, V)
    hidden      hidden          int8 or int16     (N, D): multiples of hidden_scale (N,); int16 of
                                                  the state h, int8 of its cosines z, where
                                                  h = z C and C is the orthonormal DCT-II
                                                  (``make_cosine_basis``)

    N   positions with a record    H, M   head and tail entries    A   always_keep ids
    K   entries of topk            J      knots                    R   draws            D   width
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.profiles import FORWARD_KL, explain_unsupported
from cache.random import (
    PURPOSE_ENTROPY_ROUNDING,
    PURPOSE_KNOWN_ROUNDING,
    PURPOSE_ROUNDING,
    PURPOSE_TAIL_ROUNDING,
    draw_uniforms,
)
from cache.records import Records, compute_offsets

#: A record has at most 1/threshold heads and as many tails: fewer than ``_RANKS_PER_DRAW``.
SMALLEST_THRESHOLD = 1 / 1000

# Steps are in nats, the derivative in ``partition`` too.
KNOWN_STEP = 2.0**-8
ENTROPY_STEP = 2.0**-4
TOP_STEP = 2.0**-11
PARTITION_STEP = 2.0**-10
TEMPERED_HEAD_STEP = 2.0**-6
TAIL_STEP = 2.0**-3

#: A log-probability that is absent: an import did not contain it, or the record has no such entry.
UNKNOWN = 65535
#: An entropy that an import did not contain.
UNKNOWN_ENTROPY = 255

#: Number of steps from log(threshold) to 0 in the head of profile threshold.
_HEAD_LEVELS = 127
#: Stride of the rank counter between the draws of a position, so that they share no random number.
_RANKS_PER_DRAW = 1024
#: Type and number of dimensions of each column.
Schema = dict[str, tuple[np.dtype[Any], int]]
#: How far below log(threshold) a head entry may lie, in nats: it allows for float32 noise.
_HEAD_SLACK = 1e-3


def choose_id_dtype(vocabulary_size: int) -> np.dtype[Any]:
    """Choose the stored type of token ids: uint16 up to 65,536 words, uint32 above."""
    return np.dtype(np.uint16 if vocabulary_size <= 1 << 16 else np.uint32)


@dataclass(frozen=True, eq=False)
class Sample:
    """A sample of the teacher at N positions, in floats, for profiles threshold and tempered.

    ``known_logprobs`` (N, 1 + A) in nats, ``entropy`` (N,); ``head_count`` (N,), ``head_ids`` and
    ``head_logprobs`` (H,); ``tail_count`` (N,), ``tail_ids`` (M, R), one column for each draw; for
    tempered also ``tail_logprobs`` (M, R) and ``partition`` (N, J, 2).
    """

    known_logprobs: NDArray[Any]
    entropy: NDArray[Any]
    head_count: NDArray[Any]
    head_ids: NDArray[Any]
    head_logprobs: NDArray[Any]
    tail_count: NDArray[Any]
    tail_ids: NDArray[Any]
    tail_logprobs: NDArray[Any] | None = None
    partition: NDArray[Any] | None = None


@dataclass(frozen=True, eq=False)
class RecordPositions:
    """The positions of N records: number of the sequence, and place in it, (N,) each.

    The random numbers of rounding depend on them.
    """

    sequence_N: NDArray[Any]
    position_N: NDArray[Any]


@dataclass(frozen=True)
class Codec:
    """How the records of a cache are stored; a field that its profile lacks is 0 or empty."""

    profile: str
    vocabulary_size: int
    seed: int = 0
    threshold: float = 0.0
    temperatures: tuple[float, ...] = ()
    always_keep: tuple[int, ...] = ()
    draws: int = 1
    k: int = 0
    bits: int = 0

    @property
    def head_step(self) -> float:
        """Nats of a step of ``head_logprobs``."""
        return (
            TEMPERED_HEAD_STEP
            if self.profile == "tempered"
            else -math.log(self.threshold) / _HEAD_LEVELS
        )

    @property
    def tail_step(self) -> float:
        """Nats of a step of ``tail_logprobs``."""
        return TAIL_STEP

    @property
    def cosines(self) -> bool:
        """Whether hidden states are stored as their cosines.

        In 8 bits one scale must suit all numbers of a state, and cosines are of similar size.
        """
        return self.profile == "hidden" and self.bits == 8

    @property
    def _count_dtype(self) -> np.dtype[Any]:
        """The type of ``head_count`` and ``tail_count``."""
        return np.dtype(np.uint8 if self.threshold >= 1 / 255 else np.uint16)

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

    # ------------------------------------------------------------------ floats to columns

    def encode_sample(self, sample: Sample, places: RecordPositions) -> Records:
        """Encode a sample for profile threshold or tempered.

        Raises ``ValueError`` for an id outside the vocabulary, or a head entry that is too small
        for its type.
        """
        columns = self._encode_common(sample.known_logprobs, sample.entropy, places)
        columns |= {
            "head_count": sample.head_count.astype(self._count_dtype),
            "head_ids": self._narrow_ids("head_ids", sample.head_ids),
            "head_logprobs": self._encode_head(sample, places),
            "tail_count": sample.tail_count.astype(self._count_dtype),
            "tail_ids": self._narrow_ids("tail_ids", sample.tail_ids),
        }
        if sample.tail_logprobs is not None and sample.partition is not None:
            columns["tail_logprobs"] = self._encode_tail(
                sample.tail_count, sample.tail_logprobs, places
            )
            columns["partition"] = round_to_fixed_point(sample.partition, PARTITION_STEP, np.int16)
        return self.require(Records(columns))

    def encode_top(
        self,
        known_logprobs: NDArray[Any],
        entropy: NDArray[Any],
        top: tuple[NDArray[Any], NDArray[Any]],
        residual: NDArray[Any],
        places: RecordPositions,
    ) -> Records:
        """Encode records of profile topk.

        ``top`` is ids and log-probabilities, (N, K) each; -inf where there is no entry.
        """
        top_ids, top_logprobs = top
        columns = self._encode_common(known_logprobs, entropy, places) | {
            "top_ids": self._narrow_ids("top_ids", np.where(np.isfinite(top_logprobs), top_ids, 0)),
            "top_logprobs": _round_to_nearest_step(top_logprobs),
            "residual": _round_to_nearest_step(residual),
        }
        return self.require(Records(columns))

    def encode_dense(
        self,
        known_logprobs: NDArray[Any],
        entropy: NDArray[Any],
        logprobs: NDArray[Any],
        places: RecordPositions,
    ) -> Records:
        """Encode records of profile dense; ``logprobs`` (N, V)."""
        dtype = np.float16 if self.bits == 16 else np.float32
        # A token that cannot come has -inf, which would make a sum of products NaN.
        lowest = np.finfo(dtype).min
        columns = self._encode_common(known_logprobs, entropy, places)
        return self.require(
            Records(columns | {"logprobs": np.maximum(logprobs, lowest).astype(dtype)})
        )

    def encode_hidden(
        self,
        known_logprobs: NDArray[Any],
        entropy: NDArray[Any],
        hidden: NDArray[Any],
        places: RecordPositions,
    ) -> Records:
        """Encode records of profile hidden.

        ``hidden`` (N, D) float32: the states, or their cosines where ``cosines`` is true.
        """
        columns = self._encode_common(known_logprobs, entropy, places)
        dtype = np.int8 if self.bits == 8 else np.int16
        scale = (
            np.maximum(np.abs(hidden).max(axis=1), np.finfo(np.float32).tiny) / np.iinfo(dtype).max
        )
        codes = np.rint(hidden / scale[:, None]).astype(dtype)
        return self.require(
            Records(columns | {"hidden": codes, "hidden_scale": scale.astype(np.float32)})
        )

    def _encode_common(
        self, known: NDArray[Any], entropy: NDArray[Any], places: RecordPositions
    ) -> dict[str, NDArray[Any]]:
        ranks_A = np.arange(known.shape[1])
        at = (places.sequence_N, places.position_N)
        draws = draw_uniforms(
            self.seed, PURPOSE_KNOWN_ROUNDING, at[0][:, None], at[1][:, None], ranks_A[None]
        )
        # The largest code means "unknown", so that a known value takes at most the one before it.
        steps = round_stochastically(known, KNOWN_STEP, draws)
        floats = entropy.astype(np.float64) / ENTROPY_STEP
        up = draw_uniforms(self.seed, PURPOSE_ENTROPY_ROUNDING, *at) < floats % 1.0
        codes = np.minimum(np.floor(floats) + up, UNKNOWN_ENTROPY - 1)
        return {
            "known": np.where(np.isnan(known), UNKNOWN, np.minimum(steps, UNKNOWN - 1)).astype(
                np.uint16
            ),
            "entropy": np.where(np.isnan(entropy), UNKNOWN_ENTROPY, codes).astype(np.uint8),
        }

    def _narrow_ids(self, name: str, ids: NDArray[Any]) -> NDArray[Any]:
        """Check ``ids`` and return them in the stored type, which would wrap larger ones."""
        self.require_ids(name, ids)
        return ids.astype(choose_id_dtype(self.vocabulary_size))

    def _encode_head(self, sample: Sample, places: RecordPositions) -> NDArray[Any]:
        dtype = np.uint16 if self.profile == "tempered" else np.uint8
        lowest = (
            -np.iinfo(dtype).max * self.head_step
            if self.profile == "tempered"
            else math.log(self.threshold)
        )
        logprobs = sample.head_logprobs
        if logprobs.size and (
            logprobs.min() < lowest - _HEAD_SLACK or logprobs.max() > _HEAD_SLACK
        ):
            got = f"{logprobs.min():.4f} to {logprobs.max():.4f}"
            raise ValueError(f"head_logprobs must lie in [{lowest:.4f}, 0], but got {got}.")
        return round_stochastically(
            logprobs,
            self.head_step,
            self._draw_uniforms(PURPOSE_ROUNDING, sample.head_count, places),
        ).astype(dtype)

    def _encode_tail(
        self, count: NDArray[Any], logprobs: NDArray[Any], places: RecordPositions
    ) -> NDArray[np.uint8]:
        draws = [
            round_stochastically(
                logprobs[:, draw],
                TAIL_STEP,
                self._draw_uniforms(PURPOSE_TAIL_ROUNDING, count, places, draw),
            )
            for draw in range(logprobs.shape[1])
        ]
        return np.minimum(np.stack(draws, axis=1), 255).astype(np.uint8)

    def _draw_uniforms(
        self, purpose: int, count: NDArray[Any], places: RecordPositions, draw: int = 0
    ) -> NDArray[np.float64]:
        """Draw a uniform number for each entry of records with ``count`` entries."""
        rows = np.repeat(np.arange(len(count)), count)
        rank = np.arange(len(rows)) - compute_offsets(count)[rows]
        return draw_uniforms(
            self.seed,
            purpose,
            places.sequence_N[rows],
            places.position_N[rows],
            rank + _RANKS_PER_DRAW * draw,
        )

    # ------------------------------------------------------------------ validity

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
        ids = choose_id_dtype(self.vocabulary_size)
        byte = np.dtype(np.uint8)
        word = np.dtype(np.uint16)
        known: Schema = {"known": (word, 2), "entropy": (byte, 1)}
        sampled: Schema = {
            "head_count": (self._count_dtype, 1),
            "head_ids": (ids, 1),
            "head_logprobs": (word if self.profile == "tempered" else byte, 1),
            "tail_count": (self._count_dtype, 1),
            "tail_ids": (ids, 2),
        }
        tempered: Schema = {"tail_logprobs": (byte, 2), "partition": (np.dtype(np.int16), 3)}
        state = np.dtype(np.int8 if self.bits == 8 else np.int16)
        own: dict[str, Schema] = {
            "threshold": sampled,
            "tempered": sampled | tempered,
            "topk": {"top_ids": (ids, 2), "top_logprobs": (word, 2), "residual": (word, 1)},
            "dense": {"logprobs": (np.dtype(np.float16 if self.bits == 16 else np.float32), 2)},
            "hidden": {"hidden": (state, 2), "hidden_scale": (np.dtype(np.float32), 1)},
        }
        return known | own[self.profile]

    def require_ids(self, name: str, ids: NDArray[Any]) -> None:
        """Raise ``ValueError`` where an id lies outside the vocabulary."""
        if ids.size and ids.max() >= self.vocabulary_size:
            raise ValueError(
                f"{name} must be below the vocabulary size {self.vocabulary_size}, "
                f"but got {ids.max()}."
            )
        if ids.size and ids.min() < 0:
            raise ValueError(f"{name} must not be negative, but got {ids.min()}.")


def round_stochastically(
    logprobs: NDArray[Any], step: float, draws: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Round log-probabilities to steps below 0, without bias in probability.

    The upper neighbour is taken with chance (p - p_lower) / (p_upper - p_lower). ``draws`` are
    uniform in [0, 1), of the same shape. -inf and NaN give a number above every code.
    """
    steps = np.nan_to_num(np.maximum(-logprobs.astype(np.float64), 0.0) / step, nan=1e9, posinf=1e9)
    upper = np.floor(steps)
    # Divided by p_upper, so that no probability underflows.
    bottom = math.exp(-step)
    takes_upper = draws < (np.exp((upper - steps) * step) - bottom) / (1.0 - bottom)
    below: NDArray[np.int64] = (upper + ~takes_upper).astype(np.int64)
    return below


def make_cosine_basis(width: int) -> NDArray[np.float64]:
    """Make C, (D, D): the orthonormal DCT-II, whose rows are cosines along the width.

    z = h C^T, and h = z C. A coordinate of h that is far larger than the others is spread over all
    of z. A random or a Hadamard rotation (QuaRot, arXiv 2404.00456) does the same, but its error is
    no smaller here, and it needs a seed or a width that is a power of two.
    """
    k = np.arange(width)[:, None]
    n = np.arange(width)[None]
    return np.sqrt(np.where(k == 0, 1.0, 2.0) / width) * np.cos(np.pi * k * (n + 0.5) / width)


def round_to_fixed_point(
    values: NDArray[Any], step: float, dtype: type[np.signedinteger[Any]]
) -> NDArray[Any]:
    """Round to multiples of ``step``, as integers; clip values to the range of the type."""
    limits = np.iinfo(dtype)
    return np.clip(np.rint(values.astype(np.float64) / step), limits.min, limits.max).astype(dtype)


def _round_to_nearest_step(logprobs: NDArray[Any]) -> NDArray[np.uint16]:
    """Round to steps of ``TOP_STEP`` below 0; -inf, an absent entry, gives ``UNKNOWN``."""
    steps = np.rint(np.maximum(-logprobs.astype(np.float64), 0.0) / TOP_STEP)
    return np.where(np.isfinite(logprobs), np.minimum(steps, UNKNOWN - 1), UNKNOWN).astype(
        np.uint16
    )


def round_to_bfloat16(values: NDArray[Any]) -> NDArray[np.uint16]:
    """Return the upper halves of float32 numbers, rounded to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
