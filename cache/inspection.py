"""What a cache is like, and in what two caches differ.

P   positions with a record      E   head or tail entries of P records      B   bins
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.codec import ENTROPY_STEP, KNOWN_STEP, TOP_STEP, UNKNOWN, UNKNOWN_ENTROPY
from cache.errors import CacheCorrupt
from cache.manifest import Manifest
from cache.profiles import PROFILES
from cache.records import AXES, Records
from cache.shard import Folder, Seal
from cache.store import Cache, bytes_on_disk

#: Sequences of a cache whose records ``diff`` compares at most.
SAMPLE = 256
#: Bins of a histogram: stored steps of entropy in one (half a nat), and bins of the kept mass over [0, 1].
ENTROPY_STEPS, MASS_BINS = 8, 20

_SPLITS = ("train", "validation")

# ---------------------------------------------------------------------- diff


@dataclass(frozen=True)
class RecordsCompared:
    """The records of two caches of the same sequences.

    ``equal_shards`` of ``shards`` have the same seal and were not read; of the others up to ``SAMPLE`` sequences were,
    with ``positions`` records. ``same`` is the share of those with the same entries and values (of several draws of
    tails, in the first), ``gold_difference`` the mean |difference| of the gold token's log-probability in nats.
    """

    equal_shards: int
    shards: int
    positions: int
    same: float | None
    gold_difference: float | None


@dataclass(frozen=True)
class Comparison:
    """Two caches: each differing field with its two values, and their records where they can be compared."""

    fields: tuple[tuple[str, Any, Any], ...]
    records: RecordsCompared | None

    @property
    def equal(self) -> bool:
        """Whether nothing was found to differ."""
        return not self.fields and (self.records is None or self.records.same in (None, 1.0))

    def to_json(self) -> dict[str, Any]:
        """The comparison as plain JSON values."""
        fields = [{"field": name, "a": left, "b": right} for name, left, right in self.fields]
        return {"equal": self.equal, "fields": fields, "records": self.records and asdict(self.records)}


def diff(left: Cache, right: Cache) -> Comparison:
    """Compare identity, provenance and counts, and the records where both have the same sequences and codec.

    Seeds may differ, and so may teachers: then the records say how much that matters. Fidelity is not compared: it is
    a measurement of the cache, and no part of it.
    """
    ours, theirs = _described(left.manifest), _described(right.manifest)
    names = dict.fromkeys([*ours, *theirs])
    fields = tuple((name, ours.get(name), theirs.get(name)) for name in names if ours.get(name) != theirs.get(name))
    aligned = replace(right.identity.codec, seed=left.identity.codec.seed)
    comparable = replace(right.identity, teacher=left.identity.teacher, codec=aligned) == left.identity
    return Comparison(fields, _compare_records(left, right) if comparable else None)


def _described(manifest: Manifest) -> dict[str, Any]:
    """Every field of a manifest that ``diff`` compares, by its dotted name."""
    provenance = asdict(manifest.provenance)
    provenance["probes"] = {json.dumps(probe.text): list(probe.ids) for probe in manifest.provenance.probes}
    totals = {
        name: sum(getattr(shard, name) for shard in manifest.shards)
        for name in ("sequences", "positions", "head_entries", "tail_entries", "bytes")
    }
    counts = {"shards": len(manifest.shards), **totals}
    parts = {"provenance": provenance, "counts": counts, "head": asdict(manifest.head)}
    return dict(_flat({**manifest.identity.to_json(), **parts}))


def _flat(document: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in document.items():
        yield from _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]


def _compare_records(left: Cache, right: Cache) -> RecordsCompared:
    pairs = list(zip(left.manifest.shards, right.manifest.shards, strict=True))
    changed = [index for index, (ours, theirs) in enumerate(pairs) if ours.digest != theirs.digest]
    numbers = [number for index in changed for number in left.identity.shard_range(index)]
    same, gold = [], []
    for number in numbers[:: math.ceil(len(numbers) / SAMPLE) or 1]:
        ours, theirs = left.read([number])[1], right.read([number])[1]
        same.append(same_records(ours, theirs))
        gold.append(_gold_difference(ours, theirs) if len(ours) == len(theirs) else np.empty(0))
    same_P, gold_P = np.concatenate([np.empty(0), *same]), np.concatenate([np.empty(0), *gold])
    return RecordsCompared(len(pairs) - len(changed), len(pairs), len(same_P), _mean(same_P), _mean(gold_P))


def same_records(left: Records, right: Records) -> NDArray[np.bool_]:
    """Which records of ``left`` (P,) are the same in ``right``: its entries in any order, with the same values."""
    nothing = np.zeros(len(left), bool)
    if len(left) != len(right) or set(left.columns) != set(right.columns):
        return nothing
    same_P = ~nothing
    for name in (name for name in left.columns if AXES[name] == "position"):
        if left[name].shape != right[name].shape:  # another number of nodes, or another width
            return nothing
        same_P &= (left[name] == right[name]).reshape(len(left), math.prod(left[name].shape[1:])).all(axis=1)
    for axis in ("head", "tail"):
        if f"{axis}_count" in left.columns:
            row_E, ours = _entries(left, axis, same_P)
            theirs = _entries(right, axis, same_P)[1]
            for name, column in ours.items():
                same_P[row_E[column != theirs[name]]] = False
    return same_P


def _entries(records: Records, axis: str, chosen_P: NDArray[np.bool_]) -> tuple[NDArray[Any], dict[str, NDArray[Any]]]:
    """The row (E,) of each entry of the chosen records, and the columns of the entries, by id within a record."""
    row_E = np.repeat(np.arange(len(records)), records[f"{axis}_count"])
    chosen_E = np.flatnonzero(chosen_P[row_E])
    order_E = chosen_E[np.lexsort((records[f"{axis}_ids"][chosen_E], row_E[chosen_E]))]
    names = [name for name in records.columns if AXES[name] == axis]
    return row_E[order_E], {name: records[name][order_E] for name in names}


def _gold_difference(left: Records, right: Records) -> NDArray[Any]:
    ours, theirs = (records["known"][:, 0].astype(np.int64) for records in (left, right))
    both = (ours != UNKNOWN) & (theirs != UNKNOWN)
    difference: NDArray[Any] = KNOWN_STEP * np.abs(ours - theirs)[both]
    return difference


# ---------------------------------------------------------------------- stats


@dataclass(frozen=True)
class Histogram:
    """``counts`` (B,) of values between ``edges`` (B + 1,); ``mean`` is that of the stored values, None of nothing.

    What lies beyond the last edge, as stochastic rounding allows, counts in the last bin. ``unknown`` values were not
    imported.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    mean: float | None
    unknown: int = 0


