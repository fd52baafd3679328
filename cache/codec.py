"""Records as small integers: which columns a profile has, and how numbers become them.

A log-probability l <= 0 is stored as a number of steps below 0. Rounding is random between the two neighbouring steps,
in proportion to *probability*, so that E[exp(decoded)] is exactly p: the error of a record is noise that averages out
over positions, not bias. Entropies are rounded so too, in proportion to themselves.

    profile              column           type      what
    every                known            uint16    gold token, then each always_keep id: steps of 2^-8 nats
                         entropy          uint8     H(p): steps of 2^-4 nats
    threshold, tempered  head_count       uint8, or uint16 where the threshold is below 1/255; tail_count likewise
                         head_ids         id        most probable tokens, other than those that are known
                         head_logprobs    uint8 / uint16   steps of log(1 / threshold) / 127, or of 2^-6 nats
                         tail_ids         id        sampled from all others; at T = 1 each weighs (1 - rest) / m
    tempered             tail_logprobs    uint8     steps of 2^-3 nats
                         partition        int16     log sum exp(b l) over the tail at nodes b = 1 / T, and its
                                                    derivative in b: steps of 2^-10
    topk                 top_ids          id        (P, k), most probable first
                         top_logprobs     uint16    steps of 2^-11 nats
                         residual         uint16    log of the mass outside the k: steps of 2^-11 nats
    dense                logprobs         float16 or float32    (P, V)
    hidden               hidden           int8 or int16         (P, D): multiples of hidden_scale (P,); in int8 not of
                                                                the state h itself, but of its cosines z: h = z C
                                                                with C the orthonormal DCT-II (``cosine_basis``)

    P   positions with a record    H, M   head and tail entries    K   always_keep ids    G   nodes    E   draws
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.random import (
    PURPOSE_ENTROPY_ROUNDING,
    PURPOSE_KNOWN_ROUNDING,
    PURPOSE_ROUNDING,
    PURPOSE_TAIL_ROUNDING,
    uniforms,
)
from cache.records import Records, offsets_of

#: A record has at most 1/threshold heads and 1/threshold tails, and fewer than ``_RANKS`` of either.
SMALLEST_THRESHOLD = 1 / 1000
KNOWN_STEP = 2.0**-8
ENTROPY_STEP = 2.0**-4
TOP_STEP = 2.0**-11
PARTITION_STEP = 2.0**-10
TEMPERED_HEAD_STEP = 2.0**-6
TAIL_STEP = 2.0**-3
#: What nobody said: the gold log-probability or the entropy of an import; an entry that is not there.
UNKNOWN, UNKNOWN_ENTROPY = 65535, 255

_HEAD_LEVELS = 127
_RANKS = 1024
#: Type and number of dimensions of each column.
Schema = dict[str, tuple[np.dtype[Any], int]]
#: How far below log(threshold) a head entry may lie, in nats: float32 noise at the boundary, not another threshold.
_SLACK = 1e-3


def id_dtype(vocabulary_size: int) -> np.dtype[Any]:
    """The smallest stored type for token ids: uint16 up to 65,536 words, uint32 above."""
    return np.dtype(np.uint16 if vocabulary_size <= 1 << 16 else np.uint32)


@dataclass(frozen=True, eq=False)
class Sample:
    """What was found at P positions, in floats, for profiles threshold and tempered; log-probabilities in nats.

    ``known_logprobs`` (P, 1 + K), ``entropy`` (P,); ``head_count`` (P,), ``head_ids`` and ``head_logprobs`` (H,);
    ``tail_count`` (P,), ``tail_ids`` (M, E), one column a draw; for tempered ``tail_logprobs`` (M, E) and
    ``partition`` (P, G, 2).
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
class Places:
    """Which positions records belong to: sequence number and place in it, (P,) each. Rounding is drawn from them."""

    sequence_P: NDArray[Any]
    position_P: NDArray[Any]


