"""What both clients tell httpx, and what its answers and errors mean."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import httpx

from kd.client.errors import Unreachable
from kd.client.steps import Answer, Request

#: The server of ``kd up`` with its default settings.
DEFAULT_SERVER = "http://127.0.0.1:8000"
CONNECT_SECONDS = 10.0


def warn_of_expiry(end: str) -> None:
    """Warn that the server will soon refuse the key."""
    warnings.warn(
        f"Your API key expires at {end}: ask the operator for a new one (`kd keys new`).",
        stacklevel=2,
    )


class Connection:
    """The address of a server, and the key that requests carry.

    ``server`` defaults to ``KD_SERVER``, and then to ``DEFAULT_SERVER``; ``key`` to ``KD_API_KEY``.
    """

    def __init__(
        self,
        server: str | None,
        key: str | None,
        on_expiry: Callable[[str], None] = warn_of_expiry,
    ) -> None:
        self.server = server or os.environ.get("KD_SERVER") or DEFAULT_SERVER
        self._key = key or os.environ.get("KD_API_KEY")
        self._on_expiry = on_expiry
        self._warned = False
        if not _is_address(self.server):
            raise Unreachable(
                f"The address of the server is {self.server!r}, which is not a URL.",
                f"Write it like {DEFAULT_SERVER}: the argument server, or KD_SERVER.",
            )

    def describe(self) -> dict[str, Any]:
        """Return the arguments of ``httpx.Client`` and ``httpx.AsyncClient``."""
        # A proxy could not reach a server on this machine, so its variables are ignored then.
        local = any(host in self.server for host in ("127.0.0.1", "localhost", "[::1]"))
        return {
            "base_url": self.server,
            "trust_env": not local,
            "headers": {"Authorization": f"Bearer {self._key}"} if self._key else {},
        }

    def describe_request(self, request: Request) -> dict[str, Any]:
        """Return the arguments of httpx's ``build_request``."""
        typed = {"Content-Type": "application/json"} if request.body is not None else {}
        return {
            "method": request.method,
            "url": request.path,
            "params": request.parameters,
            "content": request.body,
            "headers": {**typed, **request.headers},
            "timeout": httpx.Timeout(CONNECT_SECONDS, read=request.read_seconds),
        }

    def make_answer(self, response: httpx.Response, content: bytes = b"") -> Answer:
        """Return the answer; warn once if the key expires soon."""
        headers = {name.lower(): value for name, value in response.headers.items()}
        end = headers.get("potstill-key-expires")
        if end is not None and not self._warned:
            self._warned = True
            self._on_expiry(end)
        return Answer(response.status_code, response.reason_phrase, headers, content)

    def translate(self, error: Exception) -> Exception:
        """Return ``Unreachable`` for a connection that was not made or was cut; others as is."""
        if not isinstance(error, httpx.TransportError):
            return error
        detail = str(error) or type(error).__name__
        return Unreachable(
            f"No server answers at {self.server}: {detail}.",
            "Start one with `kd up`, or name another with --server or KD_SERVER.",
        )


def _is_address(text: str) -> bool:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        return False
    return url.scheme in ("http", "https") and bool(url.host)
