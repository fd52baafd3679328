"""The guards that every request passes before it reaches a route, in the order of their use."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from services.api.auditing import Audit
from services.api.guards.host_origin import HostOriginGuard
from services.api.guards.rate_limits import Limiter
from services.settings import Settings
from services.store.key_file import KeyFile
from services.store.key_use import KeyUse

#: Request headers that a page of KD_ALLOWED_ORIGINS may send.
_REQUEST_HEADERS = [
    "Authorization",
    "Content-Type",
    "Idempotency-Key",
    "If-None-Match",
    "Last-Event-ID",
    "Range",
    "X-Request-ID",
]
#: Answer headers that a page of KD_ALLOWED_ORIGINS may read.
_EXPOSED_HEADERS = [
    "ETag",
    "Idempotent-Replayed",
    "Location",
    "Potstill-Key-Expires",
    "RateLimit",
    "RateLimit-Policy",
    "Retry-After",
    "X-Request-ID",
]


def add_guards(app: FastAPI, settings: Settings, audit: Audit, key_use: KeyUse) -> None:
    """Give ``app`` its keys, its rate limits, its audit log and its guards.

    Call this after every middleware that must run inside the guards was added: Starlette runs the
    middleware that was added last first.
    """
    app.state.keys = KeyFile(settings.api_keys_file) if settings.api_keys_file is not None else None
    app.state.limiter = Limiter(settings)
    app.state.audit = audit
    app.state.key_use = key_use
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allowed_origins),
            allow_methods=["GET", "POST", "PUT", "DELETE"],
            allow_headers=_REQUEST_HEADERS,
            expose_headers=_EXPOSED_HEADERS,
        )
    app.add_middleware(HostOriginGuard, settings=settings)