@dataclass(frozen=True)
class Codec:
    """How the records of one cache are stored; fields that its profile does not use are 0 or empty."""

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
        """Nats a step of ``head_logprobs``."""
        return TEMPERED_HEAD_STEP if self.profile == "tempered" else -math.log(self.threshold) / _HEAD_LEVELS

    @property
    def tail_step(self) -> float:
        """Nats a step of ``tail_logprobs``."""
        return TAIL_STEP

    @property
    def cosines(self) -> bool:
        """Whether hidden states are kept as their cosines: one scale suits them all, where few bits must do."""
        return self.profile == "hidden" and self.bits == 8

    @property
    def _count_dtype(self) -> np.dtype[Any]:
        """The type of ``head_count`` and ``tail_count``."""
        return np.dtype(np.uint8 if self.threshold >= 1 / 255 else np.uint16)

    @property
    def proposal_betas(self) -> tuple[float, ...]:
        """The 1/T whose mean p_T a tempered tail is drawn from: the range's ends and at least every factor of 2.

        With p_T at both neighbours in the mean, the weights at any T between them stay bounded.
        """
        low, high = self.temperatures
        return self.nodes(max(2, math.ceil(math.log2(high / low) - 1e-9) + 1))

    def nodes(self, count: int) -> tuple[float, ...]:
        """``count`` values of 1/T in ascending order, in equal ratios over the range of temperatures."""
        low, high = self.temperatures
        return tuple(float(beta) for beta in np.geomspace(1 / high, 1 / low, count))

    # ------------------------------------------------------------------ floats to columns

    def encode_sample(self, sample: Sample, places: Places) -> Records:
        """The columns of a threshold or tempered record.

        Raises ``ValueError`` for an id outside the vocabulary or a head entry below what its type can hold.
        """
        columns = self._common(sample.known_logprobs, sample.entropy, places)
        columns |= {
            "head_count": sample.head_count.astype(self._count_dtype),
            "head_ids": self._narrow("head_ids", sample.head_ids),
            "head_logprobs": self._head_steps(sample, places),
            "tail_count": sample.tail_count.astype(self._count_dtype),
            "tail_ids": self._narrow("tail_ids", sample.tail_ids),
        }
        if sample.tail_logprobs is not None and sample.partition is not None:
            columns["tail_logprobs"] = self._tail_steps(sample.tail_count, sample.tail_logprobs, places)
            columns["partition"] = fixed_point(sample.partition, PARTITION_STEP, np.int16)
        return self.require(Records(columns))

    def encode_top(
        self,
        known_logprobs: NDArray[Any],
        entropy: NDArray[Any],
        top: tuple[NDArray[Any], NDArray[Any]],
        residual: NDArray[Any],
        places: Places,
    ) -> Records:
        """The columns of topk records: ``top`` is ids and log-probabilities (P, k), -inf where there is no entry."""
        top_ids, top_logprobs = top
        columns = self._common(known_logprobs, entropy, places) | {
            "top_ids": self._narrow("top_ids", np.where(np.isfinite(top_logprobs), top_ids, 0)),
            "top_logprobs": _nearest_steps(top_logprobs),
            "residual": _nearest_steps(residual),
        }
        return self.require(Records(columns))

    def encode_dense(
        self, known_logprobs: NDArray[Any], entropy: NDArray[Any], logprobs: NDArray[Any], places: Places
    ) -> Records:
        """The columns of dense records: ``logprobs`` (P, V)."""
        dtype = np.float16 if self.bits == 16 else np.float32
        lowest = np.finfo(dtype).min
        columns = self._common(known_logprobs, entropy, places)
        return self.require(Records(columns | {"logprobs": np.maximum(logprobs, lowest).astype(dtype)}))

    def encode_hidden(
        self, known_logprobs: NDArray[Any], entropy: NDArray[Any], hidden: NDArray[Any], places: Places
    ) -> Records:
        """The columns of hidden records: ``hidden`` (P, D) float32, the cosines of the states where those are kept."""
        columns = self._common(known_logprobs, entropy, places)
        dtype = np.int8 if self.bits == 8 else np.int16
        scale = np.maximum(np.abs(hidden).max(axis=1), np.finfo(np.float32).tiny) / np.iinfo(dtype).max
        codes = np.rint(hidden / scale[:, None]).astype(dtype)
        return self.require(Records(columns | {"hidden": codes, "hidden_scale": scale.astype(np.float32)}))

    def _common(self, known: NDArray[Any], entropy: NDArray[Any], places: Places) -> dict[str, NDArray[Any]]:
        ranks_K = np.arange(known.shape[1])
        at = (places.sequence_P, places.position_P)
        draws = uniforms(self.seed, PURPOSE_KNOWN_ROUNDING, at[0][:, None], at[1][:, None], ranks_K[None])
        steps = stochastic_steps(known, KNOWN_STEP, draws)
        floats = entropy.astype(np.float64) / ENTROPY_STEP
        up = uniforms(self.seed, PURPOSE_ENTROPY_ROUNDING, *at) < floats % 1.0
        codes = np.minimum(np.floor(floats) + up, UNKNOWN_ENTROPY - 1)
        return {
            "known": np.where(np.isnan(known), UNKNOWN, np.minimum(steps, UNKNOWN - 1)).astype(np.uint16),
            "entropy": np.where(np.isnan(entropy), UNKNOWN_ENTROPY, codes).astype(np.uint8),
        }

    def _narrow(self, name: str, ids: NDArray[Any]) -> NDArray[Any]:
        """``ids`` in the type of ids; looked at before, because a narrower type would wrap what is too large."""
        self.require_ids(name, ids)
        return ids.astype(id_dtype(self.vocabulary_size))

    def _head_steps(self, sample: Sample, places: Places) -> NDArray[Any]:
        dtype = np.uint16 if self.profile == "tempered" else np.uint8
        lowest = -np.iinfo(dtype).max * self.head_step if self.profile == "tempered" else math.log(self.threshold)
        logprobs = sample.head_logprobs
        if logprobs.size and (logprobs.min() < lowest - _SLACK or logprobs.max() > _SLACK):
            got = f"{logprobs.min():.4f} to {logprobs.max():.4f}"
            raise ValueError(f"head_logprobs must lie in [{lowest:.4f}, 0], but got {got}.")
        return stochastic_steps(
            logprobs, self.head_step, self._draws(PURPOSE_ROUNDING, sample.head_count, places)
        ).astype(dtype)

    def _tail_steps(self, count: NDArray[Any], logprobs: NDArray[Any], places: Places) -> NDArray[np.uint8]:
        draws = [
            stochastic_steps(logprobs[:, draw], TAIL_STEP, self._draws(PURPOSE_TAIL_ROUNDING, count, places, draw))
            for draw in range(logprobs.shape[1])
        ]
        return np.minimum(np.stack(draws, axis=1), 255).astype(np.uint8)

    def _draws(self, purpose: int, count: NDArray[Any], places: Places, draw: int = 0) -> NDArray[np.float64]:
        """A uniform number for each entry of records with ``count`` entries."""
        rows = np.repeat(np.arange(len(count)), count)
        rank = np.arange(len(rows)) - offsets_of(count)[rows]
        return uniforms(self.seed, purpose, places.sequence_P[rows], places.position_P[rows], rank + _RANKS * draw)

    # ------------------------------------------------------------------ what is valid

    def require(self, records: Records) -> Records:
        """``records``, if their columns are of this codec; raises ``ValueError`` naming what is not."""
        expected = self.schema()
        if set(records.columns) != set(expected):
            raise ValueError(
                f"Profile {self.profile} has columns {sorted(expected)}, but got {sorted(records.columns)}."
            )
        for name, (dtype, axes) in expected.items():
            column = records[name]
            if column.dtype != dtype or column.ndim != axes:
                got = f"{column.dtype} with {column.ndim}"
                raise ValueError(f"{name} must be of type {dtype} with {axes} dimensions, but got {got}.")
            if name.endswith("_ids"):
                self.require_ids(name, column)
        return records

    def schema(self) -> Schema:
        """Type and number of dimensions of each column as it is written; reading picks one draw of the tails."""
        ids, byte, word = id_dtype(self.vocabulary_size), np.dtype(np.uint8), np.dtype(np.uint16)
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
            raise ValueError(f"{name} must be below the vocabulary size {self.vocabulary_size}, but got {ids.max()}.")
        if ids.size and ids.min() < 0:
            raise ValueError(f"{name} must not be negative, but got {ids.min()}.")


