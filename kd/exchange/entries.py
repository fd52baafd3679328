"""Turn the records of a cache, of any profile, into entries for another tool.

    topk            the stored entries, or fewer of them
    dense, hidden   the K most probable tokens, and the mass of all others
    threshold,      the entries of the target at temperature 1: the next token, always_keep and
    tempered        the head, then the sampled tail; heads of threshold weigh whole units

Shapes: N positions with a record, K entries of a position, E entries of all positions, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cache.operations import read_all_draws
from cache.records import Records, Sequences, compute_offsets
from cache.rounding import ENTROPY_STEP, KNOWN_STEP, TOP_STEP, UNKNOWN, UNKNOWN_ENTROPY
from cache.store import Cache
from kd.capture.log_mass import log_sum_exp
from kd.errors import DataError
from kd.exchange.rows import pad_entries
from kd.loss.decoder import TargetDecoder
from kd.loss.sparse_targets import SparseTarget
from kd.loss.targets import Targets
from kd.text.batches import make_batch

#: Probabilities of whole vocabularies in memory at once.
_ELEMENTS = 1 << 24
#: Positions that are read at once.
_POSITIONS = 1 << 14


@dataclass(frozen=True, eq=False)
class EntryTable:
    """The entries of N positions, as CSR arrays.

    counts     (N,)   entries of each position
    ids        (E,)
    logprobs   (E,)   at temperature 1
    weights    (E,)   probabilities at temperature 1, or the weights of sampled entries
    leading    (N,)   the number of entries, at the start of each position, before the sampled tail
    residual   (N,)   log of the mass outside the entries
    gold       (N,)   log-probability of the next token; NaN if the record has none
    entropy    (N,)   entropy of the whole distribution; NaN if the record has none
    """

    counts: NDArray[np.int64]
    ids: NDArray[np.int64]
    logprobs: NDArray[np.float64]
    weights: NDArray[np.float64]
    leading: NDArray[np.int64]
    residual: NDArray[np.float64]
    gold: NDArray[np.float64]
    entropy: NDArray[np.float64]

    def take_top(self, k: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return ids and log-probabilities (N, K) of the most probable entries beside the tail.

        -inf if there are fewer.
        """
        # The rank of each entry within its position: the tail comes last.
        rank = np.arange(len(self.ids)) - np.repeat(compute_offsets(self.counts)[:-1], self.counts)
        kept = (rank < np.repeat(self.leading, self.counts)) & (self.weights > 0)
        rows = np.repeat(np.arange(len(self.counts)), self.counts)[kept]
        order = np.lexsort((-self.logprobs[kept], rows))
        counts = np.bincount(rows, minlength=len(self.counts))
        entries = (self.ids[kept][order], self.logprobs[kept][order])
        ids, logprobs = pad_entries(counts, *entries, least=k)
        return ids[:, :k], logprobs[:, :k]


