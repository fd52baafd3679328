"""Webhooks with a real receiver: the reference verifies them, and they are sent until accepted."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import logging
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from standardwebhooks import Webhook, WebhookVerificationError

from bench.support.harness import Parts, make_config
from bench.support.waiting import wait_until
from kd.errors import ConfigError
from services.loops import webhooks
from services.loops.webhooks import (
    DELAYS_SECONDS,
    Hosts,
    Message,
    Signer,
    Webhooks,
    find_webhook_problems,
    read_signer,
)
from services.settings import Settings
from services.store.jobs.loops import Delivery
from services.store.jobs.store import JobStore

SECRETS = tuple(
    f"whsec_{base64.b64encode(bytes(range(start, start + 32))).decode()}" for start in (1, 101)
)


def keys_of(*secrets: str) -> tuple[bytes, ...]:
    return tuple(base64.b64decode(secret.removeprefix("whsec_")) for secret in secrets)


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    file = tmp_path / "secrets"
    file.write_text(f"# old, then new\n{SECRETS[0]}\n\n{SECRETS[1]}\n")
    file.chmod(0o600)
    return file


# ---------------------------------------------------------------------- signatures


@pytest.mark.parametrize("secret", SECRETS, ids=["old", "new"])
def test_the_reference_accepts_what_is_signed_with_either_secret(secret: str) -> None:
    body = '{"type": "job.succeeded", "data": {"name": "grüße"}}'.encode()
    headers = Signer(keys_of(*SECRETS)).headers(Message("job_1_2-0", body), int(time.time()))
    assert Webhook(secret).verify(body, headers) == json.loads(body)
    one = Signer(keys_of(secret)).headers(Message("job_1_2-0", body), int(time.time()))
    moment = datetime.fromtimestamp(int(one["webhook-timestamp"]), UTC)
    assert one["webhook-signature"] == Webhook(secret).sign("job_1_2-0", moment, body.decode())


@pytest.mark.parametrize(
    "change",
    [
        {"webhook-id": "job_1_2-1"},
        {"webhook-timestamp": str(int(time.time()) - 7)},
        {"webhook-timestamp": str(int((datetime.now(UTC) - timedelta(minutes=6)).timestamp()))},
        {"webhook-signature": f"v1,{base64.b64encode(bytes(32)).decode()}"},
    ],
)
def test_the_reference_refuses_what_was_changed(change: dict[str, str]) -> None:
    headers = (
        Signer(keys_of(*SECRETS)).headers(Message("job_1_2-0", b"{}"), int(time.time())) | change
    )
    with pytest.raises(WebhookVerificationError):
        Webhook(SECRETS[0]).verify(b"{}", headers)


def test_secrets_are_read_one_a_line(secret_file: Path) -> None:
    assert read_signer(secret_file) == Signer(keys_of(*SECRETS))


@pytest.mark.parametrize(
    "text, mode, problem",
    [
        (SECRETS[0], 0o640, "others may use it"),
        ("", 0o600, "holds no secret"),
        ("# nothing\n", 0o600, "holds no secret"),
        (SECRETS[0].removeprefix("whsec_"), 0o600, "line 1"),
        (f"{SECRETS[0]}\nwhsec_{base64.b64encode(b'x' * 23).decode()}", 0o600, "line 2"),
        (f"whsec_{base64.b64encode(b'x' * 65).decode()}", 0o600, "24 to 64 bytes"),
        (SECRETS[0] + "!", 0o600, "line 1"),
        ("whsec_ä", 0o600, "cannot be read"),
    ],
)
def test_a_bad_file_of_secrets_is_refused_without_a_word_of_it(
    tmp_path: Path, text: str, mode: int, problem: str
) -> None:
    file = tmp_path / "secrets"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(ConfigError, match=problem) as caught:
        read_signer(file)
    assert str(file) in str(caught.value)
    assert all(
        line.removeprefix("whsec_")[:10] not in str(caught.value) for line in text.splitlines()
    )


@pytest.mark.parametrize("file", [None, Path("/no/such/file")])
def test_without_a_secret_nothing_starts(file: Path | None) -> None:
    with pytest.raises(ConfigError, match="KD_WEBHOOK_SECRET_FILE"):
        read_signer(file)


# ---------------------------------------------------------------------- where messages may go


@pytest.mark.parametrize(
    "url, hosts, allowed",
    [
        ("https://example.org/hook?a=b", ["example.org"], True),
        ("https://EXAMPLE.org:8443/", ["example.org"], True),
        ("https://example.org:8443/", ["example.org:8443"], True),
        ("https://example.org:8444/", ["example.org:8443"], False),
        ("https://example.org/", ["example.org:8443"], False),
        ("http://example.org/", ["example.org"], False),
        ("http://example.org/", ["http://example.org"], True),
        ("https://example.org/", ["http://example.org"], True),
        ("https://example.org.evil.net/", ["example.org"], False),
        ("https://evil.net/example.org", ["example.org"], False),
        ("https://evil.net#@example.org/", ["example.org"], False),
        ("https://sub.example.org/", ["example.org"], False),
        ("https://[::1]:9/", ["[::1]"], True),
        ("https://xn--mnchen-3ya.de/", ["münchen.de"], True),
        ("ftp://example.org/", ["example.org"], False),
        ("https:///hook", ["example.org"], False),
        ("https://0x7f000001/", ["127.0.0.1"], False),
    ],
)
def test_only_the_operator_s_receivers_are_allowed(
    url: str, hosts: list[str], allowed: bool
) -> None:
    assert Hosts.of(hosts).allows(httpx.URL(url)) is allowed


@pytest.mark.parametrize(
    "entry", ["", "https://", "example.org/path", "ftp://example.org", "a b", "u:p@example.org"]
)
def test_an_entry_that_names_no_host_is_refused(entry: str) -> None:
    with pytest.raises(ConfigError, match="KD_WEBHOOK_HOSTS"):
        Hosts.of([entry])


@pytest.mark.parametrize(
    "url, hosts, problem",
    [
        (None, [], None),
        ("https://example.org/hook", ["example.org"], None),
        ("https://example.org/hook", [], "webhooks are off"),
        ("http://example.org/hook", ["example.org"], "http://example.org is not a receiver"),
        ("https://user:pass@example.org/", ["example.org"], "no user and password"),
        ("https://example.org:99999999/", ["example.org"], "is not a receiver"),
        ("https://[::1/", ["example.org"], "not a URL"),
    ],
)
def test_a_job_s_webhook_is_refused_before_anything_is_sent(
    url: str | None, hosts: list[str], problem: str | None
) -> None:
    found = find_webhook_problems(url, Settings(webhook_hosts=hosts))
    assert [(each.pointer, problem in each.detail) for each in found] == (
        [("/webhook", True)] if problem else []
    )  # type: ignore[operator]
    assert all("pass" not in each.detail.replace("password", "") for each in found)


def test_retries_go_from_five_seconds_to_five_hours_for_three_days() -> None:
    assert (DELAYS_SECONDS[0], DELAYS_SECONDS[-1]) == (5, 5 * 3600)
    assert list(DELAYS_SECONDS) == sorted(DELAYS_SECONDS)
    assert sum(DELAYS_SECONDS) == pytest.approx(3 * 86400, rel=0.01)


@pytest.mark.parametrize("event, before", [("7-3", "7-2"), ("7-0", f"6-{2**64 - 1}")])
def test_the_id_before(event: str, before: str) -> None:
    assert webhooks._find_preceding_id(event) == before


# ---------------------------------------------------------------------- a receiver


class Receiver:
    """A server that keeps what it is sent, and answers with ``statuses`` in turn, then 204."""

    def __init__(self, statuses: list[int], tls: ssl.SSLContext | None = None) -> None:
        self.statuses, self.calls = statuses, []  # type: ignore[var-annotated]
        self.drip = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.calls.append((self.path, dict(self.headers.items()), body))
                if receiver.drip.is_set():
                    self._drip()
                    return
                self.send_response(receiver.statuses.pop(0) if receiver.statuses else 204)
                self.send_header("Location", f"{receiver.url}/elsewhere")
                self.end_headers()

            def _drip(self) -> None:
                """A header that never ends, a byte now and then: no single read is slow."""
                self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
                try:
                    while receiver.drip.is_set():
                        time.sleep(0.05)
                        self.wfile.write(b"x")
                except OSError:
                    return

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

        self.server = Server(("127.0.0.1", 0), Handler)
        if tls is not None:
            self.server.socket = tls.wrap_socket(self.server.socket, server_side=True)
        self.port = self.server.server_address[1]
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        self._thread.start()

    def messages(self) -> list[dict[str, Any]]:
        """The messages, as the reference verifies and reads them."""
        return [Webhook(SECRETS[1]).verify(body, headers) for _, headers, body in self.calls]

    def close(self) -> None:
        self.drip.clear()
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()


@pytest.fixture
def receive() -> Iterator[Callable[..., Receiver]]:
    """Receivers, as many as a test needs."""
    made: list[Receiver] = []

    def make(*statuses: int, tls: ssl.SSLContext | None = None) -> Receiver:
        made.append(Receiver(list(statuses), tls))
        return made[-1]

    yield make
    for receiver in made:
        receiver.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Key and self-signed certificate of a server named localhost."""
    if shutil.which("openssl") is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(
            "openssl makes the certificate, and is not installed"
        )
    folder = tmp_path_factory.mktemp("tls")
    key = folder / "key.pem"
    cert = folder / "cert.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", str(key), "-out", str(cert)]
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        *files,
        *names,
    ]
    subprocess.run(command, check=True, capture_output=True)
    return key, cert


