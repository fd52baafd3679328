"""Ways to keep the teacher that no profile has: records of another cache, altered when read.

    renormalised top-k        the k most probable tokens, as in most top-k caches
    draws with replacement    each token has its share of the draws as its weight (RS-KD, arXiv
                              2503.16870)
    DistillKit                the k most probable tokens, put into DistillKit's bytes and decoded
                              from them, then renormalised, as its trainer does by default

Altered records have profile topk and go through the same loss and the same loop as all others.

Shapes: N positions, V vocabulary, K entries, D teacher's width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.support.quality.wrapped import WrappedSource
from cache.codec import Codec
from cache.records import Records, Sequences
from cache.rounding import TOP_STEP, UNKNOWN, choose_id_dtype
from cache.store import Cache
from kd.exchange import distillkit
from kd.loss.whole_targets import HiddenTarget, decode_lm_head
from kd.models.lm_head import LMHead
from kd.text.batches import Source

#: Makes other records, from the numbers of the sequences, the sequences and their records.
Alter = Callable[[NDArray[np.int64], Sequences, Records], Records]

#: The configurations that DistillKit's README calls "recommended" and "budget".
DISTILLKIT: dict[str, dict[str, Any]] = {
    "recommended": {
        "k": 128,
        "exact_k": 16,
        "exact_dtype": "bfloat16",
        "polynomial_terms": (0, 1, 2, 3, 4, "sqrt"),
        "term_dtype": "float32",
        "residual_bins": (),
        "delta_encoding": False,
    },
    "budget": {
        "k": 50,
        "exact_k": 1,
        "exact_dtype": "bfloat16",
        "polynomial_terms": (0, 1, "sqrt"),
        "term_dtype": "float32",
        "residual_bins": (),
        "delta_encoding": False,
    },
}
#: Bytes of one drawn token in RS-KD's own format: 17 bits of id and 7 bits of its count.
DRAWN_TOKEN_BYTES = 3.0
#: Probabilities in memory at once while tokens are drawn from hidden states.
PROBABILITY_ELEMENTS = 2**23
#: The most draws with replacement that ``choose_draws`` tries.
MOST_DRAWS = 4096
#: ``choose_draws`` looks at one of so many positions.
POSITION_STRIDE = 4
#: It puts probabilities into ranges of log p: so many to a nat, down to so many nats below 0.
RANGES_PER_NAT = 50
LOG_RANGES = 40
#: Sequences whose records are counted.
COUNTED_SEQUENCES = 16


@dataclass(frozen=True)
class AlteredCache(WrappedSource):
    """A cache whose records are altered into those of another method when they are read.

    The altered records have profile topk. ``name`` tells the method: sources of one cache that are
    altered in different ways differ in their identity.
    """

    alter: Alter
    name: str

    fingerprint = property(lambda self: f"{self.source.fingerprint}, {self.name}")
    codec = property(lambda self: Codec("topk", self.source.codec.vocabulary_size))

    def tail_mean(self) -> None:
        """None: the mean tail is that of other records."""

    def read(
        self, indices: NDArray[Any], draws: int | NDArray[Any] = 0
    ) -> tuple[Sequences, Records]:
        """Read the sequences of ``indices`` and their altered records."""
        sequences, records = self.source.read(indices, draws)
        assert records is not None, "a cache has records"
        return sequences, self.alter(np.asarray(indices), sequences, records)


# ---------------------------------------------------------------------- top-k


def make_renormalisation(k: int) -> Alter:
    """Keep the k most probable tokens alone; the loss divides their probabilities by their sum."""

    def alter(_: NDArray[np.int64], __: Sequences, records: Records) -> Records:
        columns = dict(records.columns)
        columns |= {name: columns[name][:, :k] for name in ("top_ids", "top_logprobs")}
        return Records(columns | {"residual": np.full(len(records), UNKNOWN, np.uint16)})

    return alter


def make_exact_settings(k: int) -> dict[str, Any]:
    """Return the settings of DistillKit's format with which all of ``k`` entries are exact."""
    none = {"polynomial_terms": (), "residual_bins": (), "delta_encoding": False}
    return {"k": k, "exact_k": k, "exact_dtype": "bfloat16", "term_dtype": "float32"} | none


