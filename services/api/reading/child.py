"""``python -m services.api.reading.child``: looks into caches for the API that started it.

It writes a line once it is ready, then reads one order a line from stdin and writes one answer a
line to stdout, both JSON:

    {"wish": "statistics", "folder": "...", "seed": 0}
    {"wish": "shards", "folder": "...", "damaged": ["...", ...], "expected": 0}
    {"wish": "records", "folder": "...", "sequence": 0, "start": 0, "limit": 50}
    {"wish": "teacher", "folder": "..."}

    {"result": {...}} | {"no_sequence": 12} | {"limit": "memory"}
    | {"failure": {"type": "...", "detail": "...", "remedy": "..."}}
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache.errors import PotstillError
from cache.reading.memory import KeptValues
from cache.store import Cache, open_unchecked, read_manifest
from cache.viewing.grid import find_damaged_shards, read_grid
from cache.viewing.record_pages import read_page
from cache.viewing.sample import sample_cache
from cache.viewing.texts import TokenTexts
from services.api.line_process import limit_memory
from services.process import logs
from services.settings import Settings

#: Caches that stay open, and decoded chunks of each that stay in memory.
OPEN_CACHES = 4
CHUNK_BYTES = 64 << 20
#: Samples that are kept. Each has some thousand bytes.
KEPT_SAMPLES = 256


@dataclass(frozen=True)
class _OpenCache:
    """An open cache, the text of its tokens, and the manifest that it was opened with."""

    store: Cache
    texts: TokenTexts | None
    state: tuple[int, int]


class CacheReader:
    """Answers orders. The caches that were read last stay open, and samples are kept.

    A cache that was captured anew is opened anew; its sample is the same, because a fingerprint
    stands for the bytes.
    """

    def __init__(self) -> None:
        self._opened: OrderedDict[str, _OpenCache] = OrderedDict()
        self._samples: KeptValues[dict[str, Any]] = KeptValues(KEPT_SAMPLES)

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to one order."""
        try:
            return {"result": self._look(order["wish"], Path(order["folder"]), order)}
        except IndexError:
            return {"no_sequence": len(self._open(Path(order["folder"])).store)}
        except MemoryError:
            return {"limit": "memory"}
        except PotstillError as error:
            return {"failure": error.to_json()}

    def _look(self, wish: str, folder: Path, order: dict[str, Any]) -> dict[str, Any]:
        if wish == "shards":
            damaged = find_damaged_shards(order["damaged"])
            return read_grid(folder, damaged, order["expected"]).to_json()
        if wish == "teacher":
            return _read_teacher(folder)
        if wish == "statistics":
            key = (str(folder), order["seed"])
            return self._samples.get(key, self._sample, folder, order["seed"])
        opened = self._open(folder)
        numbers = (order[name] for name in ("sequence", "start", "limit"))
        return read_page(opened.store, opened.texts, *numbers).to_json()

    def _sample(self, folder: Path, seed: int) -> dict[str, Any]:
        return sample_cache(self._open(folder).store, seed).to_json()

    def _open(self, folder: Path) -> _OpenCache:
        key = str(folder)
        known = self._opened.get(key)
        # Of a cache in a bucket too: its manifest is kept in the folder.
        state = _read_state(folder)
        if known is None or state is None or known.state != state:
            store = open_unchecked(folder, CHUNK_BYTES)
            tokens = store.token_map()
            texts = None if tokens is None else TokenTexts(tokens)
            known = self._opened[key] = _OpenCache(store, texts, _read_state(folder) or (0, 0))
        self._opened.move_to_end(key)
        while len(self._opened) > OPEN_CACHES:
            self._opened.popitem(last=False)
        return known


def _read_state(folder: Path) -> tuple[int, int] | None:
    """Return what changes when the manifest is written anew; None without one."""
    try:
        found = (folder / "manifest.json").stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _read_teacher(folder: Path) -> dict[str, Any]:
    """Return how a job names the teacher of a cache."""
    teacher = read_manifest(folder).teacher
    return {
        "name": teacher.name,
        "revision": teacher.revision,
        "spread": bool(teacher.identity.parallel),
    }


def main() -> None:
    """Answer orders until stdin ends."""
    # The end of stdin ends this process; a signal to the group of a terminal does not.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What a library prints must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    settings = Settings()
    logs.configure(settings)
    limit_memory(settings.plan_memory_bytes)
    reader = CacheReader()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(reader.answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
