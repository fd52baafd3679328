"""Both clients behind one face, so that every test runs with each of them."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.support.harness import Parts
from kd.client.asynchronous import AsyncClient
from kd.client.sync import Client
from tests.support.services.api import serving

Connect = Callable[..., Any]


class Blocking:
    """An ``AsyncClient`` that is called without an event loop."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._runner = asyncio.Runner()
        self._client = AsyncClient(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        """Return the method of the same name, which waits for its result."""
        found = getattr(self._client, name)
        return (
            (lambda *args, **more: self._wait(found(*args, **more))) if callable(found) else found
        )

    def with_patience(self, seconds: float) -> Blocking:
        """Return one with another patience in the same event loop."""
        other = Blocking.__new__(Blocking)
        other._runner = self._runner
        other._client = self._client.with_patience(seconds)
        return other

    def _wait(self, result: Any) -> Any:
        if inspect.isasyncgen(result):
            return self._iterate(result)
        return self._runner.run(result) if inspect.iscoroutine(result) else result

    def _iterate(self, items: AsyncIterator[Any]) -> Iterator[Any]:
        async def advance() -> Any:
            return await anext(items, None)

        while (item := self._runner.run(advance())) is not None:
            yield item

    def close(self) -> None:
        """Close the client and its event loop."""
        self._runner.run(self._client.close())
        self._runner.close()


@pytest.fixture(params=[Client, Blocking], ids=["sync", "async"])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Make clients, which end with the test."""
    made: list[Any] = []

    def make(*arguments: Any, **options: Any) -> Any:
        made.append(request.param(*arguments, **options))
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
