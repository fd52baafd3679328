"""Answers that hold bytes: all of them, or the part that the Range header names (RFC 9110).

If the client already has the bytes, by If-None-Match, the answer is an empty 304.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import Request, Response
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from services.api.answers.problems import ApiProblem

#: Bytes that are read and sent at one time.
PIECE_BYTES = 1 << 20
#: A single range. The 18 digits keep a hostile number from costing anything.
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.IGNORECASE)


@dataclass(frozen=True)
class ByteSource:
    """Something to send: ``size`` bytes, of which ``read(start, stop)`` returns any part."""

    size: int
    media_type: str
    read: Callable[[int, int], bytes]
    #: The ETag, in quotes; None if the content may change.
    tag: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    close: Callable[[], None] | None = None

    @classmethod
    def of_file(cls, handle: int, size: int, media_type: str, **more: Any) -> ByteSource:
        """Return a source of an open file, which is closed with it."""

        def read(start: int, stop: int) -> bytes:
            return os.pread(handle, stop - start, start)

        return cls(size, media_type, read, close=lambda: os.close(handle), **more)

    def skip_to(self, start: int) -> ByteSource:
        """Return a source of the bytes from ``start`` on."""
        read = self.read
        return replace(
            self, size=self.size - start, read=lambda first, stop: read(first + start, stop + start)
        )

    def read_pieces(self, start: int, stop: int) -> Iterator[bytes]:
        """Yield the bytes from ``start`` to ``stop`` in pieces."""
        for place in range(start, stop, PIECE_BYTES):
            yield self.read(place, min(place + PIECE_BYTES, stop))

    def release(self) -> None:
        """Close the file that is read; must be called exactly once."""
        if self.close is not None:
            self.close()


class ByteRangeResponse(StreamingResponse):
    """Streams a part of ``content``, and releases it at the end.

    The release also happens if the client leaves before the first byte.
    """

    def __init__(
        self, content: ByteSource, start: int, stop: int, status: int, headers: Mapping[str, str]
    ) -> None:
        super().__init__(content.read_pieces(start, stop), status, headers, content.media_type)
        self._content = content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the bytes, then release them: Starlette has waited for the reader by then."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._content.release()


def send_bytes(request: Request, content: ByteSource) -> Response:
    """Answer a GET or HEAD of ``content``: 200, 206, 304, or 416 for a range outside of it."""
    headers = {"Accept-Ranges": "bytes", **content.headers} | (
        {"ETag": content.tag} if content.tag else {}
    )
    seen = request.headers.get("if-none-match", "")
    if content.tag and (seen.strip() == "*" or content.tag in re.findall(r'"[^"]*"', seen)):
        return _respond_without_body(content, 304, headers)
    start, stop = _parse_range(request, content)
    status = 200
    if (start, stop) != (0, content.size):
        status = 206
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{content.size}"
    headers["Content-Length"] = str(stop - start)
    if request.method == "HEAD":
        headers["Content-Type"] = content.media_type
        return _respond_without_body(content, status, headers)
    return ByteRangeResponse(content, start, stop, status, headers)


def _respond_without_body(content: ByteSource, status: int, headers: dict[str, str]) -> Response:
    content.release()
    return Response(status_code=status, headers=headers)


def _parse_range(request: Request, content: ByteSource) -> tuple[int, int]:
    """Return start and stop of the part that the Range header names.

    All bytes are the answer if there is no Range, if it has another form, or if If-Range names
    another version of the content.
    """
    found = _RANGE.fullmatch(request.headers.get("range", ""))
    if (
        found is None
        or found.groups() == ("", "")
        or request.headers.get("if-range", content.tag) != content.tag
    ):
        return 0, content.size
    first, last = found.groups()
    if first:
        start = int(first)
        stop = min(int(last or content.size) + 1, content.size)
    else:  # "-500" names the last 500 bytes
        start = max(0, content.size - int(last))
        stop = content.size
    if start >= stop:
        content.release()
        headers = {"Content-Range": f"bytes */{content.size}"}
        detail = f"There are {content.size} bytes."
        raise ApiProblem(416, detail, "Ask for a range within them.", headers=headers)
    return start, stop
