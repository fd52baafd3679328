"""The URL of the job store: one server, or the master of a group that Sentinel watches.

    redis://user:password@host:6379/0
    rediss://user:password@host:6379/0                                     the same with TLS
    sentinel://user:password@host:26379,host:26379/0?master=NAME           the master of a group
    sentinels://user:password@host:26379,host:26379/0?master=NAME          the same with TLS

User and password are those of the server; the sentinels are asked without. Parameters that begin
with ``ssl_`` are those of redis-py: ``ssl_ca_certs``, ``ssl_certfile``, ``ssl_keyfile``.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

#: Schemes of a URL: of one server, of sentinels, and those of both that mean TLS.
SERVER_SCHEMES = ("redis", "rediss", "unix")
SENTINEL_SCHEMES = ("sentinel", "sentinels")
TLS_SCHEMES = ("rediss", "sentinels")
SENTINEL_PORT = 26379


class SentinelGroup(NamedTuple):
    """What a URL of sentinels says."""

    hosts: tuple[tuple[str, int], ...]
    master: str
    db: int
    #: ``username`` and ``password`` of the server, if given.
    credentials: dict[str, str]
    #: ``ssl`` and the parameters of TLS; empty without TLS.
    tls: dict[str, Any]


def parse_sentinels(url: str) -> SentinelGroup | None:
    """Return the group of sentinels that a URL names; None for the URL of one server.

    Raises ``ValueError`` for another scheme and for a URL of sentinels that names no master.
    """
    parts = urlsplit(url)
    if parts.scheme not in (*SERVER_SCHEMES, *SENTINEL_SCHEMES):
        known = ", ".join(f"{scheme}://" for scheme in (*SERVER_SCHEMES, *SENTINEL_SCHEMES))
        raise ValueError(f"it begins with {parts.scheme}://; expected one of {known}")
    if parts.scheme in SERVER_SCHEMES:
        return None
    master = dict(parse_qsl(parts.query)).get("master")
    if not master:
        raise ValueError("it names no master: sentinel://host:26379,host:26379/0?master=NAME")
    user = {"username": parts.username, "password": parts.password}
    tls = parse_tls(url)
    return SentinelGroup(
        hosts=tuple(_parse_host(text) for text in parts.netloc.rpartition("@")[2].split(",")),
        master=master,
        db=int(parts.path.strip("/") or 0),
        credentials={name: unquote(value) for name, value in user.items() if value},
        tls={"ssl": True, **tls} if tls else {},
    )


def uses_tls(url: str) -> bool:
    """Whether the scheme of a URL means TLS."""
    return urlsplit(url).scheme in TLS_SCHEMES


def parse_tls(url: str) -> dict[str, Any]:
    """Return the parameters of TLS that a URL gives; none for a URL without TLS.

    The certificate is always checked unless the URL says ``ssl_cert_reqs=none``.
    """
    if not uses_tls(url):
        return {}
    given = {k: v for k, v in parse_qsl(urlsplit(url).query) if k.startswith("ssl_")}
    checks_name = given.pop("ssl_check_hostname", "true").lower() != "false"
    return {"ssl_cert_reqs": "required", **given, "ssl_check_hostname": checks_name}


def _parse_host(text: str) -> tuple[str, int]:
    """Split the address of a sentinel; an IPv6 address with a port is in brackets."""
    if text.count(":") > 1 and not text.startswith("["):
        return text, SENTINEL_PORT
    parts = urlsplit(f"//{text}")
    return parts.hostname or "", parts.port or SENTINEL_PORT
