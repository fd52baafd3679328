"""Fixtures of buckets: the way to a server, and a place of its own in it for each test."""

import uuid
from collections.abc import Callable

import pytest

from bench.stores.server import BUCKET, Server, make_environment
from cache.remote import bucket, probe
from cache.remote.address import StoreAddress


@pytest.fixture
def reach(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A function that makes this process reach the server or the proxy at a port."""

    def reach_port(port: int) -> None:
        for name, value in make_environment(port).items():
            monkeypatch.setenv(name, value)
        bucket._open_bucket.cache_clear()
        probe._require_fit.cache_clear()

    return reach_port


@pytest.fixture
def address(s3_server: Server, reach: Callable[[int], None]) -> str:
    """A place in the bucket that no other test uses."""
    reach(s3_server.port)
    return f"s3://{BUCKET}/{uuid.uuid4().hex[:12]}"


@pytest.fixture
def objects(address: str) -> Callable[[], set[str]]:
    """A function that returns the names of all objects, without the place of the test."""

    def list_objects() -> set[str]:
        return {each.name for each in bucket.Bucket(StoreAddress.parse(address)).walk("")}

    return list_objects
