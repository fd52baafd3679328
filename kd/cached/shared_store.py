"""The store of a cache as an object that processes can share: each of them opens it for itself."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from cache.errors import CacheNotFound
from cache.reading.usage import hold_for
from cache.remote.address import read_binding
from cache.shards.names import FINGERPRINT
from cache.store import Cache, open_cache
from kd.files import find_caches
from kd.loss.decoder import TargetDecoder

#: The data folder of a service and of ``kd run``, where KD_HOME does not name another.
DEFAULT_HOME = "potstill-data"


class SharedStore:
    """Opens the cache in ``folder`` once in each process that reads it.

    A store holds locks and open arrays, which neither a fork nor a pickle can carry over. Each
    process keeps decoded chunks of ``memory_bytes`` at most.
    """

    def __init__(self, folder: Path, memory_bytes: int) -> None:
        self.folder = folder
        self.memory_bytes = memory_bytes
        self._process = 0
        self._source: Cache | None = None
        self._decoder: TargetDecoder | None = None

    def open(self) -> Cache:
        """Return the cache, opened by this process; raises as ``open_cache`` does."""
        if self._source is None or self._process != os.getpid():
            store = open_cache(self.folder, memory_bytes=self.memory_bytes)
            hold_for(store, self.folder)
            self._process, self._source, self._decoder = os.getpid(), store, None
        return self._source

    def make_decoder(self) -> TargetDecoder:
        """Return the decoder of this process, on the CPU; hidden states need the teacher's head."""
        source = self.open()
        if self._decoder is None:
            self._decoder = TargetDecoder.of(source, torch.device("cpu"))
        return self._decoder

    def __getstate__(self) -> dict[str, object]:
        return vars(self) | {"_source": None, "_decoder": None}


def find_cache_folder(name: str | Path, home: str | Path | None) -> Path:
    """Return the folder of a cache, from its path or from its fingerprint.

    A fingerprint is looked up in ``home``/caches. The default of ``home`` is the environment
    variable KD_HOME, else potstill-data. Raises ``CacheNotFound`` if there is no such folder.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if not FINGERPRINT.fullmatch(str(name)):
        remedy = "Give the folder of a cache, or the 32 digits of its fingerprint (kd cache ls)."
        raise CacheNotFound(f"No cache at {path.absolute()}.", remedy)
    base = Path(home if home is not None else os.environ.get("KD_HOME", DEFAULT_HOME))
    found = find_caches(base.expanduser().resolve(), None) / str(name)
    if not found.is_dir() and read_binding(found.parent) is None:
        detail = f"No cache {name} in {found.parent}."
        raise CacheNotFound(detail, "Set home or KD_HOME to the data folder.")
    return found
