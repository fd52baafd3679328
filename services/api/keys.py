"""Who asks: the API key of a request, as dependencies of the routes.

    caller: Annotated[Caller, Depends(authenticate)]      401 without a key that holds, 429 beyond its rate
    dependencies=[Depends(require("write"))]              further 403 where the key has no such scope
    dependencies=[Depends(hold_stream)]                   further 429 where the caller has as many streams as it may

Without a file of keys everybody is ``LOCAL`` and may do everything: ``require_safe_bind`` keeps such an API on
loopback.
"""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from cache.errors import PotstillError
from services.api.limits import Hold, Limiter
from services.api.problems import ApiProblem
from services.jobs import LOCAL, Caller
from services.keys import SCOPES, ApiKey, KeyFile, KeysError
from services.settings import Settings

_EVERYTHING = ApiKey(LOCAL.name, "", SCOPES, "")
_bearer = HTTPBearer(auto_error=False, description="An API key, as `kd keys new` shows it once.", scheme_name="ApiKey")

Shown = Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]


class UnsafeBind(PotstillError):
    """The API would be open to the network."""

    type = "unsafe_bind"


def require_safe_bind(settings: Settings) -> None:
    """Raise ``UnsafeBind`` where others than this host could call an API that asks for no key.

    Raises ``KeysError`` where the file of keys cannot be used, so that this is known at the start.
    """
    if settings.api_keys_file is not None:
        KeyFile(settings.api_keys_file).keys()
    elif not is_loopback(settings.host):
        raise UnsafeBind(
            f"the API would listen on {settings.host}, where others can call it, and ask for no key.",
            "Make a key (`kd keys new NAME`) and set KD_API_KEYS_FILE, or set KD_HOST to 127.0.0.1.",
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``; of names only ``localhost`` is believed."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def authenticate(request: Request, shown: Shown) -> Caller:
    """Who asks. Takes a token from the caller's bucket; the answer's headers tell what is left."""
    key = _key(request, shown)
    request.state.key = key
    limiter: Limiter = request.app.state.limiter
    limiter.take(request, key.name)
    return LOCAL if key is _EVERYTHING else Caller(key.name, key.may("admin"))


def require(scope: str) -> Callable[..., Awaitable[Caller]]:
    """A dependency that gives the caller, if its key has ``scope``."""

    async def caller_with_scope(request: Request, caller: Annotated[Caller, Depends(authenticate)]) -> Caller:
        if not request.state.key.may(scope):
            detail = f"the key of {caller.name} has no scope {scope}."
            raise ApiProblem(403, detail, f"Have the operator make one: kd keys new {caller.name} --scopes {scope}.")
        return caller

    return caller_with_scope


async def hold_stream(
    request: Request, caller: Annotated[Caller, Depends(authenticate)], shown: Shown
) -> AsyncIterator[Hold]:
    """A dependency of routes that stream: one of the caller's streams is taken until the answer has ended.

    The route ends its answer once the hold is lost: the key was revoked, or the file of keys cannot be trusted.
    """
    limiter: Limiter = request.app.state.limiter
    async with limiter.streaming(caller.name, lambda: _still_holds(request, shown)) as hold:
        yield hold


def _still_holds(request: Request, shown: HTTPAuthorizationCredentials | None) -> bool:
    """Whether a new request would be let in by the key of this one, and as whom it was."""
    key: ApiKey = request.state.key
    try:
        return _key(request, shown) == key
    except ApiProblem:
        return False


def _key(request: Request, shown: HTTPAuthorizationCredentials | None) -> ApiKey:
    file: KeyFile | None = request.app.state.keys
    if file is None:
        return _EVERYTHING
    try:
        key = file.find(shown.credentials) if shown is not None else None
    except KeysError as error:  # nobody is let in by a file that may have been tampered with
        detail = f"The keys cannot be read, so that nobody can be let in: {type(error).__name__}."
        raise ApiProblem(503, detail, "The server's log says why.", "keys-unreadable", headers=_LATER) from error
    if key is None:
        detail = "The request shows no API key." if shown is None else "The API key is not known, or was revoked."
        raise ApiProblem(401, detail, "Send Authorization: Bearer kd_...; `kd` takes it from KD_API_KEY.", headers=_ASK)
    return key


_ASK = {"WWW-Authenticate": 'Bearer realm="potstill"'}
_LATER = {"Retry-After": "5"}
