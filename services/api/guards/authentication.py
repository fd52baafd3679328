"""The caller of a request, found by its API key. The routes use this as FastAPI dependencies.

    caller: Annotated[Caller, Depends(authenticate)]   401 without a valid key, 429 above its rate
    dependencies=[Depends(require_scope("write"))]     also 403 if the key lacks the scope
    dependencies=[Depends(hold_stream)]                also 429 if the caller has too many streams

Without a key file every caller is ``LOCAL_CALLER`` and may do everything. ``require_safe_bind``
keeps such an API on loopback.
"""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from cache.errors import PotstillError
from services.api.answers.problems import ApiProblem, make_shortage_problem
from services.api.auditing import Audit
from services.api.guards.rate_limits import Limiter, StreamLease
from services.process.descriptors import are_few_left
from services.settings import Settings
from services.store.callers import LOCAL_CALLER, Caller
from services.store.key_file import SCOPES, ApiKey, KeyFile, KeysError
from services.store.key_use import KeyUse

#: The key of every request while there is no key file.
_LOCAL_KEY = ApiKey(LOCAL_CALLER.name, "", SCOPES, "")
_bearer = HTTPBearer(
    auto_error=False,
    description="An API key, as `kd keys new` shows it once.",
    scheme_name="ApiKey",
)

#: The header of answers to a key that expires soon, with the time of its end.
EXPIRY_HEADER = "Potstill-Key-Expires"
_CHALLENGE_HEADERS = {"WWW-Authenticate": 'Bearer realm="potstill"'}
_RETRY_HEADERS = {"Retry-After": "5"}

BearerCredentials = Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]


class UnsafeBind(PotstillError):
    """The API would be open to the network without keys."""

    type = "unsafe_bind"


def require_safe_bind(settings: Settings) -> None:
    """Raise ``UnsafeBind`` if other machines could call an API that asks for no key.

    Raises ``KeysError`` if the key file cannot be used, so that it shows at the start.
    """
    if settings.api_keys_file is not None:
        KeyFile(settings.api_keys_file).list_keys()
    elif not is_loopback(settings.host):
        raise UnsafeBind(
            f"the API would listen on {settings.host}, where other machines can call it,"
            " and ask for no key.",
            "Make a key (`kd keys new NAME`) and set KD_API_KEYS_FILE,"
            " or set KD_HOST to 127.0.0.1.",
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``.

    The only name that counts as loopback is ``localhost``: any other name may resolve anywhere.
    """
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def authenticate(request: Request, shown: BearerCredentials) -> Caller:
    """Return the caller, and count the request against the caller's rate.

    The headers of the answer show how many requests are left.
    """
    try:
        key = _find_key(request, shown)
    except ApiProblem as refusal:
        if shown is not None and refusal.status == 401:
            _audit(request, "unknown", "auth.failed", refusal.detail)
        raise
    request.state.key = key
    if key is not _LOCAL_KEY:
        key_use: KeyUse = request.app.state.key_use
        key_use.note(key.id)
    if key.expires_at is not None and key.expires_soon:
        request.state.headers = {EXPIRY_HEADER: key.expires_at.isoformat()}
    limiter: Limiter = request.app.state.limiter
    limiter.count_request(request, key.name)
    if key is _LOCAL_KEY:
        return LOCAL_CALLER
    return Caller(key.name, key.may("admin"), key.team, key.id)


def require_scope(scope: str) -> Callable[..., Awaitable[Caller]]:
    """Return a dependency that returns the caller, and raises 403 if its key lacks ``scope``."""

    async def caller_with_scope(
        request: Request, caller: Annotated[Caller, Depends(authenticate)]
    ) -> Caller:
        if not request.state.key.may(scope):
            _audit(request, caller.name, "auth.forbidden", f"no scope {scope}")
            remedy = f"Ask the operator for one: kd keys new {caller.name} --scopes {scope}."
            raise ApiProblem(403, f"the key of {caller.name} has no scope {scope}.", remedy)
        return caller

    return caller_with_scope


def count_validation(request: Request, caller: Annotated[Caller, Depends(authenticate)]) -> None:
    """A dependency of routes that check a job without creating it: they have a rate of their own.

    A dry run of ``POST /jobs`` is such a request too, and calls this by itself.
    """
    limiter: Limiter = request.app.state.limiter
    limiter.count_validation(request, caller.name)


async def hold_stream(
    request: Request, caller: Annotated[Caller, Depends(authenticate)], shown: BearerCredentials
) -> AsyncIterator[StreamLease]:
    """A dependency of routes that stream: it holds one of the caller's streams until the end.

    The route must end its answer once the lease is lost. That happens when the key is revoked or
    the key file can no longer be trusted. Raises 503 where only descriptors for requests are left.
    """
    if are_few_left():
        raise make_shortage_problem()
    limiter: Limiter = request.app.state.limiter

    def is_still_valid() -> bool:
        """Whether the key would still be accepted, and as that of the same caller."""
        try:
            return bool(_find_key(request, shown) == request.state.key)
        except ApiProblem:
            return False

    async with limiter.streaming(caller.name, is_still_valid) as lease:
        yield lease


def _find_key(request: Request, shown: HTTPAuthorizationCredentials | None) -> ApiKey:
    file: KeyFile | None = request.app.state.keys
    if file is None:
        return _LOCAL_KEY
    try:
        key = file.find(shown.credentials) if shown is not None else None
    except KeysError as error:
        # The file may have been tampered with, so no request is accepted until it is sound again.
        detail = f"The API keys cannot be read, so no request is accepted: {type(error).__name__}."
        remedy = "The server's log shows the reason."
        raise ApiProblem(503, detail, remedy, "keys-unreadable", headers=_RETRY_HEADERS) from error
    if key is None:
        unknown = "The API key is unknown or was revoked."
        detail = "The request has no API key." if shown is None else unknown
        remedy = "Send Authorization: Bearer kd_...; `kd` reads the key from KD_API_KEY."
        raise ApiProblem(401, detail, remedy, headers=_CHALLENGE_HEADERS)
    if key.expired:
        detail = f"The API key {key.id} of {key.name} expired at {key.expires_at}."
        remedy = f"Ask the operator for a new one: kd keys new {key.name} --expires 90d."
        raise ApiProblem(401, detail, remedy, "key-expired", headers=_CHALLENGE_HEADERS)
    return key


def _audit(request: Request, actor: str, action: str, why: str) -> None:
    audit: Audit = request.app.state.audit
    audit.refuse(request, actor, action, why)
