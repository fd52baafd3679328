"""Checks of the Host and Origin headers, and the security headers of every answer.

    Host      must be one of KD_ALLOWED_HOSTS, or the address that the API listens on. A page can
              therefore not rebind its own name to this server (DNS rebinding). The health paths
              accept any Host, because a probe uses the address that it happens to know.
    Origin    of a request that changes something must be this site or one of KD_ALLOWED_ORIGINS.

Pages of other sites can read nothing: CORS is off except for KD_ALLOWED_ORIGINS.
"""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.api.answers.problems import ApiProblem, respond_with_problem
from services.api.guards.rate_limits import SAFE_METHODS
from services.settings import Settings

HEALTH_PATHS = {f"{prefix}/{name}" for prefix in ("", "/v1") for name in ("healthz", "readyz")}
#: Headers that tell a browser what it must not do with any answer.
SAFE_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
#: The policy of answers that are not pages: nothing in them may run or load anything.
INERT_POLICY = "default-src 'none'; frame-ancestors 'none'"
#: The policy of HTML pages that set no policy of their own.
PAGE_POLICY = "frame-ancestors 'none'; base-uri 'none'; object-src 'none'"


class HostOriginGuard:
    """Refuses requests that a foreign page made a browser send, and adds the security headers."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._hosts = frozenset(
            host.lower() for host in (*settings.allowed_hosts, *_list_host_names(settings.host))
        )
        self._origins = frozenset(settings.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 400 or 403."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        headers = Headers(scope=scope)

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                answered = MutableHeaders(scope=message)
                for name, value in {**SAFE_HEADERS, **state.get("headers", {})}.items():
                    answered.setdefault(name, value)
                is_page = answered.get("content-type", "").startswith("text/html")
                policy = PAGE_POLICY if is_page else INERT_POLICY
                answered.setdefault("Content-Security-Policy", policy)
            await send(message)

        exempt = scope["path"] in HEALTH_PATHS
        refusal = None if exempt else self._find_refusal(scope["method"], headers)
        if refusal is None:
            await self._app(scope, receive, send_marked)
        else:
            await respond_with_problem(Request(scope), refusal)(scope, receive, send_marked)

    def _find_refusal(self, method: str, headers: Headers) -> ApiProblem | None:
        host = headers.get("host", "")
        origin = headers.get("origin")
        if not self._is_known(host):
            detail = f"This server does not answer to the name {_strip_port(host)!r}."
            remedy = "Call it by a name in KD_ALLOWED_HOSTS, or ask the operator to add this one."
            return ApiProblem(400, detail, remedy, "bad-host")
        # A request without an Origin header does not come from a page.
        harmless = method in SAFE_METHODS or origin is None
        if harmless or origin in self._origins or _is_same_site(origin or "", host):
            return None
        detail = f"A page of {origin} may not change anything here."
        remedy = "To allow it, the operator adds that origin to KD_ALLOWED_ORIGINS."
        return ApiProblem(403, detail, remedy, "foreign-origin")

    def _is_known(self, host: str) -> bool:
        name = _strip_port(host)
        labels = name.split(".")
        # "*.example.org" allows every name below example.org, but not example.org itself.
        parents = (".".join(["*", *labels[start:]]) for start in range(1, len(labels)))
        return bool(name) and not self._hosts.isdisjoint({name, "*", *parents})


def _list_host_names(bound: str) -> tuple[str, ...]:
    """Return how a Host header writes the address ``bound``; nothing if it is "every address"."""
    try:
        address = ipaddress.ip_address(bound)
    except ValueError:
        return (bound,)
    if address.is_unspecified:
        return ()
    return (f"[{address}]" if address.version == 6 else str(address),)


def _strip_port(host: str) -> str:
    """Return the name in a Host header, without its port, in lower case."""
    return re.sub(r":\d*$", "", host).lower()


def _is_same_site(origin: str, host: str) -> bool:
    """Whether a page came from this host and port."""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower()