@dataclass(frozen=True)
class EntryCounts:
    """Tokens of a record that have a probability, or a share of the tail: mean, percentiles and the largest number."""

    mean: float
    p50: int
    p99: int
    max: int


@dataclass(frozen=True)
class GoldStats:
    """What the teacher thinks of the text of one split: mean log-probability in nats, and exp of its negative."""

    positions: int
    logprob: float | None
    perplexity: float | None


@dataclass(frozen=True)
class CacheStats:
    """What the records of a cache are like; all numbers are of T = 1.

    ``kept_mass`` is the probability whose value is stored: gold, always kept and head tokens, the k of topk, 1 of
    dense and hidden. ``bytes`` on disk by array; ``lm_head`` is the teacher's, ``index`` all that is in no array.
    """

    fingerprint: str
    profile: str
    sequences: int
    positions: int
    bytes_per_token: float
    entropy: Histogram
    kept_mass: Histogram
    entries: EntryCounts | None
    bytes: dict[str, int]
    gold: dict[str, GoldStats]

    def to_json(self) -> dict[str, Any]:
        """The statistics as plain JSON values."""
        return asdict(self)


def stats(opened: Cache) -> CacheStats:
    """Describe the records of a cache; reads the columns that it needs, one shard at a time."""
    sums: dict[str, NDArray[Any]] = {}
    sizes: dict[str, int] = {}
    for index, shard in enumerate(stored_shards(opened)):
        for name, counts in _tally(opened, index, shard).items():
            sums[name] = sums[name] + counts if name in sums else counts
        for name, file in shard.seal.files.items():
            array, below, _ = name.partition("/")
            sizes |= {array: sizes.get(array, 0) + file.bytes} if below else {}
    return CacheStats(
        fingerprint=opened.identity.fingerprint,
        profile=opened.codec.profile,
        sequences=len(opened),
        positions=opened.manifest.positions,
        bytes_per_token=opened.bytes_per_token,
        entropy=_entropy_histogram(sums["entropy"]),
        kept_mass=_mass_histogram(sums["mass"], float(sums["mass_sum"])),
        entries=_entry_counts(sums["entries"]),
        bytes=_with_rest(opened, sizes),
        gold={name: _gold_stats(*row) for name, row in zip(_SPLITS, sums["gold"].tolist(), strict=True)},
    )


def stored_shards(opened: Cache) -> Iterator[Folder]:
    """Each shard's arrays as they are stored: nothing of a record is decoded that nobody asks for."""
    for index, entry in enumerate(opened.manifest.shards):
        path = opened.folder / "seals" / f"{index:06d}.json"
        seal = Seal.from_bytes(path.read_bytes(), str(path))
        if seal.digest != entry.digest:
            raise CacheCorrupt(f"{path} is not the seal that the manifest names.", "See `kd cache verify`.")
        yield Folder(opened.folder / "shards" / path.stem, seal)