# ---------------------------------------------------------------------- from record to receiver


class Sent:
    """Job records, senders, and the messages to send."""

    def __init__(self, parts: Parts, secret_file: Path) -> None:
        self.parts = parts
        self.jobs = parts.jobs
        self.secret_file = secret_file

    def sender(self, *hosts: str, store: JobStore | None = None) -> Webhooks:
        settings = Settings(
            webhook_hosts=hosts or ("http://127.0.0.1",), webhook_secret_file=self.secret_file
        )
        return Webhooks(store or self.jobs, settings)

    def queued(self, url: str, **changes: Any) -> str:
        """A job whose first event waits to be sent."""
        return self.jobs.create(make_config("quick", webhook=url, **changes)).id

    def step(self, sender: Webhooks) -> int:
        return asyncio.run(sender.step())

    def waiting(self) -> dict[str, float]:
        """The messages to send, and the seconds until then."""
        now = self.jobs.read_clock_ms()
        entries: Any = self.jobs.redis.zrange("kd:webhooks", 0, -1, withscores=True)
        return {entry: (score - now) / 1000 for entry, score in entries}

    def make_due(self) -> None:
        """Let the time of the next try come."""
        for entry in self.waiting():
            self.jobs.redis.zadd("kd:webhooks", {entry: 0})

    def warnings(self, job_id: str) -> list[str]:
        return [data["message"] for kind, data in self.parts.events(job_id) if kind == "warning"]


