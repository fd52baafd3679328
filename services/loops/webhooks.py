"""The sender of webhooks: one signed message for every change of a job's status.

    status event -> kd:webhooks      jobs.lua writes both in one call
    kd:webhooks  -> leased           if the sender dies, another one sends the message again
    POST         -> 2xx: done        anything else: again after 5 s, 20 s, ... 5 h, for three days

Webhooks are off unless KD_WEBHOOK_HOSTS is set. Headers and signature follow Standard Webhooks. A
message is sent at least once; ``webhook-id`` and body stay the same, so that a receiver can
recognise a repetition. Messages may overtake each other; ``data.event`` orders those of one job.
The address that was checked is the address that is used, even if the name changes meanwhile.
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
from pathlib import Path
from typing import Any, TypeVar

import httpx
from redis.exceptions import RedisError

from cache.errors import PotstillError
from kd.addresses import resolve_public_address
from kd.client.wire.jobs import Job
from kd.errors import ConfigError, Problem
from kd.python.version import read_version
from services.settings import Settings
from services.store.jobs.loops import Delivery
from services.store.jobs.store import JobStore

#: Time between two rounds.
INTERVAL_SECONDS = 1.0
#: Time that a receiver has to answer.
TIMEOUT_SECONDS = 10.0
#: Longer than a try can take, so that no other sender gets the same message meanwhile.
LEASE_SECONDS = 6 * TIMEOUT_SECONDS
#: Messages that are sent at once, and threads for them.
AT_ONCE = 32
#: Time before the second try, before the third, and so on: 5 s to 5 h, three days in all.
DELAYS_SECONDS = tuple(min(5.0 * 4**number, 5 * 3600.0) for number in range(20))
#: HTTP status by which a receiver says that it wants no more messages.
GONE = 410

#: Start of a secret, as Standard Webhooks writes it.
PREFIX = "whsec_"
#: Lengths that Standard Webhooks allows for a secret.
SECRET_BYTES = range(24, 65)
_PLAIN_HOST = re.compile(r"[a-z0-9._-]+|[0-9a-f:.]+")
_MAKE_ONE = "Make one: (umask 077; echo whsec_$(head -c 32 /dev/urandom | base64) > FILE)."

Result = TypeVar("Result")

log = logging.getLogger("potstill.webhooks")


# ---------------------------------------------------------------------- where messages may go


@dataclass(frozen=True)
class Hosts:
    """The receivers that the operator allows.

    ``example.org`` allows https; ``http://example.org:8080`` allows http too. An entry without a
    port allows every port.
    """

    entries: tuple[httpx.URL, ...]

    @staticmethod
    def of(names: Iterable[str]) -> Hosts:
        """Parse KD_WEBHOOK_HOSTS. Raises ``ConfigError`` if an entry names no host."""
        return Hosts(tuple(map(_parse_host_entry, names)))

    def allows(self, url: httpx.URL) -> bool:
        """Return whether a message may go to this URL. The address is checked later."""
        if url.scheme not in ("https", "http") or url.userinfo or not 0 < (url.port or 443) < 2**16:
            return False
        return any(
            _decode_host(entry) == _decode_host(url)
            and entry.port in (None, url.port)
            and url.scheme in ("https", entry.scheme)
            for entry in self.entries
        )


def _parse_host_entry(name: str) -> httpx.URL:
    try:
        entry = httpx.URL(name if "://" in name else f"https://{name}")
    except httpx.InvalidURL:
        entry = httpx.URL()
    if (
        not _PLAIN_HOST.fullmatch(_decode_host(entry))
        or not Hosts((entry,)).allows(entry)
        or entry.raw_path != b"/"
    ):
        remedy = "Write example.org, or http://example.org:8080."
        raise _make_config_error(f"KD_WEBHOOK_HOSTS: {name!r} is not a receiver.", remedy)
    return entry


def _decode_host(url: httpx.URL) -> str:
    return url.raw_host.decode()


def find_webhook_problems(url: str | None, settings: Settings) -> list[Problem]:
    """Find the problems of a job's webhook before anything is sent."""
    found = None if url is None else _find_url_problem(url, Hosts.of(settings.webhook_hosts))
    return [Problem("/webhook", *found)] if found else []


