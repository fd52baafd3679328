"""``python -m services.api.reading.child``: looks into caches for the API that started it.

Its orders, and the answer besides those of ``services.api.line_process``:

    {"wish": "statistics", "folder": "...", "seed": 0}
    {"wish": "shards", "folder": "...", "damaged": ["...", ...], "expected": 0}
    {"wish": "records", "folder": "...", "sequence": 0, "start": 0, "limit": 50}
    {"wish": "teacher", "folder": "..."}

    {"no_sequence": 12}

statistics   histograms of a sample of the records
shards       the state of each shard; ``damaged`` are lines of a verification, and ``expected`` is
             the number of shards that a capture under way will write, or 0
records      records of one sequence with their text
teacher      the name and the revision of the cache's teacher, and whether it was spread
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from cache.json_object import Json
from cache.reading.memory import KeptValues
from cache.shards.names import MANIFEST
from cache.store import Cache, open_unchecked, read_manifest
from cache.viewing.grid import find_damaged_shards, read_grid
from cache.viewing.record_pages import read_page
from cache.viewing.sample import sample_cache
from cache.viewing.texts import TokenTexts
from services.api.line_process import answer_orders

#: Caches that stay open, and decoded chunks of each that stay in memory.
OPEN_CACHES = 4
CHUNK_BYTES = 64 << 20
#: Samples that are kept. Each has some thousand bytes.
KEPT_SAMPLES = 256


#: An open cache, and the text of its tokens.
OpenCache = tuple[Cache, TokenTexts | None]


def _open_cache(folder: Path) -> OpenCache:
    store = open_unchecked(folder, CHUNK_BYTES)
    tokens = store.token_map()
    return store, None if tokens is None else TokenTexts(tokens)


class CacheReader:
    """Answers orders. The caches that were read last stay open, and samples are kept.

    A cache that was captured anew is opened anew; its sample is the same, because a fingerprint
    stands for the bytes.
    """

    def __init__(self) -> None:
        self._opened: KeptValues[OpenCache] = KeptValues(OPEN_CACHES)
        self._samples: KeptValues[Json] = KeptValues(KEPT_SAMPLES)

    def answer(self, order: Json) -> Json:
        """Return the answer to one order."""
        try:
            return {"result": self._look(order["wish"], Path(order["folder"]), order)}
        except IndexError:
            return {"no_sequence": len(self._open(Path(order["folder"]))[0])}

    def _look(self, wish: str, folder: Path, order: Json) -> Json:
        if wish == "shards":
            damaged = find_damaged_shards(order["damaged"])
            return asdict(read_grid(folder, damaged, order["expected"]))
        if wish == "teacher":
            teacher = read_manifest(folder).teacher
            spread = bool(teacher.identity.parallel)
            return {"name": teacher.name, "revision": teacher.revision, "spread": spread}
        if wish == "statistics":
            key = (str(folder), order["seed"])
            return self._samples.get(key, self._sample, folder, order["seed"])
        numbers = (order[name] for name in ("sequence", "start", "limit"))
        return asdict(read_page(*self._open(folder), *numbers))

    def _sample(self, folder: Path, seed: int) -> Json:
        store, _ = self._open(folder)
        found = sample_cache(store, seed)
        return {**asdict(found), "whole": found.whole}

    def _open(self, folder: Path) -> OpenCache:
        """Open a cache, unless it is open already and has the same manifest since then."""
        try:
            # Of a cache in a bucket too: its manifest is kept in the folder.
            found = (folder / MANIFEST).stat()
        except OSError:
            return _open_cache(folder)
        key = (str(folder), found.st_ino, found.st_mtime_ns)
        return self._opened.get(key, _open_cache, folder)


if __name__ == "__main__":
    answer_orders(lambda settings: CacheReader().answer)