@pytest.fixture
def sent(parts: Parts, secret_file: Path) -> Sent:
    return Sent(parts, secret_file)


def test_every_status_is_told_once_and_in_order(
    sent: Sent, receive: Callable[..., Receiver]
) -> None:
    receiver = receive()
    sender = sent.sender()
    job_id = sent.queued(f"{receiver.url}/hook?a=b", labels={"team": "x"})
    sent.step(sender)
    claim = sent.jobs.claim_next("train", "w", 5)
    assert claim is not None
    sent.step(sender)
    sent.jobs.finish(
        claim, "failed", {"type": "training_error", "detail": "The loss is nan.", "remedy": ""}
    )
    sent.step(sender)
    assert sent.step(sender) == 0 and sent.waiting() == {}
    messages = receiver.messages()
    assert [message["type"] for message in messages] == ["job.queued", "job.running", "job.failed"]
    events = sent.jobs.read_events(job_id, types=["status"])
    for message, event in zip(messages, events, strict=True):
        about = {
            "id": job_id,
            "kind": "train",
            "name": "quick",
            "labels": {"team": "x"},
            "event": event.id,
        }
        assert message["data"] == about | event.data
        milliseconds = datetime.fromisoformat(message["timestamp"]).timestamp() * 1000
        assert milliseconds == pytest.approx(int(event.id.partition("-")[0]), abs=0.01)
    assert messages[2]["data"]["error"]["type"] == "training_error"
    paths, headers, _ = zip(*receiver.calls, strict=True)
    assert set(paths) == {"/hook?a=b"}
    assert [each["webhook-id"] for each in headers] == [f"{job_id}_{event.id}" for event in events]
    assert {each["Host"] for each in headers} == {f"127.0.0.1:{receiver.port}"}
    assert {each["Content-Type"] for each in headers} == {"application/json"}


