"""The records of a cache, of any profile, as entries that another tool can take.

    topk            as stored, or fewer of them
    dense, hidden   the k most probable tokens, and what the others add up to
    threshold,      what the target at temperature 1 weighs: tokens whose probability is stored (the gold token,
    tempered        always_keep, the head), then the sampled tail

P positions with a record    k entries of a position    E entries of all positions    V vocabulary
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cache.codec import ENTROPY_STEP, KNOWN_STEP, TOP_STEP, UNKNOWN, UNKNOWN_ENTROPY
from cache.profiles import PROFILES, unserved
from cache.records import Records, Sequences, offsets_of
from cache.store import Cache
from kd.batches import make_batch
from kd.errors import DataError
from kd.exchange.rows import log_sum_exp
from kd.targets import SparseTarget, TargetDecoder, Targets
from kd.teacher import CachedRecords

# Probabilities of all tokens held at once, and positions of other profiles read at once.
_ELEMENTS, _POSITIONS = 1 << 24, 1 << 14


@dataclass(frozen=True, eq=False)
class Entries:
    """Entries of P positions, as CSR arrays.

    ``counts`` (P,), ``ids`` (E,) and ``weights`` (E,), probabilities at temperature 1, or ``logprobs`` (E,) where all
    are the teacher's own. ``exact`` (P,): so many of a position's entries, the first, are; those after them are
    sampled. ``residual`` (P,) is the log of the mass outside the entries, ``gold`` and ``entropy`` (P,) what the
    record says, NaN for nothing.
    """

    counts: NDArray[np.int64]
    ids: NDArray[np.int64]
    logprobs: NDArray[np.float64]
    weights: NDArray[np.float64]
    exact: NDArray[np.int64]
    residual: NDArray[np.float64]
    gold: NDArray[np.float64]
    entropy: NDArray[np.float64]

    def top(self, k: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Ids and log-probabilities (P, k) of the most probable of the exact entries; -inf where there are fewer."""
        rank = np.arange(len(self.ids)) - np.repeat(offsets_of(self.counts)[:-1], self.counts)
        kept = (rank < np.repeat(self.exact, self.counts)) & (self.weights > 0)
        rows = np.repeat(np.arange(len(self.counts)), self.counts)[kept]
        order = np.lexsort((-self.logprobs[kept], rows))
        counts = np.bincount(rows, minlength=len(self.counts))
        there = np.arange(max(k, counts.max(initial=0))) < counts[:, None]
        ids, logprobs = np.zeros(there.shape, np.int64), np.full(there.shape, -np.inf)
        ids[there], logprobs[there] = self.ids[kept][order], self.logprobs[kept][order]
        return ids[:, :k], logprobs[:, :k]