def _find_url_problem(url: str, hosts: Hosts) -> tuple[str, str] | None:
    if not hosts.entries:
        return (
            "webhooks are off on this server.",
            "Leave it out, or have the operator set KD_WEBHOOK_HOSTS.",
        )
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        return f"this is not a URL: {error}.", "Use the form https://example.org/path."
    if parsed.userinfo:
        return (
            "a webhook's URL may hold no user and password.",
            "Check webhook-signature at the receiver instead.",
        )
    if not hosts.allows(parsed):
        where = f"{parsed.scheme}://{parsed.netloc.decode()}"
        return (
            f"{where} is not a receiver that the operator allows.",
            "KD_WEBHOOK_HOSTS lists the receivers.",
        )
    return None


# ---------------------------------------------------------------------- the message


@dataclass(frozen=True)
class Message:
    """The id and the body of a message, which are the same for every try."""

    id: str
    body: bytes


@dataclass(frozen=True)
class Signer:
    """Signs with every secret, so that a receiver may know the old or the new one."""

    secrets: tuple[bytes, ...]

    def headers(self, message: Message, seconds: int) -> dict[str, str]:
        """The three headers of Standard Webhooks. ``seconds`` is the Unix time of this try."""
        signed = f"{message.id}.{seconds}.".encode() + message.body
        digests = (hmac.digest(secret, signed, hashlib.sha256) for secret in self.secrets)
        return {
            "webhook-id": message.id,
            "webhook-timestamp": str(seconds),
            "webhook-signature": " ".join(
                f"v1,{base64.b64encode(digest).decode()}" for digest in digests
            ),
        }


def make_message(job: Job, event_id: str, change: Mapping[str, Any]) -> Message:
    """Make the message about a status event. Equal events give equal bytes."""
    about = job.model_dump(include={"id", "kind", "name", "labels"})
    moment = datetime.fromtimestamp(int(event_id.partition("-")[0]) / 1000, UTC)
    content = {
        "type": f"job.{change['status']}",
        "timestamp": moment.isoformat(timespec="milliseconds"),
        "data": {**about, "event": event_id, **change},
    }
    # Events of two jobs may have the same id, so the id contains the job. No dot joins the two,
    # because dots separate the parts of the signed text.
    message_id = f"{job.id}_{event_id}"
    return Message(message_id, json.dumps(content, sort_keys=True, allow_nan=False).encode())


def read_signer(file: Path | None) -> Signer:
    """Read the secrets of KD_WEBHOOK_SECRET_FILE.

    A line contains one secret: whsec_, then 24 to 64 bytes in base64. # begins a comment. Raises
    ``ConfigError`` if there is no secret, if one has another form, or if others may read the file.
    """
    if file is None:
        raise _make_config_error(
            "KD_WEBHOOK_HOSTS is set, but KD_WEBHOOK_SECRET_FILE is not: messages must be signed.",
            _MAKE_ONE,
        )
    try:
        text = file.read_text(encoding="ascii")
        mode = file.stat().st_mode
    except (OSError, UnicodeError) as error:
        detail = f"KD_WEBHOOK_SECRET_FILE {file} cannot be read: {type(error).__name__}."
        raise _make_config_error(detail, _MAKE_ONE) from None
    if mode & 0o077:
        detail = f"KD_WEBHOOK_SECRET_FILE {file} has mode {mode & 0o777:o}: others may use it."
        raise _make_config_error(detail, f"chmod 600 {file}")
    secrets = list[bytes]()
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        if not line or line.startswith("#"):
            continue
        try:
            secret = base64.b64decode(line.removeprefix(PREFIX), validate=True)
        except binascii.Error:
            secret = b""
        if not line.startswith(PREFIX) or len(secret) not in SECRET_BYTES:
            sizes = f"{SECRET_BYTES[0]} to {SECRET_BYTES[-1]}"
            raise _make_config_error(
                f"{file}, line {number}: this is not a secret, which is whsec_ and {sizes} bytes.",
                _MAKE_ONE,
            )
        secrets.append(secret)
    if not secrets:
        raise _make_config_error(f"KD_WEBHOOK_SECRET_FILE {file} holds no secret.", _MAKE_ONE)
    return Signer(tuple(secrets))


def _make_config_error(detail: str, remedy: str) -> ConfigError:
    return ConfigError.of_field("", detail, remedy)


# ---------------------------------------------------------------------- sending


