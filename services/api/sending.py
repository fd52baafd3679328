"""Bytes as an answer: whole, or the part that Range names; nothing where the client has them already."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from fastapi import Request, Response
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from services.api.problems import ApiProblem

PIECE_BYTES = 1 << 20
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.IGNORECASE)


@dataclass(frozen=True)
class Ranged:
    """Something to send: ``size`` bytes, of which ``read(start, stop)`` gives any part."""

    size: int
    media_type: str
    read: Callable[[int, int], bytes]
    tag: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    close: Callable[[], None] | None = None

    def after(self, start: int) -> Ranged:
        """What begins at byte ``start``, as something of its own."""
        read = self.read
        return replace(self, size=self.size - start, read=lambda first, stop: read(first + start, stop + start))

    def pieces(self, start: int, stop: int) -> Iterator[bytes]:
        """The bytes from ``start`` to ``stop``."""
        for place in range(start, stop, PIECE_BYTES):
            yield self.read(place, min(place + PIECE_BYTES, stop))

    def let_go(self) -> None:
        """Close what it is read from; to be called once."""
        if self.close is not None:
            self.close()


class Sending(StreamingResponse):
    """A part of ``content`` on its way; lets go of it at the end, also of one whose client left before it began."""

    def __init__(self, content: Ranged, start: int, stop: int, status: int, headers: Mapping[str, str]) -> None:
        super().__init__(content.pieces(start, stop), status, headers, content.media_type)
        self._content = content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it. By the end no thread reads any more: Starlette waits for the one that does."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._content.let_go()


def send(request: Request, content: Ranged) -> Response:
    """The answer to a GET or HEAD of ``content``: 200, 206, 304, or 416 for bytes that there are none of."""
    headers = {"Accept-Ranges": "bytes", **content.headers} | ({"ETag": content.tag} if content.tag else {})
    if content.tag is not None and _matches(request.headers.get("if-none-match"), content.tag):
        return _without_body(content, 304, headers)
    start, stop = _asked(request, content)
    status = 200
    if (start, stop) != (0, content.size):
        status, headers["Content-Range"] = 206, f"bytes {start}-{stop - 1}/{content.size}"
    headers["Content-Length"] = str(stop - start)
    if request.method == "HEAD":
        return _without_body(content, status, {**headers, "Content-Type": content.media_type})
    return Sending(content, start, stop, status, headers)


def _without_body(content: Ranged, status: int, headers: dict[str, str]) -> Response:
    content.let_go()
    return Response(status_code=status, headers=headers)


def _matches(asked: str | None, tag: str) -> bool:
    return asked is not None and (asked.strip() == "*" or tag in re.findall(r'"[^"]*"', asked))


def _asked(request: Request, content: Ranged) -> tuple[int, int]:
    """The part that Range names; all where there is none, where it is of another form, or of other content."""
    found = _RANGE.fullmatch(request.headers.get("range", ""))
    if found is None or found.groups() == ("", "") or request.headers.get("if-range", content.tag) != content.tag:
        return 0, content.size
    first, last = found.groups()
    if first:
        start, stop = int(first), min(int(last or content.size) + 1, content.size)
    else:
        start, stop = max(0, content.size - int(last)), content.size
    if start >= stop:
        content.let_go()
        headers = {"Content-Range": f"bytes */{content.size}"}
        raise ApiProblem(416, f"There are {content.size} bytes.", "Ask for bytes that there are.", headers=headers)
    return start, stop