def entries_of(store: Cache, numbers: Iterable[int], k: int | None) -> Iterator[tuple[Sequences, Entries]]:
    """The sequences ``numbers`` of a cache, a few at a time, and their entries: at most ``k`` a position.

    Raises ``DataError`` where ``k`` does not fit the profile (see ``entry_count``).
    """
    codec, decoder = store.codec, _decoder(store)
    k = entry_count(store, k)
    width = codec.vocabulary_size if codec.profile == "dense" else 1 << 10
    group = max(1, min(_POSITIONS, _ELEMENTS // width) // store.identity.data.sequence_length)
    chosen = np.fromiter(numbers, np.int64)
    for first in range(0, len(chosen), group):
        sequences, records = store.read(chosen[first : first + group])
        if codec.profile == "topk":
            yield sequences, _stored(records, k)
            continue
        batch = make_batch(sequences, records)
        targets = decoder.targets(batch.gold_N, batch.teacher)
        sampled = PROFILES[codec.profile].sampled
        yield sequences, _sampled(targets, records) if sampled else _all(targets, records, k, codec.vocabulary_size)


def entry_count(store: Cache, k: int | None) -> int:
    """The entries that a position has, at most: ``k``, or all that the profile keeps.

    Raises ``DataError`` where that many are not kept, or where ``k`` must be given and is not.
    """
    codec = store.codec
    if PROFILES[codec.profile].sampled:
        most = min(int(1 / codec.threshold) + 1 + len(codec.always_keep), codec.vocabulary_size)
    else:
        most = codec.k or codec.vocabulary_size
    if k is None and codec.profile in ("dense", "hidden"):
        raise DataError(
            f"Profile {codec.profile} keeps all {most} tokens of a position.", "Say with k how many to take."
        )
    if k is not None and not 1 <= k <= most:
        raise DataError(
            f"{k} entries are asked for, but this cache keeps {most} of a position at most.", "Ask for fewer."
        )
    return k or most


def _decoder(store: Cache) -> TargetDecoder:
    span = store.codec.temperatures
    if (why := unserved(store.codec.profile, (span[0], span[1]) if span else None)) is not None:
        raise DataError(f"What is exported is of temperature 1: {why}.", "Capture a cache that serves it.")
    return TargetDecoder.of(CachedRecords(store), torch.device("cpu"))


def _stored(records: Records, k: int) -> Entries:
    steps = records["top_logprobs"]
    logprobs = np.where(steps == UNKNOWN, -np.inf, steps.astype(np.float64) * -TOP_STEP)
    stored = records["residual"]
    residual = np.where(stored == UNKNOWN, -np.inf, stored.astype(np.float64) * -TOP_STEP)
    residual = np.logaddexp(residual, log_sum_exp(logprobs[:, k:]))
    return _entries(records, records["top_ids"][:, :k].astype(np.int64), logprobs[:, :k], residual)


def _all(targets: Targets, records: Records, k: int, vocabulary: int) -> Entries:
    """The k most probable of all V tokens, a few positions at a time."""
    assert targets.teacher is not None
    rows, parts = max(1, _ELEMENTS // vocabulary), []
    for first in range(0, max(len(targets), 1), rows):
        p_NV = targets.teacher.chunk(slice(first, min(first + rows, len(targets)))).p_NV.double()  # type: ignore[attr-defined]
        p_Nk, ids_Nk = p_NV.topk(k)
        parts.append((ids_Nk, p_Nk.log(), p_NV.scatter(1, ids_Nk, 0.0).sum(1).log()))
    ids, logprobs, residual = (torch.cat(each).numpy() for each in zip(*parts, strict=True))
    return _entries(records, ids, logprobs, residual)


def _entries(records: Records, ids: NDArray[Any], logprobs: NDArray[Any], residual: NDArray[Any]) -> Entries:
    there = np.isfinite(logprobs)
    counts, flat = there.sum(axis=1), logprobs[there]
    return Entries(counts, ids[there], flat, np.exp(flat), counts, residual, *_said(records))


def _sampled(targets: Targets, records: Records) -> Entries:
    target = targets.teacher
    assert isinstance(target, SparseTarget)
    weights = target.weights_E.numpy()
    exact = records["known"].shape[1] + records["head_count"].astype(np.int64)
    with np.errstate(divide="ignore", invalid="ignore"):  # a tail's weight may be a little below 0
        logprobs = np.log(weights)
    none = np.full(len(exact), -np.inf)
    counts = np.diff(target.offsets_N1.numpy())
    return Entries(counts, target.ids_E.numpy(), logprobs, weights, exact, none, *_said(records))


def _said(records: Records) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The gold token's log-probability and the entropy (P,), NaN where they are not known."""
    known, entropy = records["known"][:, 0], records["entropy"]
    gold = np.where(known == UNKNOWN, np.nan, known.astype(np.float64) * -KNOWN_STEP)
    return gold, np.where(entropy == UNKNOWN_ENTROPY, np.nan, entropy.astype(np.float64) * ENTROPY_STEP)
