"""Statistics of a cache, and the differences of two caches.

N   positions with a record      E   head or tail entries of N records      B   bins
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.codec import Codec
from cache.json_object import Json
from cache.manifest import Manifest, flatten
from cache.perplexity import BlockLosses, Interval
from cache.profiles.profile import ReadColumn
from cache.reading.arrays import ArrayFolder
from cache.reading.sealed import list_sealed_folders
from cache.records import Records, find_axis
from cache.rounding import ENTROPY_STEP, KNOWN_STEP, UNKNOWN, UNKNOWN_ENTROPY
from cache.shards.names import LM_HEAD, name_shard
from cache.shards.shard_runs import ShardRuns
from cache.store import Cache, measure_cache_bytes, reading

#: ``compare_caches`` compares the records of at most this many sequences.
COMPARED_SEQUENCES = 256
#: Stored steps of entropy in one bin of its histogram: half a nat.
ENTROPY_BIN_STEPS = 8
#: Bins of the histogram of kept mass over [0, 1].
MASS_BINS = 20

# ---------------------------------------------------------------------- diff


@dataclass(frozen=True)
class RecordsComparison:
    """The records of two caches of the same sequences.

    ``equal_shards`` of ``shards`` have the same seal and were not read. From the others up to
    ``COMPARED_SEQUENCES`` sequences were read, with ``positions`` records. ``same`` is the share of
    these records with the same entries and values (only the first draw of the tails is compared),
    ``gold_difference`` the mean |difference| of the gold token's log-probability in nats.
    """

    equal_shards: int
    shards: int
    positions: int
    same: float | None
    gold_difference: float | None


@dataclass(frozen=True)
class Comparison:
    """Two caches: the differing fields with both values, and the records if comparable."""

    fields: tuple[tuple[str, Any, Any], ...]
    records: RecordsComparison | None

    @property
    def equal(self) -> bool:
        """True if no difference was found."""
        return not self.fields and (self.records is None or self.records.same in (None, 1.0))

    def to_json(self) -> Json:
        """Return the comparison as plain JSON values."""
        fields = [{"field": name, "a": left, "b": right} for name, left, right in self.fields]
        records = self.records and asdict(self.records)
        return {"equal": self.equal, "fields": fields, "records": records}


def compare_caches(left: Cache, right: Cache) -> Comparison:
    """Compare identity, provenance and counts of two caches, and their records if possible.

    Records are compared if both caches have the same sequences and codec.

    Seeds and teachers may differ: then the records show how much that matters. Fidelity is not
    compared, because it is a measurement of the cache and no part of it.
    """
    ours = _describe(left.manifest)
    theirs = _describe(right.manifest)
    fields = tuple(
        (name, ours.get(name), theirs.get(name))
        for name in dict.fromkeys([*ours, *theirs])
        if ours.get(name) != theirs.get(name)
    )
    aligned = replace(right.identity.codec, seed=left.identity.codec.seed)
    wanted = replace(right.identity, teacher=left.identity.teacher, codec=aligned)
    return Comparison(fields, _compare_records(left, right) if wanted == left.identity else None)


def _describe(manifest: Manifest) -> Json:
    """Return every field of a manifest that ``compare_caches`` compares, by its dotted name."""
    provenance = asdict(manifest.provenance)
    provenance["probes"] = {
        json.dumps(probe.text): list(probe.ids) for probe in manifest.provenance.probes
    }
    counts = asdict(manifest.totals)
    parts = {"provenance": provenance, "counts": counts, "head": asdict(manifest.head)}
    return flatten({**manifest.identity.to_json(), **parts})


def _compare_records(left: Cache, right: Cache) -> RecordsComparison:
    changed = ShardRuns.of(
        index
        for index, (ours, theirs) in enumerate(zip(left.entries, right.entries, strict=True))
        if ours.digest != theirs.digest
    )
    count = sum(len(left.identity.shard_range(index)) for index in changed)
    numbers = (number for index in changed for number in left.identity.shard_range(index))
    same: list[NDArray[Any]] = []
    gold: list[NDArray[Any]] = []
    for number in islice(numbers, 0, None, math.ceil(count / COMPARED_SEQUENCES) or 1):
        _, ours = left.read([number])
        _, theirs = right.read([number])
        same.append(find_same_records(ours, theirs))
        if len(ours) == len(theirs):
            left_N, right_N = (each["known"][:, 0].astype(np.int64) for each in (ours, theirs))
            known_N = (left_N != UNKNOWN) & (right_N != UNKNOWN)
            gold.append(KNOWN_STEP * np.abs(left_N - right_N)[known_N])
    same_N = np.concatenate([np.empty(0), *same])
    return RecordsComparison(
        equal_shards=len(left.entries) - len(changed),
        shards=len(left.entries),
        positions=len(same_N),
        same=_average(same_N),
        gold_difference=_average(np.concatenate([np.empty(0), *gold])),
    )


def find_same_records(left: Records, right: Records) -> NDArray[np.bool_]:
    """Return which records of ``left``, (N,), have the same entries and values in ``right``.

    The order of the entries does not matter.
    """
    nothing = np.zeros(len(left), bool)
    if len(left) != len(right) or set(left.columns) != set(right.columns):
        return nothing
    same_N = ~nothing
    for name in (name for name in left.columns if find_axis(name) == "position"):
        # Another number of knots, or another width.
        if left[name].shape != right[name].shape:
            return nothing
        equal = (left[name] == right[name]).reshape(len(left), math.prod(left[name].shape[1:]))
        same_N &= equal.all(axis=1)
    for axis in ("head", "tail"):
        if f"{axis}_count" in left.columns:
            row_E, ours = _sort_entries(left, axis, same_N)
            theirs = _sort_entries(right, axis, same_N)[1]
            for name, column in ours.items():
                same_N[row_E[column != theirs[name]]] = False
    return same_N


def _sort_entries(
    records: Records, axis: str, chosen_N: NDArray[np.bool_]
) -> tuple[NDArray[Any], dict[str, NDArray[Any]]]:
    """Return row (E,) and columns of the entries of the chosen records, sorted by row and id."""
    row_E = np.repeat(np.arange(len(records)), records[f"{axis}_count"])
    chosen_E = np.flatnonzero(chosen_N[row_E])
    order_E = chosen_E[np.lexsort((records[f"{axis}_ids"][chosen_E], row_E[chosen_E]))]
    names = [name for name in records.columns if find_axis(name) == axis]
    return row_E[order_E], {name: records[name][order_E] for name in names}


# ---------------------------------------------------------------------- stats


@dataclass(frozen=True)
class Histogram:
    """``counts`` (B,) of values between ``edges`` (B + 1,), and the mean of the values, if any.

    Stochastic rounding can put a value beyond the last edge: it counts in the last bin. ``unknown``
    counts records whose value was not imported.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    mean: float | None
    unknown: int = 0


