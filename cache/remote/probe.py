"""Test whether a bucket can hold caches: each property that they need, tried with small objects.

Several writers of one cache agree only by conditional writes. A server that accepts the condition
and ignores it would let two of them win, so it is refused before anything is written.
"""

from __future__ import annotations

import functools
import os
import uuid
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from cache.disk import PROBE_BYTES, measure_seconds
from cache.errors import StoreError, StoreUnfit
from cache.remote.address import StoreAddress, read_binding
from cache.remote.bucket import Bucket

#: The folder of a bucket in which it is tried.
PROBE_FOLDER = "potstill-probe"
#: Objects that are put and got for the rate.
_RATE_OBJECTS = 8


class Property(NamedTuple):
    """One property of a bucket: whether it holds, and what was seen."""

    name: str
    holds: bool
    seen: str


def require_store(root: Path, writes: bool) -> None:
    """Raise ``StoreError`` now if the bucket that ``root`` mirrors cannot be used.

    A folder of caches passes. A bucket that is only read need not take writes.
    """
    binding = read_binding(root)
    if binding is None:
        return
    bucket = Bucket(binding.address, patient=False, probes=True)
    if writes:
        require_fit(bucket)
    else:
        next(bucket.walk(PROBE_FOLDER), None)


def require_fit(bucket: Bucket) -> None:
    """Raise ``StoreUnfit`` if a bucket lacks a property; each bucket is tried once a process."""
    _require_fit(bucket.address, os.getpid())


@functools.lru_cache(maxsize=16)
def _require_fit(address: StoreAddress, _process: int) -> None:
    for each in probe(Bucket(address, patient=False, probes=True)):
        if not each.holds:
            raise StoreUnfit(
                f"{address} cannot hold caches: {each.name}: {each.seen}.",
                "Use a server that has conditional writes, such as AWS S3, SeaweedFS 4.17 or "
                "later, MinIO or Ceph; `kd store check URL` shows every property.",
            )


def probe(bucket: Bucket) -> Iterator[Property]:
    """Try each property of ``bucket`` in turn; nothing is left in it.

    Raises ``StoreError`` if the bucket does not answer, or refuses access.
    """
    # Unique, so that several processes can probe at the same time.
    folder = f"{PROBE_FOLDER}/{uuid.uuid4().hex}"
    name = f"{folder}/object"
    try:
        # An answer may get lost: then the content tells whether our own write was first.
        first = bucket.create(name, b"first") or bucket.get(name) == b"first"
        yield Property("put", first, "an object is written" if first else "it exists already")
        yield _check(
            "create only if there is none",
            not bucket.create(name, b"second") and bucket.get(name) == b"first",
            "the second write is refused",
            "the second write is accepted, and replaces the first: the condition is ignored",
        )
        tag = bucket.get_tagged(name).tag
        replaced = bucket.replace(name, b"third", tag) or bucket.get(name) == b"third"
        yield _check(
            "replace only what was read",
            replaced and not bucket.replace(name, b"fourth", tag) and bucket.get(name) == b"third",
            "a write with an old tag is refused",
            "a write with an old tag is accepted, or one with the right tag is refused",
        )
        found = [each.name for each in bucket.walk(folder)]
        yield _check("list", found == [name], "the object is listed", f"got {found}")
        bucket.delete([name])
        with suppress(FileNotFoundError):
            bucket.get(name)
            yield Property("delete", False, "the object is still there")
            return
        yield Property("delete", True, "the object is gone")
    finally:
        with suppress(StoreError):
            bucket.delete([name])


def measure_rate(bucket: Bucket) -> tuple[float, float]:
    """Return the bytes a second that one connection puts and gets, in objects of a shard's size."""
    folder = f"{PROBE_FOLDER}/{uuid.uuid4().hex}"
    names = [f"{folder}/{number}" for number in range(_RATE_OBJECTS)]
    data = os.urandom(PROBE_BYTES)
    try:
        put = sum(measure_seconds(partial(bucket.put, name, data)) for name in names)
        got = sum(measure_seconds(partial(bucket.get, name)) for name in names)
    finally:
        bucket.delete(names)
    size = PROBE_BYTES * _RATE_OBJECTS
    return size / put, size / got


def _check(name: str, holds: bool, good: str, bad: str) -> Property:
    return Property(name, holds, good if holds else bad)