def test_a_job_without_a_webhook_tells_nobody(sent: Sent) -> None:
    sent.jobs.create(make_config("quick"))
    assert sent.waiting() == {}


def test_ids_differ_where_two_jobs_have_an_event_of_one_id(
    sent: Sent, receive: Callable[..., Receiver]
) -> None:
    receiver = receive()
    twins = [sent.queued(receiver.url) for _ in range(2)]
    for job_id in twins:  # like two events of one millisecond
        sent.jobs.redis.delete(f"kd:job:{job_id}:events")
        change = sent.jobs.redis.xadd(
            f"kd:job:{job_id}:events", {"type": "status", "data": '{"status":"queued"}'}, "7-0"
        )
        sent.jobs.redis.zadd("kd:webhooks", {f"{job_id} {change}": 0})
    sent.step(sent.sender())
    assert {headers["webhook-id"] for _, headers, _ in receiver.calls} == {
        f"{job_id}_7-0" for job_id in twins
    }


@pytest.mark.parametrize("status", [500, 503, 404, 400, 429, 301, 307])
def test_what_was_not_taken_is_sent_again_with_the_same_id_and_body(
    sent: Sent, receive: Callable[..., Receiver], status: int
) -> None:
    receiver = receive(status, status)
    sender = sent.sender()
    sent.queued(receiver.url)
    for delay in DELAYS_SECONDS[:2]:
        sent.step(sender)
        assert list(sent.waiting().values()) == [pytest.approx(delay, abs=2)]
        assert sent.step(sender) == 0, "not before its time"
        sent.make_due()
    sent.step(sender)
    assert sent.waiting() == {}
    assert len(receiver.calls) == 3, "a redirect is not followed"
    assert {path for path, _, _ in receiver.calls} == {"/"}
    assert len({(headers["webhook-id"], body) for _, headers, body in receiver.calls}) == 1
    assert receiver.messages()


def test_after_three_days_it_is_given_up_with_a_warning(
    sent: Sent, receive: Callable[..., Receiver]
) -> None:
    receiver = receive(*[503] * 99)
    sender = sent.sender()
    job_id = sent.queued(f"{receiver.url}/secret-path")
    delays: list[float] = []
    while sent.step(sender):
        delays += sent.waiting().values()
        sent.make_due()
    assert delays == [pytest.approx(delay, abs=2) for delay in DELAYS_SECONDS]
    assert len(receiver.calls) == len(DELAYS_SECONDS) + 1
    (warning,) = sent.warnings(job_id)
    assert "127.0.0.1" in warning and "HTTP 503" in warning and "secret-path" not in warning
    assert sent.waiting() == {} and not sent.jobs.redis.exists("kd:webhooks:tries")
    assert sent.parts.job(job_id).status == "queued", "the job itself is well"


def test_a_receiver_that_is_gone_is_left_alone(
    sent: Sent, receive: Callable[..., Receiver]
) -> None:
    receiver = receive(410)
    job_id = sent.queued(receiver.url)
    sent.step(sent.sender())
    assert (
        sent.waiting() == {} and len(receiver.calls) == 1 and "HTTP 410" in sent.warnings(job_id)[0]
    )


def test_nobody_is_told_of_a_deleted_job(sent: Sent, receive: Callable[..., Receiver]) -> None:
    receiver = receive()
    job_id = sent.queued(receiver.url)
    sent.jobs.change("cancel", job_id)
    assert sent.jobs.change("delete", job_id).outcome == "done"
    sent.step(sent.sender())
    assert sent.waiting() == {} and receiver.calls == []


