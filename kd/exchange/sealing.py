"""Seal a cache with sequences and records that were read from files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import TypeVar

from cache.json_object import Json
from cache.manifest import CacheIdentity
from cache.records import Records, Sequences
from cache.store import open_cache
from cache.writing.writer import CacheWriter, open_writer
from kd.capture.capturing import summarise_cache
from kd.progress import Monitor, ProgressMeter

Item = TypeVar("Item")


def seal_cache(
    root: Path,
    identity: CacheIdentity,
    items: Iterable[Item],
    encode: Callable[[Item, int], tuple[Sequences, Records]],
    finish: Callable[[CacheWriter], None],
    monitor: Monitor,
    begin: Callable[[CacheWriter], None] = lambda writer: None,
) -> Json:
    """Write the missing shards of a cache below ``root``, then seal it; return its summary.

    ``items`` yields every sequence of the cache in order, and one shard of them is in memory.
    ``encode`` makes the arrays of one, which it gets with its number. ``begin`` writes what the
    shards need, ``finish`` all else.
    """
    monitor.emit("stage", stage="import", phase="writing")
    # The writer holds a lock: another import of the same records waits here.
    waiting = "while the same records are imported"
    with open_writer(root, identity, lambda: monitor.check(waiting)) as writer:
        begin(writer)
        missing = writer.find_missing_shards()
        meter = ProgressMeter(identity.data.sequences, "sequences")
        size = identity.codec.shard_sequences
        for index, part in groupby(enumerate(items), lambda pair: pair[0] // size):
            numbered = list(part)
            if index in missing:
                parts = [encode(item, number) for number, item in numbered]
                sequences = Sequences.concatenate(each for each, _ in parts)
                writer.write_shard(index, sequences, Records.concatenate(each for _, each in parts))
            monitor.emit("progress", **meter.advance(len(numbered), 0))
            monitor.check(f"after shard {index + 1} of {identity.shard_count}")
        finish(writer)
    return summarise_cache(open_cache(root / identity.fingerprint, identity), reused=False)