class Webhooks:
    """Sends the webhooks that are due. Several copies may run at once."""

    def __init__(self, store: JobStore, settings: Settings) -> None:
        self._store = store
        self._hosts = Hosts.of(settings.webhook_hosts)
        self._signer = (
            read_signer(settings.webhook_secret_file) if self._hosts.entries else Signer(())
        )
        # A resolver that hangs must not take the few threads that asyncio shares with the API.
        self._threads = ThreadPoolExecutor(AT_ONCE, "webhooks")
        # At a lower level httpx logs whole URLs, which may contain tokens.
        logging.getLogger("httpx").setLevel(logging.WARNING)

    async def run(self) -> None:
        """Work until cancelled. Returns at once if webhooks are off."""
        while self._hosts.entries:
            try:
                if await self.step() == AT_ONCE:
                    continue
            except RedisError:
                pass  # the reconciler logs it and tries again
            except Exception:  # one bad message must not stop the others
                log.exception("a round failed")
            await asyncio.sleep(INTERVAL_SECONDS)

    async def step(self) -> int:
        """Send the messages that are due and record the results. Returns their number."""
        found = await self._run_in_thread(self._store.lease_webhooks, LEASE_SECONDS, AT_ONCE)
        outcomes = await asyncio.gather(*map(self._deliver, found), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):  # sent again when its lease ends
                raise outcome
        return len(found)

    async def _run_in_thread(self, function: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    async def _deliver(self, due: Delivery) -> None:
        message = await self._run_in_thread(self._build_message, due)
        failure = None if message is None else await self._try_to_send(due.url, message)
        if failure is None:
            await self._run_in_thread(self._store.finish_webhook, due)
        else:
            await self._run_in_thread(self._try_again, due, failure)

    def _build_message(self, due: Delivery) -> Message | None:
        """Make the message, or return None if the event or its job was deleted."""
        job = self._store.get(due.job_id)
        before = _find_preceding_id(due.event_id)
        events = self._store.read_events(due.job_id, before, limit=1)
        if job is None or not events or events[0].id != due.event_id:
            return None
        return make_message(job, due.event_id, events[0].data)

    async def _try_to_send(self, url: str, message: Message) -> str | None:
        """Send the message once. Returns the reason of a failure, or None after a success."""
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                status = await self._post(httpx.URL(url), message)
        except TimeoutError:
            return f"no answer within {TIMEOUT_SECONDS:g} s"
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            return type(error).__name__  # the text may contain the whole URL
        except PotstillError as error:
            return str(error)
        return None if httpx.codes.is_success(status) else f"HTTP {status}"

    async def _post(self, url: httpx.URL, message: Message) -> int:
        """Send the message to the host's present address, and return the HTTP status.

        Raises ``PotstillError`` if host or address is not allowed. Reads no body.
        """
        host = _decode_host(url)
        if not self._hosts.allows(url):
            remedy = "KD_WEBHOOK_HOSTS lists the receivers."
            raise _make_config_error(f"{host} is no longer allowed.", remedy)
        names = frozenset(map(_decode_host, self._hosts.entries))
        address = await self._run_in_thread(resolve_public_address, host, names)
        headers = self._signer.headers(message, int(time.time())) | {
            "Host": url.netloc.decode(),
            "Content-Type": "application/json",
            "User-Agent": f"Potstill/{read_version()}",
        }
        pinned = url.copy_with(host=address)
        # The certificate must still be the one of the name.
        checked = {"sni_hostname": host}
        # Each message has its own client, because an open connection was checked for another name.
        # There is no proxy, because a proxy would look up the name again.
        async with (
            httpx.AsyncClient(verify=self._tls, trust_env=False, timeout=TIMEOUT_SECONDS) as client,
            client.stream(
                "POST", pinned, content=message.body, headers=headers, extensions=checked
            ) as reply,
        ):
            return reply.status_code

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return httpx.create_ssl_context()

    def _try_again(self, due: Delivery, failure: str) -> None:
        host = _decode_host(httpx.URL(due.url))
        what = f"The webhook at {host} did not accept event {due.event_id}: {failure}."
        if due.tries < len(DELAYS_SECONDS) and failure != f"HTTP {GONE}":
            self._store.retry_webhook(due, DELAYS_SECONDS[due.tries])
            log.info("%s: %s", due.job_id, what)
        else:
            self._store.finish_webhook(due, warning=f"{what} It will not be sent again.")
            log.warning("%s: %s It will not be sent again.", due.job_id, what)


def _find_preceding_id(event_id: str) -> str:
    """The greatest stream id below this one."""
    milliseconds, _, number = event_id.partition("-")
    if int(number):
        return f"{milliseconds}-{int(number) - 1}"
    return f"{int(milliseconds) - 1}-{2**64 - 1}"
