"""Tells a job's own webhook of every change of its status: signed, at least once. Off unless KD_WEBHOOK_HOSTS is set.

    status event -> kd:webhooks     by jobs.lua, in the breath that writes the event
    kd:webhooks  -> taken by lease  whoever dies with it is followed by another, which sends it again
    POST         -> 2xx: done       anything else: again after 5 s, 20 s, ... 5 h, for three days

Headers and signature are those of Standard Webhooks. ``webhook-id`` is the same for every try, and so is the body: by
it a receiver knows what has come twice. Messages may overtake each other; ``data.event`` tells the order of one job's.
A message goes to the address that was checked, whatever the name says next.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import json
import logging
import re
import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import httpx
from redis.exceptions import RedisError

from cache.errors import PotstillError
from kd.confinement import public_address
from kd.errors import ConfigError, Problem
from services.jobs import Delivery, JobStore
from services.schemas import Job
from services.settings import Settings

INTERVAL_SECONDS = 1.0
TIMEOUT_SECONDS = 10.0
LEASE_SECONDS = 6 * TIMEOUT_SECONDS
AT_ONCE = 32
#: What passes between the first try and the second, and so on: 5 s to 5 h, three days in all.
DELAYS_SECONDS = tuple(min(5.0 * 4**number, 5 * 3600.0) for number in range(20))
GONE = 410

PREFIX = "whsec_"
SECRET_BYTES = range(24, 65)
_PLAIN_HOST = re.compile(r"[a-z0-9._-]+|[0-9a-f:.]+")
_MAKE_ONE = "Make one: (umask 077; echo whsec_$(head -c 32 /dev/urandom | base64) > FILE)."

T = TypeVar("T")

log = logging.getLogger("potstill.webhooks")


# ---------------------------------------------------------------------- where messages may go


@dataclass(frozen=True)
class Hosts:
    """The receivers that the operator allows: ``example.org`` for https, ``http://example.org:8080`` for http too.

    An entry without a port means every port.
    """

    entries: tuple[httpx.URL, ...]

    @staticmethod
    def of(names: Iterable[str]) -> Hosts:
        """The entries of KD_WEBHOOK_HOSTS; raises ``ConfigError`` where one names no host."""
        return Hosts(tuple(map(_entry, names)))

    @property
    def names(self) -> frozenset[str]:
        """The names and literal addresses, without scheme and port."""
        return frozenset(map(_host, self.entries))

    def allow(self, url: httpx.URL) -> bool:
        """Whether a message may go there, as far as the name tells."""
        if url.scheme not in ("https", "http") or url.userinfo or not 0 < (url.port or 443) < 2**16:
            return False
        return any(
            _host(entry) == _host(url) and entry.port in (None, url.port) and url.scheme in ("https", entry.scheme)
            for entry in self.entries
        )


def _entry(name: str) -> httpx.URL:
    try:
        entry = httpx.URL(name if "://" in name else f"https://{name}")
    except httpx.InvalidURL:
        entry = httpx.URL()
    if not _PLAIN_HOST.fullmatch(_host(entry)) or not Hosts((entry,)).allow(entry) or entry.raw_path != b"/":
        raise _bad(f"KD_WEBHOOK_HOSTS: {name!r} is no receiver.", "Write example.org, or http://example.org:8080.")
    return entry


def _host(url: httpx.URL) -> str:
    return url.raw_host.decode()


def webhook_problems(url: str | None, settings: Settings) -> list[Problem]:
    """What is wrong with the webhook of a job, before anything is sent; nothing for a job without one."""
    found = None if url is None else _wrong(url, Hosts.of(settings.webhook_hosts))
    return [Problem("/webhook", *found)] if found else []


def _wrong(url: str, hosts: Hosts) -> tuple[str, str] | None:
    if not hosts.entries:
        return "webhooks are off on this server.", "Leave it out, or have the operator set KD_WEBHOOK_HOSTS."
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        return f"it is no URL: {error}.", "Give one of the form https://example.org/path."
    if parsed.userinfo:
        return "a webhook's URL may hold no user and password.", "Check webhook-signature at the receiver instead."
    if not hosts.allow(parsed):
        where = f"{parsed.scheme}://{parsed.netloc.decode()}"
        return f"{where} is none of the receivers that the operator allows.", "KD_WEBHOOK_HOSTS names them."
    return None


# ---------------------------------------------------------------------- what a message holds


@dataclass(frozen=True)
class Message:
    """What is sent, to the byte."""

    id: str
    body: bytes


@dataclass(frozen=True)
class Signer:
    """Signs with every secret, so that a receiver that knows only the old or only the new one is content."""

    secrets: tuple[bytes, ...]

    def headers(self, message: Message, seconds: int) -> dict[str, str]:
        """The three headers of Standard Webhooks; ``seconds`` is the time of this try, since 1970."""
        signed = f"{message.id}.{seconds}.".encode() + message.body
        digests = (hmac.digest(secret, signed, hashlib.sha256) for secret in self.secrets)
        return {
            "webhook-id": message.id,
            "webhook-timestamp": str(seconds),
            "webhook-signature": " ".join(f"v1,{base64.b64encode(digest).decode()}" for digest in digests),
        }


def message_of(job: Job, event_id: str, change: Mapping[str, Any]) -> Message:
    """The message about an event of type status; the same to the byte whenever it is made."""
    about = {"id": job.id, "kind": job.kind, "name": job.name, "labels": job.labels, "event": event_id}
    moment = datetime.fromtimestamp(int(event_id.partition("-")[0]) / 1000, UTC)
    content = {
        "type": f"job.{change['status']}",
        "timestamp": moment.isoformat(timespec="milliseconds"),
        "data": about | dict(change),
    }
    # Events of two jobs may have the same id, so the job's is part of it; a dot would be ambiguous in what is signed.
    return Message(f"{job.id}_{event_id}", json.dumps(content, sort_keys=True, allow_nan=False).encode())


def read_signer(file: Path | None) -> Signer:
    """The secrets of KD_WEBHOOK_SECRET_FILE, one a line: whsec_ and 24 to 64 bytes in base64; # begins a comment.

    Raises ``ConfigError`` where there is none, where one has another form, or where others may read the file.
    """
    if file is None:
        raise _bad("KD_WEBHOOK_HOSTS is set, but KD_WEBHOOK_SECRET_FILE is not: messages must be signed.", _MAKE_ONE)
    try:
        text, mode = file.read_text(encoding="ascii"), file.stat().st_mode
    except (OSError, UnicodeError) as error:
        raise _bad(f"KD_WEBHOOK_SECRET_FILE {file} cannot be read: {type(error).__name__}.", _MAKE_ONE) from None
    if mode & 0o077:
        raise _bad(f"KD_WEBHOOK_SECRET_FILE {file} has mode {mode & 0o777:o}: others may use it.", f"chmod 600 {file}")
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    secrets = tuple(_secret(file, number, line) for number, line in lines if line and not line.startswith("#"))
    if not secrets:
        raise _bad(f"KD_WEBHOOK_SECRET_FILE {file} holds no secret.", _MAKE_ONE)
    return Signer(secrets)


def _secret(file: Path, number: int, line: str) -> bytes:
    try:
        secret = base64.b64decode(line.removeprefix(PREFIX), validate=True)
    except binascii.Error:
        secret = b""
    if not line.startswith(PREFIX) or len(secret) not in SECRET_BYTES:
        least, most = SECRET_BYTES[0], SECRET_BYTES[-1]
        raise _bad(f"{file}, line {number}: no secret, which is whsec_ and {least} to {most} bytes.", _MAKE_ONE)
    return secret


def _bad(detail: str, remedy: str) -> ConfigError:
    return ConfigError([Problem("", detail, remedy)])


# ---------------------------------------------------------------------- sending


class Webhooks:
    """Sends what is due. Safe in many copies."""

    def __init__(self, store: JobStore, settings: Settings) -> None:
        self._store, self._hosts = store, Hosts.of(settings.webhook_hosts)
        self._signer = read_signer(settings.webhook_secret_file) if self._hosts.entries else Signer(())
        # Not asyncio's own few threads: a resolver that hangs would keep them from the rest of the API.
        self._threads = ThreadPoolExecutor(AT_ONCE, "webhooks")
        logging.getLogger("httpx").setLevel(logging.WARNING)  # below, it writes whole URLs, and these may hold tokens

    async def run(self) -> None:
        """Work until cancelled; at once done where webhooks are off."""
        while self._hosts.entries:
            try:
                if await self.step() == AT_ONCE:
                    continue
            except RedisError:
                pass  # the reconciler says so, and takes care
            except Exception:  # one bad message must not silence the others
                log.exception("a round failed")
            await asyncio.sleep(INTERVAL_SECONDS)

    async def step(self) -> int:
        """Send what is due, and note what came of it; returns how many messages that were."""
        found = await self._in_thread(self._store.due_webhooks, LEASE_SECONDS, AT_ONCE)
        outcomes = await asyncio.gather(*(self._deliver(delivery) for delivery in found), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):  # its lease will end, and it will be sent again
                raise outcome
        return len(found)

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    async def _deliver(self, due: Delivery) -> None:
        message = await self._in_thread(self._message, due)
        failure = None if message is None else await self._failure(due.url, message)
        if failure is None:
            await self._in_thread(self._store.webhook_done, due)
        else:
            await self._in_thread(self._try_again, due, failure)

    def _message(self, due: Delivery) -> Message | None:
        """What to say of the event; None where it, or its job, has been deleted since."""
        job, events = self._store.get(due.job_id), self._store.events(due.job_id, _before(due.event_id), limit=1)
        if job is None or not events or events[0][0] != due.event_id:
            return None
        return message_of(job, due.event_id, events[0][2])

    async def _failure(self, url: str, message: Message) -> str | None:
        """Why the receiver has not taken the message; None where it has."""
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                status = await self._post(httpx.URL(url), message)
        except TimeoutError:
            return f"no answer within {TIMEOUT_SECONDS:g} s"
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            return type(error).__name__  # its text may hold the whole URL
        except PotstillError as error:
            return str(error)
        return None if httpx.codes.is_success(status) else f"HTTP {status}"

    async def _post(self, url: httpx.URL, message: Message) -> int:
        """Send it to the address that the host has now, if that is allowed; returns the status. Reads no body."""
        if not self._hosts.allow(url):
            raise _bad(f"{_host(url)} is not allowed any more.", "KD_WEBHOOK_HOSTS names the receivers.")
        address = await self._in_thread(public_address, _host(url), self._hosts.names)
        headers = self._signer.headers(message, int(time.time())) | {
            "Host": url.netloc.decode(),
            "Content-Type": "application/json",
            "User-Agent": f"Potstill/{version('potstill')}",
        }
        pinned, checked = url.copy_with(host=address), {"sni_hostname": _host(url)}
        # A client for each message: a connection kept open was checked for another name. No proxy: it would look the
        # name up again.
        async with (
            httpx.AsyncClient(verify=self._tls, trust_env=False, timeout=TIMEOUT_SECONDS) as client,
            client.stream("POST", pinned, content=message.body, headers=headers, extensions=checked) as reply,
        ):
            return reply.status_code

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return httpx.create_ssl_context()

    def _try_again(self, due: Delivery, failure: str) -> None:
        what = f"The webhook at {_host(httpx.URL(due.url))} did not take event {due.event_id}: {failure}."
        if due.tries < len(DELAYS_SECONDS) and failure != f"HTTP {GONE}":
            self._store.webhook_failed(due, DELAYS_SECONDS[due.tries])
            log.info("%s: %s", due.job_id, what)
        else:
            self._store.webhook_done(due, warning=f"{what} It will not be sent again.")
            log.warning("%s: %s It will not be sent again.", due.job_id, what)


def _before(event_id: str) -> str:
    """The greatest stream id below this one."""
    milliseconds, _, number = event_id.partition("-")
    return f"{milliseconds}-{int(number) - 1}" if int(number) else f"{int(milliseconds) - 1}-{2**64 - 1}"
