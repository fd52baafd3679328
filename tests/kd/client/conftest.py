"""Clients of a real API."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.support.harness import Parts
from kd.client.client import Client
from tests.support.services.api import serving

Connect = Callable[..., Client]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Make clients, which end with the test."""
    made: list[Client] = []

    def make(*arguments: Any, **options: Any) -> Client:
        made.append(Client(*arguments, **options))
        return made[-1]

    yield make
    for client in made:
        client.close()


@pytest.fixture(scope="module")
def api(_server_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    """An API without a worker and without limits on requests."""
    with serving(tmp_path_factory.mktemp("api")) as parts:
        yield parts


@pytest.fixture
def text(api: Parts) -> str:
    """The folder of a text and a model that each caller may read."""
    return str(api.settings.home / "inputs")
