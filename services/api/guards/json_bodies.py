"""Reads the JSON body of a request, and refuses what no job record could hold, and If-Match."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from kd.config.jobfile import find_unusable_text
from kd.errors import ConfigError
from services.api.answers.problems import ApiProblem


class StrictRoute(APIRoute):
    """A route whose requests have their JSON bodies read by ``parse_body``."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler of the route, called with a ``StrictRequest``."""
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            # A client that sends If-Match relies on a check that no route makes.
            if "if-match" in request.headers:
                raise ApiProblem(
                    400,
                    "If-Match is not supported: the version of a record is not compared.",
                    "Send the request without it. An action that the job's status forbids answers "
                    "409.",
                    "precondition-unsupported",
                )
            return await handle(StrictRequest(request.scope, request.receive))

        return handle_strictly


class StrictRequest(Request):
    """A request whose JSON body has each key once, and Unicode text in every string."""

    async def json(self) -> Any:
        """Return the parsed body. Raises ``ApiProblem`` or ``ConfigError`` if it is refused."""
        if not hasattr(self, "_json"):
            self._json = parse_body(await self.body())
        return self._json


def parse_body(body: bytes) -> Any:
    """Parse JSON.

    Raises ``json.JSONDecodeError`` for text that is no JSON, ``ApiProblem`` (400) for a key that an
    object has twice, and ``ConfigError`` for each string that is not Unicode or holds NUL.
    """
    data = json.loads(body, object_pairs_hook=_refuse_duplicates)
    if problems := list(find_unusable_text(data)):
        raise ConfigError(problems)
    return data


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        (twice, _), *_ = counts.most_common(1)
        remedy = "Send each key once: parsers differ in which of the two they take."
        raise ApiProblem(400, f"The body has the key {twice!a} twice in one object.", remedy)
    return found