def make_compression(settings: dict[str, Any], vocabulary: int) -> distillkit.Compression:
    """Return DistillKit's configuration with ``settings``, for a vocabulary of this size."""
    return distillkit.Compression(d=vocabulary, **settings)


def make_distillkit_rounding(compression: distillkit.Compression) -> Alter:
    """Put the k most probable tokens into DistillKit's bytes, and decode them.

    The bytes decode to log-probabilities in float64; in the record they are rounded to steps of
    2^-11 nats.
    """

    def alter(_: NDArray[np.int64], __: Sequences, records: Records) -> Records:
        columns = dict(records.columns)
        logprobs_NK = columns["top_logprobs"][:, : compression.k] * -TOP_STEP
        ids_NK = columns["top_ids"][:, : compression.k]
        stored = distillkit.encode_entries(compression, ids_NK, logprobs_NK)
        ids_NK, logprobs_NK = distillkit.decode_entries(compression, *stored)
        # A fitted value may lie above 0, which no record can hold. The loss divides by the sum, so
        # a shift of all values of a position changes nothing.
        logprobs_NK = logprobs_NK - logprobs_NK.max(1, keepdims=True).clip(min=0.0)
        steps_NK = np.minimum(np.rint(-logprobs_NK / TOP_STEP), UNKNOWN - 1)
        return Records(
            {
                "known": columns["known"],
                "entropy": columns["entropy"],
                "top_ids": ids_NK.astype(choose_id_dtype(compression.d)),
                "top_logprobs": steps_NK.astype(np.uint16),
                "residual": np.full(len(records), UNKNOWN, np.uint16),
            }
        )

    return alter


# ---------------------------------------------------------------------- draws with replacement


def make_hidden_draws(draws: int, source: Cache) -> Alter:
    """Draw with replacement from the teacher's distribution, which its hidden states give.

    A sequence always gets the same draws. Probabilities exist for a few positions at a time.
    """
    read = ProbabilityReader.of(source)

    def alter(indices: NDArray[np.int64], sequences: Sequences, records: Records) -> Records:
        counts = sequences.target_mask.sum(1).tolist()
        points_Nd = np.concatenate(
            [
                np.random.default_rng([draws, index]).random((count, draws))
                for index, count in zip(indices.tolist(), counts, strict=True)
            ]
        )
        parts = ((p_NV, points_Nd[rows]) for rows, p_NV in read.split(records))
        return _count_draws(records, parts)

    return alter