def stochastic_steps(logprobs: NDArray[Any], step: float, draws: NDArray[np.float64]) -> NDArray[np.int64]:
    """Steps below 0, of the same shape: the upper neighbour with chance (p - p_lower) / (p_upper - p_lower).

    ``draws`` are uniform in [0, 1). -inf and NaN give the largest number there is.
    """
    steps = np.nan_to_num(np.maximum(-logprobs.astype(np.float64), 0.0) / step, nan=1e9, posinf=1e9)
    upper = np.floor(steps)
    bottom = math.exp(-step)
    takes_upper = draws < (np.exp((upper - steps) * step) - bottom) / (1.0 - bottom)
    below: NDArray[np.int64] = (upper + ~takes_upper).astype(np.int64)
    return below


def cosine_basis(width: int) -> NDArray[np.float64]:
    """C, (D, D): the orthonormal DCT-II, whose rows are cosines along the width; z = h C^T, and h = z C.

    A coordinate that is far larger than the others is spread over all of z. So are they by a random or a Hadamard
    rotation (QuaRot, arXiv 2404.00456), which keep an error no smaller here and need a seed or a power of two.
    """
    k, n = np.arange(width)[:, None], np.arange(width)[None]
    return np.sqrt(np.where(k == 0, 1.0, 2.0) / width) * np.cos(np.pi * k * (n + 0.5) / width)


def fixed_point(values: NDArray[Any], step: float, dtype: type[np.signedinteger[Any]]) -> NDArray[Any]:
    """The nearest multiples of ``step``, as integers; values beyond the type take its ends."""
    limits = np.iinfo(dtype)
    return np.clip(np.rint(values.astype(np.float64) / step), limits.min, limits.max).astype(dtype)


def _nearest_steps(logprobs: NDArray[Any]) -> NDArray[np.uint16]:
    """Steps of ``TOP_STEP`` below 0; ``UNKNOWN`` for what is not there (-inf)."""
    steps = np.rint(np.maximum(-logprobs.astype(np.float64), 0.0) / TOP_STEP)
    return np.where(np.isfinite(logprobs), np.minimum(steps, UNKNOWN - 1), UNKNOWN).astype(np.uint16)


def bfloat16_bits(values: NDArray[Any]) -> NDArray[np.uint16]:
    """The upper halves of float32 numbers, rounded to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