def test_an_event_that_was_trimmed_is_not_told(
    sent: Sent, receive: Callable[..., Receiver]
) -> None:
    receiver = receive()
    sent.jobs.redis.xtrim(f"kd:job:{sent.queued(receiver.url)}:events", maxlen=0, approximate=False)
    sent.step(sent.sender())
    assert sent.waiting() == {} and receiver.calls == []


# ---------------------------------------------------------------------- senders may die, or be many


def test_a_sender_that_dies_after_sending_is_followed_by_one_that_sends_the_same_again(
    sent: Sent, receive: Callable[..., Receiver]
) -> None:
    receiver = receive()
    sent.queued(receiver.url)

    class Dying(JobStore):
        def finish_webhook(self, delivery: Delivery, warning: str = "") -> None:
            raise RedisConnectionError("the sender is dead")

    with pytest.raises(RedisConnectionError):
        sent.step(sent.sender(store=Dying(sent.jobs.redis)))
    assert sent.step(sent.sender()) == 0, "the first one's lease holds"
    assert list(sent.waiting().values()) == [pytest.approx(webhooks.LEASE_SECONDS, abs=2)]
    sent.make_due()
    sent.step(sent.sender())
    assert (
        len(receiver.calls) == 2
        and len({headers["webhook-id"] for _, headers, _ in receiver.calls}) == 1
    )
    assert sent.waiting() == {}


def test_many_senders_send_what_one_would(sent: Sent, receive: Callable[..., Receiver]) -> None:
    receiver = receive()
    ids = {sent.queued(receiver.url) for _ in range(40)}

    async def together() -> list[int]:
        return await asyncio.gather(*(sent.sender().step() for _ in range(4)))

    while sum(asyncio.run(together())):
        pass
    told = [message["data"]["id"] for message in receiver.messages()]
    assert sorted(told) == sorted(ids)


def test_one_bad_message_does_not_hold_up_the_others(
    sent: Sent, receive: Callable[..., Receiver]
) -> None:
    receiver = receive()
    bad = sent.queued(f"{receiver.url}/bad")
    stream = f"kd:job:{bad}:events"
    ((event_id, fields),) = sent.jobs.redis.xrange(stream)
    sent.jobs.redis.delete(stream)
    sent.jobs.redis.xadd(stream, fields | {"data": "{"}, id=event_id)  # it cannot be read
    sent.queued(f"{receiver.url}/good")
    with pytest.raises(json.JSONDecodeError):
        sent.step(sent.sender())
    assert [path for path, _, _ in receiver.calls] == ["/good"] and len(sent.waiting()) == 1