@dataclass(frozen=True)
class EntryCounts:
    """Entries of a record (known, head and tail tokens): mean, percentiles and maximum."""

    mean: float
    p50: int
    p99: int
    max: int


@dataclass(frozen=True)
class GoldStats:
    """The teacher's mean log-probability of the text of one split in nats, and its perplexity.

    ``interval`` is that of the perplexity (``cache.perplexity``); None for too short a text.
    """

    positions: int
    logprob: float | None
    perplexity: float | None
    interval: Interval | None


@dataclass(frozen=True)
class CacheStats:
    """Statistics of the records of a cache; all numbers are at T = 1.

    ``entropy_of`` is that of ``Codec.entropy_of``. ``kept_mass`` is the sum of the stored
    probabilities: of gold, always_keep and head tokens (those of profile threshold weigh their
    units), of the k tokens in topk, and 1 in dense and hidden. ``bytes`` on disk are listed by
    array; ``lm_head`` is the teacher's, ``index`` is all that is in no array.
    """

    fingerprint: str
    profile: str
    sequences: int
    positions: int
    bytes_per_token: float
    entropy_of: str
    entropy: Histogram
    kept_mass: Histogram
    entries: EntryCounts | None
    bytes: dict[str, int]
    gold: dict[str, GoldStats]


def compute_cache_stats(opened: Cache) -> CacheStats:
    """Compute the statistics of a cache; read only the columns they need, one shard at a time."""
    sums: dict[str, NDArray[Any]] = {}
    sizes: dict[str, int] = {}
    gold = dict.fromkeys(("train", "validation"), BlockLosses.none())
    for index, entry in enumerate(opened.entries):
        folder = name_shard(index)
        with reading(opened.folder):
            seal = opened.open_seal(folder, entry.digest)
            # Not by ``Cache.read_columns``: of a cache in a bucket, that may bring whole shards.
            shard = ArrayFolder(opened.folder / folder, seal, reads=opened.disk_reads)
            for name, counts in tally_records(opened.codec, shard.read_array).items():
                sums[name] = sums[name] + counts if name in sums else counts
            known_NK = shard.read_array("known")
            targets_S = np.diff(shard.read_array("offsets")[:, 0].astype(np.int64))
        for name, file in seal.files.items():
            array, below, _ = name.partition("/")
            sizes |= {array: sizes.get(array, 0) + file.bytes} if below else {}
        train = max(opened.train_count - opened.identity.shard_range(index).start, 0)
        trained = int(targets_S[:train].sum())
        gold["train"] += sum_gold_losses(known_NK[:trained], targets_S[:train])
        gold["validation"] += sum_gold_losses(known_NK[trained:], targets_S[train:])
    return CacheStats(
        fingerprint=opened.identity.fingerprint,
        profile=opened.codec.profile,
        sequences=len(opened),
        positions=opened.manifest.positions,
        bytes_per_token=opened.bytes_per_token,
        entropy_of=opened.codec.entropy_of,
        entropy=make_entropy_histogram(sums["entropy"]),
        kept_mass=make_mass_histogram(sums["mass"], float(sums["mass_sum"])),
        entries=summarise_entries(sums["entries"]),
        bytes=_list_bytes(opened, sizes),
        gold={split: _summarise_gold(losses) for split, losses in gold.items()},
    )


