"""Server-sent events: the bytes of a stream become the events of a job."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime

from kd.client.wire.history import JobEvent


class EventDecoder:
    """Decodes a stream that arrives in pieces.

    Each line holds one field, an empty line ends an event, and a line that begins with a colon is
    a comment. An event that the end of the stream cuts is dropped: it comes again after a
    reconnect. Source: the section "Server-sent events" of the HTML standard.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._fields: dict[str, str] = {}

    def feed(self, piece: bytes) -> Iterator[JobEvent]:
        """Yield the events that end in ``piece``."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            name, _, value = line.rstrip(b"\r").decode().partition(":")
            if name:
                self._fields[name] = value.removeprefix(" ")
            elif not line.strip() and "data" in self._fields:
                fields, self._fields = self._fields, {}
                milliseconds = int(fields["id"].partition("-")[0])
                ts = datetime.fromtimestamp(milliseconds / 1000, UTC)
                data = json.loads(fields["data"])
                yield JobEvent(id=fields["id"], ts=ts, type=fields["event"], data=data)
