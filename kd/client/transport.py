"""Send one request over HTTP, and read its answer; httpx is known here only."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from kd.client.errors import Refused, Unreachable
from kd.client.requests import Request
from kd.client.wire.problems import ProblemDetails

#: The server of ``kd up`` with its default settings.
DEFAULT_SERVER = "http://127.0.0.1:8000"
CONNECT_SECONDS = 10.0
#: Bytes of a file that are read and sent at one time.
PIECE_BYTES = 1 << 18

Answer = httpx.Response
Model = TypeVar("Model", bound=BaseModel)


def warn_of_expiry(end: str) -> None:
    """Warn that the server will soon refuse the key."""
    warnings.warn(
        f"Your API key expires at {end}: ask the operator for a new one (`kd keys new`).",
        stacklevel=2,
    )


class Transport:
    """The connections to one server, and the key that requests carry.

    ``server`` defaults to ``KD_SERVER``, and then to ``DEFAULT_SERVER``; ``key`` to ``KD_API_KEY``.
    """

    def __init__(
        self, server: str | None, key: str | None, on_expiry: Callable[[str], None] = warn_of_expiry
    ) -> None:
        self.server = server or os.environ.get("KD_SERVER") or DEFAULT_SERVER
        self._on_expiry = on_expiry
        self._warned = False
        try:
            url = httpx.URL(self.server)
        except httpx.InvalidURL:
            url = httpx.URL()
        if url.scheme not in ("http", "https") or not url.host:
            detail = f"The address of the server is {self.server!r}, which is not a URL."
            remedy = f"Write it like {DEFAULT_SERVER}: the argument server, or KD_SERVER."
            raise Unreachable(detail, remedy)
        key = key or os.environ.get("KD_API_KEY")
        # A proxy could not reach a server on this machine, so its variables are ignored then.
        local = any(host in self.server for host in ("127.0.0.1", "localhost", "[::1]"))
        self._http = httpx.Client(
            base_url=self.server,
            trust_env=not local,
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def send(self, request: Request, stream: bool = False) -> Answer:
        """Send a request; return its answer, which is still to be read if it is a stream.

        Raises ``Unreachable``. Warns once if the key expires soon.
        """
        body = request.body
        typed = {"Content-Type": "application/json"} if body is not None else {}
        with self._losses_translated():
            answer = self._http.send(
                self._http.build_request(
                    request.method,
                    request.path,
                    params={name: each for name, each in request.query.items() if each is not None},
                    content=_read_pieces(body) if isinstance(body, Path) else body,
                    headers={**typed, **request.headers},
                    timeout=httpx.Timeout(CONNECT_SECONDS, read=request.read_seconds),
                ),
                stream=stream,
            )
        end = answer.headers.get("potstill-key-expires")
        if end is not None and not self._warned:
            self._warned = True
            self._on_expiry(end)
        return answer

    @contextmanager
    def stream(self, request: Request) -> Iterator[tuple[Answer, Iterator[bytes]]]:
        """Send a request; yield its answer, and its content in pieces as they arrive.

        Raises ``Refused`` if it has not succeeded, and ``Unreachable``, also while it is read.
        """
        with closing(self.send(request, stream=True)) as answer, self._losses_translated():
            if not answer.is_success:
                answer.read()
                raise make_refused(answer)
            yield answer, answer.iter_bytes()

    @contextmanager
    def _losses_translated(self) -> Iterator[None]:
        """Raise ``Unreachable`` for a connection that was not made or was cut."""
        try:
            yield
        except httpx.TransportError as error:
            detail = str(error) or type(error).__name__
            remedy = "Start one with `kd up`, or name another with --server or KD_SERVER."
            raise Unreachable(f"No server answers at {self.server}: {detail}.", remedy) from error


def _read_pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            yield piece


def parse_answer(model: type[Model], answer: Answer) -> Model:
    """Return the answer as a ``model``. Raises ``Refused`` if it is something else."""
    try:
        return model.model_validate_json(answer.content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the body"
        raise Refused(
            answer.status_code,
            f"The response is not a {model.__name__} of Potstill's API: {place}: {first['msg']}.",
            "Check the address of the server, and that client and server have one version.",
        ) from None


def make_refused(answer: Answer) -> Refused:
    """Return the error of an answer that is no success."""
    problem: ProblemDetails | None = None
    # A proxy on the way may answer with a document of another kind.
    if answer.headers.get("content-type", "").startswith("application/problem+json"):
        problem = parse_answer(ProblemDetails, answer)
    detail = (problem.detail if problem is not None else "") or (
        f"The server answers {answer.status_code} {answer.reason_phrase}."
    )
    remedy = problem.remedy if problem is not None else ""
    pause = answer.headers.get("retry-after", "")  # seconds; a date is passed over
    seconds = float(pause) if pause.isdecimal() else 0.0
    return Refused(answer.status_code, detail, remedy, problem, seconds)
