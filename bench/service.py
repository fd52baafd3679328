"""Measure the API under load, with thousands of jobs stored and hundreds of event streams open.

    python bench/service.py [--jobs 10000] [--more 100000] [--streams 200] [--seconds 5]
                            [--readers 50] [--out FILE]

API and Valkey are real processes on this machine. The client is one too and shares their cores, so
the numbers show what is left for the service. Floors: GET /healthz is the cost of HTTP alone, and
HGETALL the cost of the store alone. The clients are closed loops: each sends its next request when
the answer to its last one has arrived.

The second table has one busy job, whose events all readers want. Its floor is a client that reads
the job's events from the store, without the API.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.support.paths import ROOT
from kd.config.jobfile import parse_config
from kd.progress import Event
from services.settings import Settings
from services.store.connection import connect_redis
from services.store.embedded import EmbeddedServer, find_binary, find_free_port
from services.store.jobs.leases import EventBatch
from services.store.jobs.store import JobStore

UNLIMITED = {
    "rate_post": 10**9,
    "rate_get": 10**9,
    "rate_sse": 10**6,
    "quota_open_jobs": 10**9,
    "quota_record_bytes": 10**12,
}
JOB: dict[str, Any] = {
    "kind": "train",
    "name": "load",
    "student": {"init": {"layers": 1, "hidden_size": 64, "tokenizer": "examples/austen/teacher"}},
    "data": {"train": "examples/austen/text/persuasion.txt"},
    "loss": {"alpha": 1.0},
    "train": {"max_steps": 10},
}
TABLE_HEAD = ("| what | clients | a second | p50, ms | p99, ms |", "|---|--:|--:|--:|--:|")
#: Jobs whose streams have listeners.
RUNNING = 20
#: Seconds between two beats of a job.
BEAT_SECONDS = 0.5
#: Seconds between two beats of the busy job, and the events of each of them.
BUSY_SECONDS = 0.1
BUSY_EVENTS = 10


@dataclass(frozen=True)
class LoadResult:
    """The result of one kind of request: seconds of each, and of all together (``wall``)."""

    latencies: list[float]
    wall: float

    def row(self, name: str, clients: int) -> str:
        """Format throughput, median and 99th percentile as a row of the table."""
        middle, late = (1000 * compute_percentile(self.latencies, share) for share in (0.5, 0.99))
        rate = len(self.latencies) / self.wall
        return f"| {name} | {clients} | {rate:,.0f} | {middle:.1f} | {late:.1f} |"


def compute_percentile(values: list[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed; NaN if none."""
    if not values:
        return math.nan
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


# ---------------------------------------------------------------------- the service


@dataclass
class ServiceUnderTest:
    """An API and its store as processes."""

    port: int
    store: JobStore
    ids: list[str] = field(default_factory=list)

    def fill(self, count: int) -> None:
        """Store jobs until there are ``count``."""
        config = parse_config(JOB)
        while len(self.ids) < count:
            self.ids.append(self.store.create(config).id)


@contextmanager
def service(folder: Path) -> Iterator[ServiceUnderTest]:
    """Start API and store, yield them, and stop them."""
    server = EmbeddedServer(folder / "redis", find_binary())
    server.start()
    port = find_free_port()
    settings = Settings.model_validate(
        {"home": folder, "root": ROOT, "redis_url": server.url, "port": port, "disk_floor_bytes": 0}
        | UNLIMITED
    )
    environment = os.environ | settings.environment() | {"PYTHONPATH": str(ROOT)}
    with (folder / "api.log").open("wb") as log:
        api = subprocess.Popen(
            [sys.executable, "-m", "services.api"], env=environment, stdout=log, stderr=log
        )
    try:
        _await(f"http://127.0.0.1:{port}/readyz", api, folder / "api.log")
        with connect_redis(server.url, timeout=30) as client:
            yield ServiceUnderTest(port, JobStore(client))
    finally:
        api.terminate()
        api.wait(20)
        server.stop()


