"""Estimate the bytes of a cache from its codec, and check the free disk space.

The bytes of profiles threshold and tempered depend on the teacher's entropy. Those of topk, dense
and hidden follow from the format; compression makes them fewer. The table was measured on
SmolLM2-135M-Instruct (V = 49,152, mean entropy 3.5 nats) reading 16,384 tokens of *Persuasion* in
sequences of 256. It is the difference between shards of 64 and of 32 sequences, so it counts every
byte that grows with the number of positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cache.codec import Codec
from cache.disk import list_file_sizes
from cache.errors import StorageError
from cache.manifest import CacheIdentity
from cache.profiles.table import PROFILES
from cache.rounding import choose_id_dtype
from kd.files import Disk, format_bytes

#: For each threshold: bytes per position without its tails, bytes of the tails of one draw,
#: entries.
_MEASURED: dict[str, dict[float, tuple[float, float, float]]] = {
    "threshold": {
        0.25: (4.9, 2.7, 2.5),
        0.125: (6.2, 5.1, 4.9),
        0.08: (7.3, 7.4, 7.3),
        0.04: (10.0, 12.6, 12.9),
        0.02: (14.5, 20.7, 22.4),
        0.01: (22.2, 33.1, 38.1),
        0.004: (40.9, 59.5, 74.9),
        0.001: (106.0, 137.0, 195.3),
    },
    "tempered": {
        0.25: (18.5, 4.9, 2.5),
        0.125: (18.7, 10.0, 5.0),
        0.08: (20.3, 15.2, 7.6),
        0.04: (21.2, 28.3, 14.1),
        0.02: (24.6, 51.4, 26.1),
        0.01: (29.1, 92.4, 48.1),
        0.004: (44.3, 197.3, 108.1),
        0.001: (104.0, 617.0, 362.9),
    },
}
#: V of the teacher that the table was measured on.
MEASURED_VOCABULARY = 49_152
#: Bits that an entry grows by when the vocabulary doubles; less than 1, because ids are coded by
#: their frequency. Measured between that vocabulary and the example's 2,048 (19.4 bytes per token).
_BITS_PER_DOUBLING = 0.43
#: Bytes of a shard that do not depend on its content: metadata, seal, manifest line, and the start
#: of each compressed stream.
_SHARD_BYTES = {
    "threshold": 8_000,
    "tempered": 45_000,
    "topk": 8_000,
    "dense": 6_000,
    "hidden": 6_000,
}
#: Arrays of a shard that every profile has: tokens, starts of documents, mask of the targets.
_SEQUENCE_ARRAYS = 3
#: Bytes of a shard's frequency table, for each token of the vocabulary.
_TABLE_BYTES = 0.15


@dataclass(frozen=True)
class CacheSize:
    """Bytes on disk: of each position, of each shard besides its positions, and of the LM head."""

    position: float
    shard: float
    lm_head: int = 0

    def sum_bytes(self, positions: int, shards: int) -> int:
        """Return the bytes of a whole cache."""
        return math.ceil(self.position * positions + self.shard * shards) + self.lm_head


def estimate_cache_size(codec: Codec, width: int = 0) -> CacheSize:
    """Estimate the bytes of a cache with ``codec``.

    Profile hidden needs ``width``, D of the teacher.
    """
    shard = float(_SHARD_BYTES[codec.profile])
    if PROFILES[codec.profile].sampled:
        shard += _TABLE_BYTES * codec.vocabulary_size
        rest, tail, entries = _interpolate(codec.profile, codec.threshold)
        doublings = math.log2(codec.vocabulary_size / MEASURED_VOCABULARY)
        longer = _BITS_PER_DOUBLING * doublings / 8 * entries
        position = max(rest + tail * codec.draws + longer, 1.0) + 2 * len(codec.always_keep)
        return CacheSize(position, shard)
    id_bytes = choose_id_dtype(codec.vocabulary_size).itemsize
    # Every record has the next token, its log-probability (2 bytes) and the entropy (1 byte).
    every = id_bytes + 3
    own = {
        "topk": codec.k * (id_bytes + 2) + 2,
        "dense": codec.vocabulary_size * codec.bits // 8,
        "hidden": width * codec.bits // 8 + 4,
    }
    lm_head = codec.vocabulary_size * width * 4 if codec.profile == "hidden" else 0
    return CacheSize(float(every + own[codec.profile]), shard, lm_head)


def _interpolate(profile: str, threshold: float) -> tuple[float, float, float]:
    """Interpolate the table at ``threshold``, linearly in its logarithm.

    Thresholds beyond the ends of the table get the values of the ends.
    """
    rows = sorted(_MEASURED[profile].items())
    places = np.log([row[0] for row in rows])
    rest, tail, entries = (
        float(np.interp(math.log(threshold), places, [row[1][column] for row in rows]))
        for column in range(3)
    )
    return rest, tail, entries


def estimate_bytes(identity: CacheIdentity, positions: int, width: int) -> int:
    """Return the bytes of a whole cache of ``positions``; ``width`` is the teacher's, or 0."""
    size = estimate_cache_size(identity.record_codec(), width)
    return size.sum_bytes(positions, identity.shard_count)


def require_space(folder: Path, identity: CacheIdentity, positions: int, need: int) -> None:
    """Raise ``StorageError`` where the disk certainly cannot hold ``need`` bytes in ``folder``.

    What is already written of the cache counts as available, and so do its files.
    """
    there = list_file_sizes(folder)
    need -= sum(there.values())
    # Each array of a shard has its metadata and a chunk, the shard its own metadata and its seal.
    arrays = len(identity.record_codec().schema()) + _SEQUENCE_ARRAYS
    files = identity.shard_count * (2 * arrays + 2) - len(there)
    # This teacher may have a lower entropy than the table's, and need less: half must fit.
    if lacking := Disk.of(folder).find_shortage(math.ceil(need * 0.5), files):
        raise StorageError(
            f"{folder} needs about {format_bytes(need)} for {positions:,} tokens of profile "
            f"{identity.codec.profile}, in {files} files, but its disk has {lacking}.",
            "Free space, set KD_STORE or KD_HOME to another disk, or store less: raise "
            "cache.threshold or cache.shard_sequences, or lower data.max_train_samples. Run `kd "
            "estimate` to see the size in advance.",
        )