def tally_records(codec: Codec, read: ReadColumn) -> dict[str, NDArray[Any]]:
    """Count entropies, kept masses and entries of the records whose columns ``read`` returns.

    ``entropy`` and ``entries`` are counts by stored value, ``mass`` by bin; ``mass_sum`` is the sum
    of all masses. The columns that are read are those of ``Profile.measured``.
    """
    mass_N, entries_N = codec.rules.measure(codec, read)
    # 1e-9: a mass that is exactly on an edge must not fall below it through rounding.
    bins_N = np.clip((mass_N * MASS_BINS + 1e-9).astype(np.int64), 0, MASS_BINS - 1)
    return {
        "entropy": np.bincount(read("entropy"), minlength=UNKNOWN_ENTROPY + 1),
        "mass": np.bincount(bins_N, minlength=MASS_BINS),
        "mass_sum": mass_N.sum(),
        "entries": np.bincount(entries_N, minlength=codec.rules.bound_entries(codec) + 1),
    }


def sum_gold_losses(known_NK: NDArray[Any], targets_S: NDArray[Any]) -> BlockLosses:
    """Sum the teacher's losses on the text, from the column ``known`` of its records.

    ``targets_S`` are the records of each sequence. A token whose log-probability was not imported
    does not count.
    """
    return BlockLosses.of(known_NK[:, 0] * KNOWN_STEP, targets_S, is_gold_known(known_NK))


def is_gold_known(known_NK: NDArray[Any]) -> NDArray[np.bool_]:
    """Return whether the log-probability of each next token is known, (N,)."""
    known_N: NDArray[np.bool_] = known_NK[:, 0] != UNKNOWN  # the first known id is the gold token
    return known_N


def make_entropy_histogram(counts: NDArray[Any]) -> Histogram:
    """Make the histogram of entropies, in nats, from the counts of each stored value."""
    known = counts[:UNKNOWN_ENTROPY]
    bins = np.add.reduceat(known, np.arange(0, UNKNOWN_ENTROPY, ENTROPY_BIN_STEPS))
    bins = bins[: int(np.flatnonzero(bins).max(initial=0)) + 1]
    edges = np.arange(len(bins) + 1) * ENTROPY_BIN_STEPS * ENTROPY_STEP
    mean = None
    if known.any():
        mean = float(known @ np.arange(UNKNOWN_ENTROPY)) * ENTROPY_STEP / known.sum()
    unknown = int(counts[UNKNOWN_ENTROPY])
    return Histogram(tuple(edges.tolist()), tuple(bins.tolist()), mean, unknown)


def make_mass_histogram(counts: NDArray[Any], total: float) -> Histogram:
    """Make the histogram of kept masses from the counts of its bins, and the sum of all masses."""
    edges = np.arange(MASS_BINS + 1) / MASS_BINS
    mean = total / counts.sum() if counts.any() else None
    return Histogram(tuple(edges.tolist()), tuple(counts.tolist()), mean)


def summarise_entries(counts: NDArray[Any]) -> EntryCounts | None:
    """Summarise the counts of each number of entries; None without a record."""
    total = int(counts.sum())
    running = np.cumsum(counts)
    if not total:
        return None
    p50, p99, largest = (int(np.searchsorted(running, share * total)) for share in (0.5, 0.99, 1.0))
    return EntryCounts(float(counts @ np.arange(len(counts))) / total, p50, p99, largest)


def _summarise_gold(losses: BlockLosses) -> GoldStats:
    found = losses.perplexity
    if found is None or losses.mean is None:
        return GoldStats(0, None, None, None)
    return GoldStats(found.tokens, -losses.mean, found.value, found.interval)


def _list_bytes(opened: Cache, arrays: dict[str, int]) -> dict[str, int]:
    """List the bytes of ``arrays`` from the largest on, of the other folders, and of all else."""
    named = dict(sorted(arrays.items(), key=lambda item: -item[1]))
    for name, entry in list_sealed_folders(opened.manifest).items():
        named["lm_head" if name == LM_HEAD else name] = entry.bytes
    whole = measure_cache_bytes(opened.folder, opened.manifest)
    return {**named, "index": whole - sum(named.values())}


def _average(values: NDArray[Any]) -> float | None:
    return float(values.mean()) if values.size else None
