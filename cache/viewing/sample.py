"""Statistics of a bounded sample of the records of a cache, which has any size.

The sample is systematic. ``RUNS`` starts lie at equal distances over all sequences, the first at a
random place; at each start a run of consecutive sequences is read. Every sequence has the same
chance to be read, and all parts of the text are in the sample. A cache that is small is read whole.

B   bins      N   records
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, starmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache import inspection
from cache.errors import CacheIncomplete
from cache.store import Cache

#: Records that a sample reads at most, by a small margin: runs are whole sequences.
SAMPLED_RECORDS = 1 << 16
#: Places of the cache that a sample reads from. Each costs some chunks of each column.
RUNS = 32
#: Bins of the histogram of entries.
ENTRY_BINS = 32


@dataclass(frozen=True)
class SampledStats:
    """Histograms of a sample of the records of a cache; all numbers are at T = 1.

    ``records`` of ``positions`` were read, in ``sequences_read`` of ``sequences`` sequences;
    ``entry_counts`` are the mean, percentiles and maximum of what the histogram ``entries`` shows;
    None without a record. ``entropy_of`` is that of ``Codec.entropy_of``.
    """

    fingerprint: str
    profile: str
    seed: int
    positions: int
    records: int
    sequences: int
    sequences_read: int
    entropy_of: str
    entropy: inspection.Histogram
    kept_mass: inspection.Histogram
    entries: inspection.Histogram
    entry_counts: inspection.EntryCounts | None

    @property
    def whole(self) -> bool:
        """True if every record was read, so that the numbers are exact."""
        return self.sequences_read == self.sequences


def sample_cache(opened: Cache, seed: int = 0, limit: int = SAMPLED_RECORDS) -> SampledStats:
    """Read about ``limit`` records of a cache; the same seed reads the same ones.

    Raises as ``Cache.read`` does; ``CacheIncomplete`` for a cache without a sequence.
    """
    runs = choose_runs(opened, seed, limit)
    columns = ("tokens", "target_mask", *opened.codec.rules.measured)
    sums: dict[str, NDArray[Any]] = {}
    for numbers in runs:
        found = opened.read_columns(numbers, columns)
        for name, counts in inspection.tally_records(opened.codec, found.__getitem__).items():
            sums[name] = sums[name] + counts if name in sums else counts
    return SampledStats(
        fingerprint=opened.identity.fingerprint,
        profile=opened.codec.profile,
        seed=seed,
        positions=opened.manifest.positions,
        records=int(sums["entropy"].sum()),
        sequences=len(opened),
        sequences_read=sum(map(len, runs)),
        entropy_of=opened.codec.entropy_of,
        entropy=inspection.make_entropy_histogram(sums["entropy"]),
        kept_mass=inspection.make_mass_histogram(sums["mass"], float(sums["mass_sum"])),
        entries=_make_entry_histogram(sums["entries"]),
        entry_counts=inspection.summarise_entries(sums["entries"]),
    )


def choose_runs(opened: Cache, seed: int, limit: int) -> list[range]:
    """Choose the sequences of a sample, as runs that lie in one shard each."""
    count = len(opened)
    if not count:
        raise CacheIncomplete(
            f"{opened.folder} holds no sequence, so it has no records to show.",
            "Capture a cache of a longer text.",
        )
    records = max(opened.manifest.positions / count, 1.0)
    length = max(int(limit / records / RUNS), 1)
    # Fewer places where a single sequence of each would read more than the limit.
    places = min(RUNS, max(int(limit / records / length), 1))
    if places * length >= count:
        return list(_cut_at_shards(range(count), opened.identity.codec.shard_sequences))
    first = int(np.random.default_rng(seed).integers(count))
    starts = sorted({(first + place * count // places) % count for place in range(places)})
    runs: list[range] = []
    for start in starts:
        runs.append(range(start, min(start + length, count)))
        if start + length > count:  # the text is a ring, so that all sequences have one chance
            runs.append(range(start + length - count))
    size = opened.identity.codec.shard_sequences
    return [part for run in runs for part in _cut_at_shards(run, size)]


def _cut_at_shards(numbers: range, size: int) -> Iterator[range]:
    inner = range((numbers.start // size + 1) * size, numbers.stop, size)
    return starmap(range, pairwise([numbers.start, *inner, numbers.stop]))


def _make_entry_histogram(counts: NDArray[Any]) -> inspection.Histogram:
    """Make at most ``ENTRY_BINS`` bins of whole numbers from the counts of each number."""
    present = np.flatnonzero(counts)
    if not present.size:
        return inspection.Histogram((0.0, 1.0), (0,), None)
    low, high = int(present[0]), int(present[-1]) + 1
    width = -(-(high - low) // ENTRY_BINS)
    bins = np.add.reduceat(counts[low:high], np.arange(0, high - low, width))
    edges = low + np.arange(len(bins) + 1) * width
    mean = float(counts @ np.arange(len(counts))) / float(counts.sum())
    return inspection.Histogram(tuple(map(float, edges)), tuple(bins.tolist()), mean)