def _tally(opened: Cache, index: int, shard: Folder) -> dict[str, NDArray[Any]]:
    """What is summed over shards: counts of entropies, of kept masses and of entries, and gold tokens by split."""
    mass_P, entries_P = _mass_and_entries(opened, shard)
    bins_P = np.clip((mass_P * MASS_BINS + 1e-9).astype(np.int64), 0, MASS_BINS - 1)
    first = opened.identity.shard_range(index).start
    train = int(np.clip(opened.identity.data.train_sequences - first, 0, shard.seal.sequences))
    gold_P = shard.whole("known")[:, 0]
    parts = np.split(gold_P, [int(shard.whole("offsets")[train, 0])])
    known = [part[part != UNKNOWN].astype(np.float64) * -KNOWN_STEP for part in parts]
    return {
        "entropy": np.bincount(shard.whole("entropy"), minlength=UNKNOWN_ENTROPY + 1),
        "mass": np.bincount(bins_P, minlength=MASS_BINS),
        "mass_sum": mass_P.sum(),
        "entries": np.bincount(entries_P, minlength=_most_entries(opened) + 1),
        "gold": np.array([[len(part), part.sum()] for part in known]),
    }


def _most_entries(opened: Cache) -> int:
    """No record has more entries: sizes sum to 1, and 1 / threshold of them are above it, or drawn, at most."""
    codec = opened.codec
    if PROFILES[codec.profile].sampled:
        return 1 + len(codec.always_keep) + 2 * math.ceil(1.0 / codec.threshold)
    return codec.k if codec.profile == "topk" else codec.vocabulary_size


def _mass_and_entries(opened: Cache, shard: Folder) -> tuple[NDArray[Any], NDArray[Any]]:
    """Kept mass and number of entries of every record, (P,) each."""
    if PROFILES[opened.codec.profile].sampled:
        return _sampled_mass_and_entries(opened, shard)
    if opened.codec.profile == "topk":
        codes = shard.whole("top_logprobs")
        return _masses(TOP_STEP, codes).sum(axis=1), (codes != UNKNOWN).sum(axis=1)
    return np.ones(shard.seal.positions), np.full(shard.seal.positions, opened.codec.vocabulary_size)


def _sampled_mass_and_entries(opened: Cache, shard: Folder) -> tuple[NDArray[Any], NDArray[Any]]:
    codec, known = opened.codec, shard.whole("known")
    gold_P = shard.whole("tokens")[:, 1:][shard.whole("target_mask")[:, :-1]]
    counted = known != UNKNOWN
    counted[:, 1:] &= gold_P[:, None] != np.array(codec.always_keep, np.int64)  # a gold token is counted once
    heads = shard.whole("head_count").astype(np.int64)
    row_E = np.repeat(np.arange(len(heads)), heads)
    head_P = np.bincount(row_E, _masses(codec.head_step, shard.whole("head_logprobs")), minlength=len(heads))
    mass_P = (_masses(KNOWN_STEP, known) * counted).sum(axis=1) + head_P
    return mass_P, counted.sum(axis=1) + heads + shard.whole("tail_count")


def _masses(step: float, codes: NDArray[Any]) -> NDArray[np.float64]:
    """Probabilities of log-probabilities in ``step`` nats below 0; 0 where ``UNKNOWN``. A look-up, for speed."""
    table: NDArray[np.float64] = np.exp(-step * np.arange(np.iinfo(codes.dtype).max + 1))
    table[UNKNOWN:] = 0.0
    masses: NDArray[np.float64] = table[codes]
    return masses


def _entropy_histogram(counts: NDArray[Any]) -> Histogram:
    known = counts[:UNKNOWN_ENTROPY]
    bins = np.add.reduceat(known, np.arange(0, UNKNOWN_ENTROPY, ENTROPY_STEPS))
    bins = bins[: int(np.flatnonzero(bins).max(initial=0)) + 1]
    edges = np.arange(len(bins) + 1) * ENTROPY_STEPS * ENTROPY_STEP
    mean = float(known @ np.arange(UNKNOWN_ENTROPY)) * ENTROPY_STEP / known.sum() if known.any() else None
    return Histogram(tuple(edges.tolist()), tuple(bins.tolist()), mean, int(counts[UNKNOWN_ENTROPY]))


def _mass_histogram(counts: NDArray[Any], total: float) -> Histogram:
    edges = np.arange(MASS_BINS + 1) / MASS_BINS
    return Histogram(tuple(edges.tolist()), tuple(counts.tolist()), total / counts.sum() if counts.any() else None)


def _entry_counts(counts: NDArray[Any]) -> EntryCounts | None:
    total, running = int(counts.sum()), np.cumsum(counts)
    if not total:
        return None
    p50, p99, largest = (int(np.searchsorted(running, share * total)) for share in (0.5, 0.99, 1.0))
    return EntryCounts(float(counts @ np.arange(len(counts))) / total, p50, p99, largest)


def _gold_stats(positions: float, total: float) -> GoldStats:
    mean = total / positions if positions else None
    return GoldStats(int(positions), mean, None if mean is None else math.exp(-mean))


def _with_rest(opened: Cache, sizes: dict[str, int]) -> dict[str, int]:
    lm_head = {"lm_head": opened.manifest.head.bytes} if opened.manifest.head.bytes else {}
    whole = bytes_on_disk(opened.folder, opened.manifest)
    named = {**dict(sorted(sizes.items(), key=lambda item: -item[1])), **lm_head}
    return {**named, "index": whole - sum(named.values())}


def _mean(values: NDArray[Any]) -> float | None:
    return float(values.mean()) if values.size else None
