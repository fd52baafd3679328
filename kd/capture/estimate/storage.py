"""Estimate the bytes of a cache from its codec, and check the free disk space."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from cache.codec import Codec
from cache.disk import list_file_sizes
from cache.errors import StorageError
from cache.manifest import CacheIdentity
from kd.files import Disk, format_bytes

#: Arrays of a shard that every profile has: tokens, starts of documents, mask of the targets.
_SEQUENCE_ARRAYS = 3


@dataclass(frozen=True)
class CacheSize:
    """Bytes on disk: of each position, of each shard besides its positions, and of a cache once.

    The last are those of an LM head, or of the tables of the dither.
    """

    position: float
    shard: float
    once: int = 0

    def sum_bytes(self, positions: int, shards: int) -> int:
        """Return the bytes of a whole cache."""
        return math.ceil(self.position * positions + self.shard * shards) + self.once


def estimate_cache_size(codec: Codec, width: int = 0) -> CacheSize:
    """Estimate the bytes of a cache with ``codec``.

    Profile hidden needs ``width``, D of the teacher.
    """
    rules = codec.rules
    once = math.ceil(rules.estimate_once(codec, width))
    return CacheSize(rules.estimate_position(codec, width), rules.estimate_shard(codec), once)


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