@dataclass(frozen=True)
class ProbabilityReader:
    """Computes the teacher's probabilities from the records of a hidden cache."""

    codec: Codec
    lm_head: LMHead

    @classmethod
    def of(cls, source: Cache) -> ProbabilityReader:
        """Read the LM head of ``source``, a cache of profile hidden."""
        codec = source.codec
        device = torch.device("cpu")
        return cls(codec, decode_lm_head(source.teacher_head(), codec.vocabulary_size, device))

    def split(self, records: Records) -> Iterator[tuple[slice, NDArray[np.float64]]]:
        """Yield a few positions at a time, and their probabilities (N, V)."""
        states = (torch.from_numpy(records[name]) for name in ("hidden", "hidden_scale"))
        target = HiddenTarget(*states, self.lm_head, 1.0, self.codec.cosines)
        size = max(PROBABILITY_ELEMENTS // self.codec.vocabulary_size, 1)
        for start in range(0, len(records), size):
            rows = slice(start, min(start + size, len(records)))
            yield rows, target.take_chunk(rows).p_NV.double().numpy()


def _count_draws(
    records: Records, parts: Iterable[tuple[NDArray[np.float64], NDArray[np.float64]]]
) -> Records:
    """Return the records of the tokens under random points, each with its share of the points.

    ``parts`` yields probabilities (N, V) and points in [0, 1) (N, draws).
    """
    found = [_find_drawn_tokens(p_NV, points_Nd) for p_NV, points_Nd in parts]
    ids_Nd, steps_Nd = (np.concatenate(each) for each in zip(*found, strict=True))
    return Records(
        {
            "known": records["known"],
            "entropy": records["entropy"],
            "top_ids": ids_Nd,
            "top_logprobs": steps_Nd,
            "residual": np.full(len(ids_Nd), UNKNOWN, np.uint16),
        }
    )


def _find_drawn_tokens(
    p_NV: NDArray[np.float64], points_Nd: NDArray[np.float64]
) -> tuple[NDArray[Any], NDArray[np.uint16]]:
    """Return the distinct tokens under the points, and the logs of their shares, in steps.

    The heaviest comes first; columns without a token hold ``UNKNOWN``.
    """
    draws = points_Nd.shape[1]
    points_Nd = points_Nd * p_NV.sum(1, keepdims=True)
    running = np.cumsum(p_NV, axis=1)
    ids = np.stack([np.searchsorted(row, at) for row, at in zip(running, points_Nd, strict=True)])
    ids = np.sort(np.minimum(ids, p_NV.shape[1] - 1), axis=1)
    first = np.concatenate([np.ones((len(p_NV), 1), bool), ids[:, 1:] != ids[:, :-1]], axis=1)
    count = np.diff(np.append(np.flatnonzero(first), first.size)).astype(np.float64)
    steps = np.full(ids.shape, UNKNOWN, np.uint16)
    steps[first] = np.rint(-np.log(count / draws) / TOP_STEP)
    order = np.argsort(steps, axis=1, kind="stable")
    ids = np.take_along_axis(ids, order, 1).astype(choose_id_dtype(p_NV.shape[1]))
    return ids, np.take_along_axis(steps, order, 1)


def choose_draws(source: Cache, entries: float) -> int:
    """Choose the number of draws that gives ``entries`` distinct tokens a position, or just more.

    ``source`` is a cache of profile hidden. The expected number of distinct tokens of n draws is
    sum_i 1 - (1 - p_i)^n. It is computed over a part of the positions that ``count_entries``
    counts, from the number of tokens in each of many narrow ranges of log p.
    """
    _, records = source.read(np.arange(min(COUNTED_SEQUENCES, source.train_count)))
    few = Records({name: column[::POSITION_STRIDE] for name, column in records.columns.items()})
    tokens_R = np.zeros(LOG_RANGES * RANGES_PER_NAT)
    for _, p_NV in ProbabilityReader.of(source).split(few):
        steps = np.minimum(-np.log(p_NV) * RANGES_PER_NAT, len(tokens_R) - 1).astype(np.int64)
        tokens_R += np.bincount(steps.ravel().clip(min=0), minlength=len(tokens_R))
    p_R = np.exp(-(np.arange(len(tokens_R)) + 0.5) / RANGES_PER_NAT)
    low = 1
    high = MOST_DRAWS
    while low < high:
        middle = (low + high) // 2
        distinct = float(tokens_R @ -np.expm1(middle * np.log1p(-p_R))) / len(few)
        low, high = (low, middle) if distinct >= entries else (middle + 1, high)
    return low


# ---------------------------------------------------------------------- counting


def count_entries(source: Source) -> float:
    """Count the mean entries of a record: known, head and tail, or the tokens present.

    A record of hidden states has all tokens of the vocabulary.
    """
    _, records = source.read(np.arange(min(COUNTED_SEQUENCES, source.train_count)))
    assert records is not None
    assert source.codec is not None
    columns = records.columns
    if "top_ids" in columns:
        return float((columns["top_logprobs"] != UNKNOWN).sum(1).mean())
    if "hidden" in columns:
        return float(source.codec.vocabulary_size)
    sampled = (
        columns["head_count"].mean() + columns["tail_count"].mean()
        if "head_count" in columns
        else 0.0
    )
    return float(columns["known"].shape[1] + sampled)
