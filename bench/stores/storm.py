"""A bucket that does wrong for a while: faults of an object store among those of the service."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from bench.stores.proxy import Proxy
from bench.stores.server import BUCKET, make_environment, run_server
from bench.support.faults import Cluster, Fault, FaultInjector

#: The part of the requests that go wrong during a fault.
SHARE = 0.6


class StormyBucket:
    """A real S3 server behind a proxy. ``storm`` is the fault of the moment, or nothing."""

    def __init__(self, proxy_port: int) -> None:
        self.environment = make_environment(proxy_port)
        self.address = f"s3://{BUCKET}/chaos"
        self.storm = ""

    def choose(self, dice: random.Random) -> str:
        """Choose the fault of one request."""
        return self.storm if self.storm and dice.random() < SHARE else ""


@contextmanager
def stormy_bucket(folder: Path, seed: int) -> Iterator[StormyBucket]:
    """Run the server and the proxy."""
    dice = random.Random(seed)
    with run_server(folder) as server:
        proxy = Proxy(server.port, lambda *_: bucket.choose(dice))
        bucket = StormyBucket(proxy.port)
        with proxy.running():
            yield bucket


class BucketFaultInjector(FaultInjector):
    """Hurts the bucket too: for some seconds most of its requests go wrong in one way."""

    KINDS: ClassVar[dict[str, tuple[int, str]]] = FaultInjector.KINDS | {
        "bucket refused": (8, "bucket"),
        "bucket busy": (6, "bucket"),
        "bucket throttled": (6, "bucket"),
        "bucket late": (6, "bucket"),
        "bucket cut": (8, "bucket"),
        "bucket lost": (10, "bucket"),
        "bucket short": (8, "bucket"),
    }

    def __init__(self, cluster: Cluster, seed: int, bucket: StormyBucket) -> None:
        super().__init__(cluster, seed, self.KINDS)
        self.bucket = bucket

    def _victim(self, whom: str) -> str | None:
        return "bucket" if whom == "bucket" else super()._victim(whom)

    def _storm(self, injury: Fault) -> Iterator[float]:
        self.bucket.storm = injury.kind.removeprefix("bucket ")
        yield self.dice.uniform(0.3, 3.0)
        self.bucket.storm = ""

    _bucket_refused = _bucket_busy = _bucket_throttled = _bucket_late = _storm
    _bucket_cut = _bucket_lost = _bucket_short = _storm
