"""Who uses a cache in a bucket, on any machine: an object for each user, put anew while it lives.

A user that dies leaves its object behind, which counts for ``FRESH_SECONDS`` after it was put. All
times are the server's, so the clocks of the machines need not agree.
"""

from __future__ import annotations

import os
import socket
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cache.errors import CacheError, StoreError
from cache.remote.address import read_binding
from cache.remote.bucket import Bucket, StoredObject

#: The folder of the objects, in that of a cache.
USES = "uses"
#: Seconds between two puts of one user, and those after the last one for which it counts.
REFRESH_SECONDS = 300.0
FRESH_SECONDS = 1200.0


class _Use:
    """One user's object. A thread puts it anew until ``end``."""

    def __init__(self, bucket: Bucket, folder: str) -> None:
        self._bucket = bucket
        self._name = f"{folder}/{USES}/{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._ended = threading.Event()
        self._process = os.getpid()
        bucket.put(self._name, b"{}")
        threading.Thread(target=self._refresh, name="bucket-use", daemon=True).start()

    def _refresh(self) -> None:
        while not self._ended.wait(REFRESH_SECONDS):
            with suppress(StoreError):
                self._bucket.put(self._name, b"{}")

    def end(self) -> None:
        self._ended.set()
        if os.getpid() == self._process:  # a fork does not end the use of its parent
            with suppress(StoreError):
                self._bucket.delete([self._name])


@contextmanager
def held_in_bucket(folder: Path) -> Iterator[None]:
    """Tell all machines that the cache is in use in this block.

    Nothing is told if ``folder`` mirrors no bucket, or if this machine may only read.
    """
    use = None
    if (binding := read_binding(folder.parent)) is not None:
        with suppress(StoreError):
            use = _Use(Bucket(binding.address), folder.name)
    try:
        yield
    finally:
        if use is not None:
            use.end()


def require_unused(bucket: Bucket, folder: str) -> None:
    """Raise ``CacheError`` while somebody uses the cache in ``folder`` of the bucket."""
    now = ask_time(bucket, folder)
    for each in bucket.walk(f"{folder}/{USES}"):
        if is_fresh_use(each, now):
            raise CacheError(
                f"{bucket.address}/{folder} is in use: {each.name.rpartition('/')[2]}.",
                f"Wait until that run has ended; one that died counts for {FRESH_SECONDS:.0f} s.",
            )


def is_fresh_use(each: StoredObject, now: float) -> bool:
    """Return whether an object of the bucket says that somebody uses its cache ``now``."""
    return f"/{USES}/" in each.name and now - each.modified < FRESH_SECONDS


def ask_time(bucket: Bucket, folder: str) -> float:
    """Return the server's time, in seconds since 1970."""
    name = f"{folder}/time-{uuid.uuid4().hex[:8]}"
    bucket.put(name, b"{}")
    try:
        return next(each.modified for each in bucket.walk(folder) if each.name == name)
    finally:
        bucket.delete([name])