def read_entries(
    store: Cache, numbers: range, k: int | None
) -> Iterator[tuple[Sequences, Records, EntryTable]]:
    """Yield the sequences ``numbers`` of a cache, a few at a time, with their records as they are
    written (all draws of the tails), and with at most ``k`` entries per position.

    Raises ``DataError`` if ``k`` does not fit the profile (see ``choose_entry_count``).
    """
    codec = store.codec
    if why := codec.why_unsupported():
        what = f"An export needs temperature 1, but {why}."
        raise DataError(what, "Capture a cache that serves it.")
    decoder = TargetDecoder.of(store, torch.device("cpu"))
    k = choose_entry_count(store, k)
    width = codec.vocabulary_size if "logprobs" in codec.schema() else 1 << 10
    group = max(1, min(_POSITIONS, _ELEMENTS // width) // store.identity.data.sequence_length)
    sampled = codec.rules.sampled
    for first in range(0, len(numbers), group):
        chosen = numbers[first : first + group]
        sequences, records = store.read(chosen)
        if codec.k and not sampled:
            yield sequences, records, _take_stored(records, k)
            continue
        whole = read_all_draws(store, chosen)[1] if sampled else records
        batch = make_batch(sequences, records)
        targets = decoder.decode(batch.gold_N, batch.teacher)
        if sampled:
            yield sequences, whole, _take_sampled(targets, records)
        else:
            yield sequences, whole, _take_most_probable(targets, records, k, codec.vocabulary_size)


def choose_entry_count(store: Cache, k: int | None) -> int:
    """Return the largest number of entries at a position: ``k``, or all that the profile stores.

    Raises ``DataError`` if the profile stores fewer than ``k``, or needs ``k`` and got none.
    """
    codec = store.codec
    if codec.rules.sampled:
        # At most 1 / threshold tokens can have a probability above the threshold.
        most = min(int(1 / codec.threshold) + 1 + len(codec.always_keep), codec.vocabulary_size)
    else:
        most = codec.k or codec.vocabulary_size
    if k is None and codec.rules.any_divergence:
        what = f"Profile {codec.profile} stores all {most} tokens of a position."
        raise DataError(what, "Set k to the number of entries to take.")
    if k is not None and not 1 <= k <= most:
        what = f"k is {k}, but this cache stores at most {most} entries of a position."
        raise DataError(what, "Set a smaller k.")
    return k or most


def _take_stored(records: Records, k: int) -> EntryTable:
    logprobs = _decode_steps(records["top_logprobs"], -TOP_STEP)
    residual = _decode_steps(records["residual"], -TOP_STEP)
    # Entries that are left out move their mass to the residual.
    residual = np.logaddexp(residual, log_sum_exp(logprobs[:, k:]))
    ids = records["top_ids"][:, :k].astype(np.int64)
    return _make_entries(records, ids, logprobs[:, :k], residual)


def _take_most_probable(targets: Targets, records: Records, k: int, vocabulary: int) -> EntryTable:
    """Take the K most probable of all V tokens, a few positions at a time."""
    assert targets.teacher is not None
    rows = max(1, _ELEMENTS // vocabulary)
    parts = []
    for first in range(0, max(len(targets), 1), rows):
        part: Any = targets.teacher.take_chunk(slice(first, min(first + rows, len(targets))))
        p_NV = part.p_NV.double()
        p_NK, ids_NK = p_NV.topk(k)
        parts.append((ids_NK, p_NK.log(), p_NV.scatter(1, ids_NK, 0.0).sum(1).log()))
    ids, logprobs, residual = (torch.cat(each).numpy() for each in zip(*parts, strict=True))
    return _make_entries(records, ids, logprobs, residual)


def _make_entries(
    records: Records, ids: NDArray[Any], logprobs: NDArray[Any], residual: NDArray[Any]
) -> EntryTable:
    there = np.isfinite(logprobs)
    counts = there.sum(axis=1)
    flat = logprobs[there]
    rest = _read_gold_and_entropy(records)
    return EntryTable(counts, ids[there], flat, np.exp(flat), counts, residual, *rest)


def _take_sampled(targets: Targets, records: Records) -> EntryTable:
    target = targets.teacher
    assert isinstance(target, SparseTarget)
    weights = target.weights_E.numpy()
    leading = records["known"].shape[1] + records["head_count"].astype(np.int64)
    with np.errstate(divide="ignore", invalid="ignore"):  # a tail's weight may be a little below 0
        logprobs = np.log(weights)
    # Sampled entries stand for the whole tail, so nothing is outside them.
    none = np.full(len(leading), -np.inf)
    counts, ids = np.diff(target.offsets_N1.numpy()), target.ids_E.numpy()
    rest = _read_gold_and_entropy(records)
    return EntryTable(counts, ids, logprobs, weights, leading, none, *rest)


def _read_gold_and_entropy(records: Records) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the next token's log-probability and the entropy, (N,) each.

    NaN if they are not known.
    """
    gold = _decode_steps(records["known"][:, 0], -KNOWN_STEP, absent=np.nan)
    return gold, _decode_steps(records["entropy"], ENTROPY_STEP, UNKNOWN_ENTROPY, np.nan)


def _decode_steps(
    stored: NDArray[Any], step: float, unknown: int = UNKNOWN, absent: float = -np.inf
) -> NDArray[np.float64]:
    """Return the numbers of ``stored`` steps, and ``absent`` for those that are ``unknown``."""
    return np.where(stored == unknown, absent, stored.astype(np.float64) * step)
