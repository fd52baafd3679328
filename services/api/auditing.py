"""The audit log as the API writes it: what callers did, and who was refused."""

from __future__ import annotations

import threading
import time
from typing import Any

from fastapi import Request

from services.process.logs import request_id
from services.settings import Settings
from services.store.audit import AuditLog
from services.store.callers import Caller

#: Refusals that one process writes in ``REFUSAL_SECONDS``; the next entry counts the others.
#: Otherwise a stranger could fill the log, and push out what callers did.
REFUSALS = 10
REFUSAL_SECONDS = 60.0


class Audit:
    """Writes what requests did. Thread-safe."""

    def __init__(self, settings: Settings) -> None:
        self.log = AuditLog(settings)
        self._lock = threading.Lock()
        self._window = 0.0
        self._written = 0
        self._left_out = 0

    def record(self, caller: Caller, action: str, target: str, **more: Any) -> None:
        """Write what a caller did, after it is done.

        It cannot be undone any more, so an entry that cannot be written is an error in the log of
        the process, and the request succeeds.
        """
        facts = {"team": caller.team, "key": caller.key_id, **more}
        self._write(caller.name, action, target, **facts)

    def refuse(self, request: Request, actor: str, action: str, why: str) -> None:
        """Write that a request was refused, unless there are too many."""
        with self._lock:
            now = time.monotonic()
            if now - self._window > REFUSAL_SECONDS or not self._window:
                self._window, self._written = now, 0
            if self._written >= REFUSALS:
                self._left_out += 1
                return
            self._written += 1
            left_out, self._left_out = self._left_out, 0
        address = None if request.client is None else request.client.host
        facts = {"outcome": "refused", "why": why, "address": address, "left_out": left_out or None}
        self._write(actor, action, f"{request.method} {request.url.path}", **facts)

    def _write(self, actor: str, action: str, target: str, **more: Any) -> None:
        self.log.record(actor, action, target, request_id=request_id.get() or None, **more)
