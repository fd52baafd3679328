"""The API that the tests of a module in this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bench.support.harness import Parts
from tests.support.services.api import serving


@pytest.fixture(scope="module")
def serving_parts(
    _server_binary: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Parts]:
    """An API without limits on requests and without a worker."""
    with serving(tmp_path_factory.mktemp("api")) as parts:
        yield parts


@pytest.fixture(scope="module")
def api(serving_parts: Parts) -> Parts:
    """The same API; the tests of a module may empty its store before each of them."""
    return serving_parts


@pytest.fixture
def http(api: Parts) -> httpx.Client:
    """A client of the API, with an empty store."""
    api.jobs.redis.flushall()
    return api.http


@pytest.fixture
def text(api: Parts) -> str:
    """The folder of a text and a model that each caller may read."""
    return str(api.settings.home / "inputs")
