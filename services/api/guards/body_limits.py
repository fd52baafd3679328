"""Limits on the body of a request: its size in bytes, and how deeply its JSON is nested."""

from __future__ import annotations

import re
from itertools import accumulate

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: The largest body of a request, in bytes.
BODY_BYTES = 1 << 20
#: The deepest nesting of a request's JSON. No valid job comes near it, and any parser can read it.
JSON_DEPTH = 32

#: The paths that take files, which are no JSON: their route limits and checks them as they arrive.
UPLOAD_PATHS = ("/files/", "/v1/files/")


def _is_upload(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] != "PUT":
        return False
    return bool(scope["path"].startswith(UPLOAD_PATHS))


class BodyLimit:
    """Refuses a body of more than ``BODY_BYTES`` (413), or with JSON below ``JSON_DEPTH`` (400).

    The refusal comes as soon as it is known: from Content-Length, or while the body is read. A file
    that is uploaded has the limits of its route.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and measure size and depth of its body as it is read."""
        length = dict(scope.get("headers", ())).get(b"content-length", b"0")
        declared = int(length) if length.isdigit() else 0
        received, depth = 0, JsonDepth()

        async def receive_limited() -> Message:
            nonlocal received
            # A body that is declared too large is not read at all.
            message: Message = {"type": "http.disconnect"}
            if declared <= BODY_BYTES:
                message = await receive()
            piece: bytes = message.get("body", b"")
            if depth.feed(piece) > JSON_DEPTH:
                raise HTTPException(400, f"The body is nested deeper than {JSON_DEPTH} levels.")
            received += len(piece)
            if max(declared, received) > BODY_BYTES:
                raise HTTPException(413, f"The body is larger than {BODY_BYTES} bytes.")
            return message

        await self._app(scope, receive if _is_upload(scope) else receive_limited, send)


# The quantifiers below are possessive (`++`, `*+`): they never backtrack, so that no body can make
# a match take quadratic time.

#: The inside of a string, up to its closing quote or to the end of the piece.
_INSIDE = rb'(?:[^"\\]++|\\.)*+'
_REST_OF_STRING = re.compile(_INSIDE, re.DOTALL)
_STRINGS = re.compile(b'"' + _INSIDE + b'"', re.DOTALL)
#: Everything before the first string that does not end in the piece.
_CLOSED = re.compile(b'(?:[^"]++|"' + _INSIDE + b'")*+', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_DEPTH_CHANGES = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


class JsonDepth:
    """Measures the nesting depth of JSON that is read piece by piece.

    Brackets inside strings do not count. Each byte is read once, at the speed of the standard
    library's scanners, because any client may send any body.
    """

    def __init__(self) -> None:
        self._now = 0
        self._deepest = 0
        self._in_string = False
        self._escaped = False

    def feed(self, piece: bytes) -> int:
        """Read ``piece``; return the greatest depth so far."""
        start = self._skip_string(piece, 0) if self._in_string else 0
        if not self._in_string:
            # Where a string begins that does not end in the piece, or else the end of the piece.
            match = _CLOSED.match(piece, start)
            end = match.end() if match else start
            brackets = _STRINGS.sub(b"", piece[start:end]).translate(None, _NOT_BRACKETS)
            depths = list(accumulate(map(_DEPTH_CHANGES.__getitem__, brackets), initial=self._now))
            self._now = depths[-1]
            self._deepest = max(self._deepest, *depths)
            if end < len(piece):
                self._in_string = True
                self._skip_string(piece, end + 1)
        return self._deepest

    def _skip_string(self, piece: bytes, start: int) -> int:
        """Return the place after the open string; note whether the string ends in ``piece``."""
        if self._escaped and piece:
            # The last piece ended with a backslash, which escapes the first byte of this one.
            self._escaped = False
            start += 1
        match = _REST_OF_STRING.match(piece, start)
        end = match.end() if match else start
        self._in_string = piece[end : end + 1] != b'"'
        # A backslash that matches nothing is the last byte: the next piece has the byte after it.
        self._escaped = self._escaped or piece[end : end + 1] == b"\\"
        return end + 1