def _await(url: str, api: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(600):
        if api.poll() is not None:
            break
        try:
            if httpx.get(url, trust_env=False).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise SystemExit(f"the API did not start:\n{log.read_text(errors='replace')[-2000:]}")


# ---------------------------------------------------------------------- the client


class Connection:
    """A kept-alive HTTP/1.1 connection in little code.

    A library's client would take more of the cores than the server does.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def open(self) -> Connection:
        """Connect."""
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    def send(self, method: str, path: str, body: bytes = b"", accept: str = "*/*") -> None:
        """Send a request."""
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: {accept}\r\n"
        head += f"Content-Length: {len(body)}\r\n"
        kind = "Content-Type: application/json\r\n" if body else ""
        self._writer.write((head + kind + "\r\n").encode() + body)

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of the answer."""
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        return int(lines[0].split()[1]), dict(
            line.lower().split(": ", 1) for line in lines[1:] if ": " in line
        )

    async def request(self, method: str, path: str, body: bytes = b"") -> int:
        """Send a request, read the whole answer, return its status."""
        self.send(method, path, body)
        status, headers = await self.head()
        await self._reader.readexactly(int(headers.get("content-length", "0")))
        return status

    async def lines(self) -> bytes:
        """The next line of an endless answer."""
        return await self._reader.readline()

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()


async def generate_load(
    port: int, clients: int, seconds: float, request: Callable[[int], tuple[str, str, bytes]]
) -> LoadResult:
    """Send requests from ``clients`` closed loops for ``seconds``; raises at the first failure."""
    latencies: list[float] = []
    end = time.perf_counter() + seconds

    async def loop(first: int) -> None:
        connection = await Connection(port).open()
        number = first
        while (began := time.perf_counter()) < end:
            method, path, body = request(number)
            status = await connection.request(method, path, body)
            if status >= 300:
                raise RuntimeError(f"{method} {path}: {status}")
            latencies.append(time.perf_counter() - began)
            number += clients
        connection.close()

    began = time.perf_counter()
    await asyncio.gather(*(loop(number) for number in range(clients)))
    return LoadResult(latencies, time.perf_counter() - began)


# ---------------------------------------------------------------------- streams


class HeartbeatThread(threading.Thread):
    """Sends a worker's beats for some jobs; each event holds its sending time.

    A beat has ``events`` events, and comes every ``seconds``.
    """

    def __init__(
        self, store: JobStore, jobs: int = RUNNING, events: int = 1, seconds: float = BEAT_SECONDS
    ) -> None:
        super().__init__(daemon=True)
        self._store = store
        self._events = events
        self._seconds = seconds
        self._ended = threading.Event()
        found = (store.claim_next("train", "bench", 3600.0) for _ in range(jobs))
        self.claims = [claim for claim in found if claim is not None]

    def run(self) -> None:
        """Beat until ``stop``."""
        number = 0
        while not self._ended.wait(self._seconds):
            number += 1
            for claim in self.claims:
                events = tuple(self._make_event(number, index) for index in range(self._events))
                self._store.beat(claim, 3600.0, EventBatch(number, events))

    def _make_event(self, number: int, index: int) -> Event:
        data = {"step": number * self._events + index, "loss": 1.0, "sent": time.time()}
        return Event("metrics", data)

    def stop(self) -> None:
        """End the beats."""
        self._ended.set()
        self.join()


async def listen(port: int, job_id: str, delays: list[float]) -> None:
    """Add to ``delays`` the seconds that each event took from its beat to this client."""
    connection = await Connection(port).open()
    connection.send("GET", f"/jobs/{job_id}/events/stream", accept="text/event-stream")
    status, _ = await connection.head()
    if status != 200:
        raise RuntimeError(f"events/stream: {status}")
    try:
        while line := await connection.lines():
            if line.startswith(b"data:") and b'"sent"' in line:
                delays.append(time.time() - json.loads(line[5:])["sent"])
    finally:
        connection.close()


# ---------------------------------------------------------------------- the table


def list_requests(found: ServiceUnderTest) -> dict[str, Callable[[int], tuple[str, str, bytes]]]:
    """The measured requests by name; each is a function of its number."""
    body = json.dumps(JOB).encode()
    return {
        "GET /jobs/{id}": lambda n: ("GET", f"/jobs/{found.ids[n % len(found.ids)]}", b""),
        "GET /jobs?limit=20": lambda n: ("GET", "/jobs?limit=20", b""),
        "POST /jobs": lambda n: ("POST", "/jobs", body),
    }


async def measure_under_load(found: ServiceUnderTest, options: argparse.Namespace) -> list[str]:
    """Rows of throughput and latency, first without streams, then with all of them open."""
    floor = await generate_load(found.port, 8, options.seconds, lambda n: ("GET", "/healthz", b""))
    rows = [floor.row("GET /healthz (floor: HTTP alone)", 8)]
    for name, request in list_requests(found).items():
        for clients in (1, 8):
            rows.append(
                (await generate_load(found.port, clients, options.seconds, request)).row(
                    name, clients
                )
            )
    return rows + await measure_with_streams(found, options)


async def measure_with_streams(found: ServiceUnderTest, options: argparse.Namespace) -> list[str]:
    """Rows of throughput and latency while streams are open and events flow through them."""
    beats = HeartbeatThread(JobStore(found.store.redis))
    delays = list[float]()
    running = [claim.id for claim in beats.claims]
    streams = [
        asyncio.create_task(listen(found.port, running[number % len(running)], delays))
        for number in range(options.streams)
    ]
    await asyncio.sleep(1.0)
    beats.start()
    rows = []
    for name, request in list_requests(found).items():
        measured = await generate_load(found.port, 8, options.seconds, request)
        rows.append(measured.row(f"{name}, {options.streams} streams open", 8))
    beats.stop()
    for stream in streams:
        if stream.done():
            stream.result()
        stream.cancel()
    expected = options.streams / BEAT_SECONDS
    middle, late = (1000 * compute_percentile(delays, share) for share in (0.5, 0.99))
    wall = 3 * options.seconds
    name = f"an event, beat to stream (sent: {expected:,.0f}/s)"
    rate = len(delays) / wall
    rows.append(f"| {name} | {options.streams} | {rate:,.0f} | {middle:.1f} | {late:.1f} |")
    return rows


def follow_store(store: JobStore, job_id: str, delays: list[float], ended: threading.Event) -> None:
    """Add to ``delays`` the seconds that each event took from its beat to a client of the store."""
    after = "$"
    while not ended.is_set():
        streams: Any = store.redis.xread({f"kd:job:{job_id}:events": after}, block=500)
        for place, fields in streams[0][1] if streams else ():
            after = place
            delays.append(time.time() - json.loads(fields["data"])["sent"])


async def measure_busy_job(found: ServiceUnderTest, options: argparse.Namespace) -> list[str]:
    """Rows of the table of one busy job that ``options.readers`` streams follow."""
    beats = HeartbeatThread(JobStore(found.store.redis), 1, BUSY_EVENTS, BUSY_SECONDS)
    job_id = beats.claims[0].id
    floor = list[float]()
    ended = threading.Event()
    follower = threading.Thread(
        target=follow_store, args=(found.store, job_id, floor, ended), daemon=True
    )
    delays = list[float]()
    streams = [
        asyncio.create_task(listen(found.port, job_id, delays)) for _ in range(options.readers)
    ]
    await asyncio.sleep(1.0)
    follower.start()
    beats.start()
    # Without other requests first: what the streams need by themselves.
    await asyncio.sleep(options.seconds)
    quiet = len(delays)
    requests = await measure_requests(found, job_id, options)
    beats.stop()
    ended.set()
    for stream in streams:
        if stream.done():
            stream.result()
        stream.cancel()
    follower.join()
    sent = BUSY_EVENTS / BUSY_SECONDS
    name = f"an event, beat to XREAD (floor: the store alone; sent: {sent:.0f}/s)"
    idle = "an event, beat to stream"
    loaded = f"{idle}, under the requests below"
    return [
        LoadResult(floor, 4 * options.seconds).row(name, 1),
        LoadResult(delays[:quiet], options.seconds).row(idle, options.readers),
        LoadResult(delays[quiet:], 3 * options.seconds).row(loaded, options.readers),
        *requests,
    ]


async def measure_requests(
    found: ServiceUnderTest, busy: str, options: argparse.Namespace
) -> list[str]:
    """Rows of three kinds of request beside the streams; the first is the floor of the others."""
    paths = {
        "GET /healthz (floor: HTTP alone)": "/healthz",
        "GET /jobs/{id} of the busy job": f"/jobs/{busy}",
        "GET /jobs/{id} of a queued job": f"/jobs/{found.ids[-1]}",
    }
    rates = dict[str, float]()
    rows = []
    for name, path in paths.items():
        measured = await generate_load(found.port, 8, options.seconds, make_get(path))
        rates[name] = len(measured.latencies) / measured.wall
        share = rates[name] / next(iter(rates.values()))
        rows.append(measured.row(f"{name}, {share:.2f} of the floor's rate", 8))
    return rows


def make_get(path: str) -> Callable[[int], tuple[str, str, bytes]]:
    """Return a function that gives the same GET for every number."""
    return lambda _: ("GET", path, b"")


def measure_store_floor(found: ServiceUnderTest, count: int = 2000) -> str:
    """Measure reads of the store alone, by one client."""
    ids = found.ids[:count]
    latencies = list[float]()
    began = time.perf_counter()
    for job_id in ids:
        start = time.perf_counter()
        found.store.redis.hgetall(f"kd:job:{job_id}")
        latencies.append(time.perf_counter() - start)
    return LoadResult(latencies, time.perf_counter() - began).row(
        "HGETALL of a record (floor: the store alone)", 1
    )


def count_commands(found: ServiceUnderTest) -> int:
    """Commands that the server has run so far."""
    return int(found.store.redis.info("stats")["total_commands_processed"])


def measure_listing(found: ServiceUnderTest, pages: int = 50) -> tuple[float, float]:
    """Median milliseconds of a page of 20 jobs, and the store's commands for each page.

    Commands of other clients of the store are measured afterwards and subtracted.
    """
    with httpx.Client(base_url=f"http://127.0.0.1:{found.port}", trust_env=False) as client:
        client.get("/jobs?limit=20")
        before = count_commands(found)
        began = time.perf_counter()
        taken = []
        for _ in range(pages):
            start = time.perf_counter()
            client.get("/jobs?limit=20&status=queued").raise_for_status()
            taken.append(time.perf_counter() - start)
        spent = count_commands(found) - before
        wall = time.perf_counter() - began
    idle = count_commands(found)
    time.sleep(wall)
    return 1000 * statistics.median(taken), (spent - (count_commands(found) - idle)) / pages


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--jobs", type=int, default=10_000, help="jobs stored while the API is under load"
    )
    parser.add_argument(
        "--more", type=int, default=100_000, help="jobs stored when a listing is measured last"
    )
    parser.add_argument("--streams", type=int, default=200, help="open event streams")
    parser.add_argument("--readers", type=int, default=50, help="open streams of the busy job")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each measurement")
    parser.add_argument("--out", type=Path, help="write the page to this file too")
    options = parser.parse_args()
    lines = [
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}.",
        "",
    ]
    with tempfile.TemporaryDirectory() as folder, service(Path(folder)) as found:
        found.fill(100)
        pages = {100: measure_listing(found)}
        found.fill(options.jobs)
        pages[options.jobs] = measure_listing(found)
        lines += [
            f"With {options.jobs:,} jobs stored:",
            "",
            *TABLE_HEAD,
            measure_store_floor(found),
            *asyncio.run(measure_under_load(found, options)),
            "",
            f"One busy job, with {BUSY_EVENTS / BUSY_SECONDS:.0f} events a second:",
            "",
            *TABLE_HEAD,
            *asyncio.run(measure_busy_job(found, options)),
            "",
        ]
        found.fill(options.more)
        pages[options.more] = measure_listing(found)
    lines += [
        "One page of 20 of the queued jobs:",
        "",
        "| jobs stored | p50, ms | commands of the store |",
    ]
    lines += [
        "|--:|--:|--:|",
        *(f"| {jobs:,} | {ms:.1f} | {spent:.1f} |" for jobs, (ms, spent) in pages.items()),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