def test_a_receiver_that_never_ends_its_answer_is_cut_off(
    sent: Sent, receive: Callable[..., Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "TIMEOUT_SECONDS", 2.0)
    slow = receive()
    quick = receive()
    slow.drip.set()
    sent.queued(slow.url)
    sent.queued(quick.url)
    assert sent.step(sent.sender()) == 2
    assert len(slow.calls) == len(quick.calls) == 1
    assert list(sent.waiting().values()) == [pytest.approx(5, abs=2)]


# ---------------------------------------------------------------------- nowhere else


def resolving(monkeypatch: pytest.MonkeyPatch, name: str, *addresses: str) -> Callable[[], int]:
    """A resolver that returns one address after the other for ``name``, and counts its calls."""
    real = socket.getaddrinfo
    answers = itertools.cycle(addresses)
    asked = itertools.count()

    def getaddrinfo(host: Any, *rest: Any, **more: Any) -> Any:
        if host not in (name, name.encode()):
            return real(host, *rest, **more)
        next(asked)
        return real(next(answers), *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return lambda: next(asked)


def test_a_message_goes_to_the_address_that_was_checked(
    sent: Sent, receive: Callable[..., Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = receive()
    asked = resolving(monkeypatch, "hooks.example", "127.0.0.1", "127.0.0.9")
    sent.queued(f"http://hooks.example:{receiver.port}/")
    sent.step(sent.sender("http://hooks.example", "127.0.0.1"))
    assert [headers["Host"] for _, headers, _ in receiver.calls] == [
        f"hooks.example:{receiver.port}"
    ]
    assert asked() == 1, "looked up once"


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "10.0.0.1", "169.254.169.254", "::1", "::ffff:127.0.0.1"]
)
def test_a_name_that_leads_inside_is_not_followed(
    sent: Sent, receive: Callable[..., Receiver], monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    receiver = receive()
    resolving(monkeypatch, "hooks.example", address)
    sent.queued(f"http://hooks.example:{receiver.port}/")
    sent.step(sent.sender("http://hooks.example"))
    assert receiver.calls == [] and list(sent.waiting().values()) == [pytest.approx(5, abs=2)]


def test_a_host_that_is_not_allowed_any_more_gets_nothing(
    sent: Sent, receive: Callable[..., Receiver]
) -> None:
    receiver = receive()
    sent.queued(receiver.url)
    sent.step(sent.sender("example.org"))
    sent.make_due()
    sent.step(sent.sender("127.0.0.1"))  # for https only
    assert receiver.calls == [] and len(sent.waiting()) == 1


def test_no_proxy_comes_between(
    sent: Sent, receive: Callable[..., Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = receive()
    proxy = receive()
    monkeypatch.setenv("http_proxy", proxy.url)
    monkeypatch.setenv("ALL_PROXY", proxy.url)
    sent.queued(receiver.url)
    sent.step(sent.sender())
    assert len(receiver.calls) == 1 and proxy.calls == []


@pytest.fixture
def tls_receiver(receive: Callable[..., Receiver], certificate: tuple[Path, Path]) -> Receiver:
    """A receiver behind TLS, whose certificate names localhost."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    key, cert = certificate
    context.load_cert_chain(cert, key)
    return receive(tls=context)


@pytest.mark.parametrize(
    "name, trusted, arrives",
    [("localhost", True, True), ("localhost", False, False), ("hooks.example", True, False)],
    ids=["its own name", "unknown authority", "another name"],
)
def test_the_certificate_must_be_for_the_name_and_not_for_the_address(
    sent: Sent,
    tls_receiver: Receiver,
    certificate: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    trusted: bool,
    arrives: bool,
) -> None:
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[1]))
    resolving(monkeypatch, name, "127.0.0.1")
    sent.queued(f"https://{name}:{tls_receiver.port}/hook")
    sent.step(sent.sender(name, "127.0.0.1"))
    assert len(tls_receiver.calls) == len(tls_receiver.messages()) == arrives
    assert len(sent.waiting()) == 1 - arrives


def test_neither_secret_nor_url_is_in_any_log(
    sent: Sent, receive: Callable[..., Receiver], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    receiver = receive(204, 500)
    sender = sent.sender()
    for _ in range(2):
        sent.queued(f"{receiver.url}/canary-path?token=canary-token")
    sent.queued("http://127.0.0.1:1/canary-path")
    sent.step(sender)
    assert len(receiver.calls) == 2 and "did not accept event" in caplog.text
    for canary in ("canary", *SECRETS, *(secret.removeprefix("whsec_") for secret in SECRETS)):
        assert canary not in caplog.text


# ---------------------------------------------------------------------- with processes


def test_the_service_sends_them_by_itself(
    new_parts: Callable[..., Parts], receive: Callable[..., Receiver], secret_file: Path
) -> None:
    receiver = receive(500)
    parts = new_parts(webhook_hosts=["http://127.0.0.1"], webhook_secret_file=secret_file)
    parts.start_api()
    parts.start_worker()
    parts.submit("quick", webhook=f"{receiver.url}/hook")
    wait_until(lambda: "job.succeeded" in {message["type"] for message in receiver.messages()})
    wait_until(lambda: not parts.jobs.redis.exists("kd:webhooks"))
    told = Counter(headers["webhook-id"] for _, headers, _ in receiver.calls)
    assert sorted(told.values()) == [1, 1, 2], "the one that was not taken first came again"
