"""A running service, the faults that hurt it, and the clients that watch it.

    Cluster           server, API and workers; a thread restarts what has ended, as a container
                      runtime would
    RetryingClient    posts and asks over HTTP as a careful client does: it repeats a request with
                      the same key until it has an answer
    Prober            asks all the time, and records every answer
    FaultInjector     injects faults by a seeded plan: one at a time for each victim, several
                      victims at once
    Soak              posts jobs and injects faults, until there were enough of both

``bench/support/judge.py`` checks afterwards which promises were kept.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from bench.support.harness import Parts, make_body
from bench.support.ranks import inside_namespace
from kd.client.wire.jobs import TERMINAL_STATUSES
from services.store.embedded import StoreUnavailable
from services.store.queue import TASK_NAME

LEASE_SECONDS = 2.0
TEND_SECONDS = 0.1
PROBE_SECONDS = 0.05
PATIENCE_SECONDS = 180.0
#: Added to the seeds of jobs whose cache several workers capture together.
TOGETHER = 1_000_000


# ---------------------------------------------------------------------- the service


class Cluster:
    """Server, API and workers; a process that ends is restarted after a tenth of a second."""

    def __init__(
        self,
        folder: Path,
        workers: int = 2,
        child: str = "bench.support.light_child",
        **settings: Any,
    ) -> None:
        generous = {
            "lease_seconds": LEASE_SECONDS,
            "max_attempts": 1000,
            "quota_open_jobs": 10**6,
            "quota_record_bytes": 10**12,
        }
        rates = {"rate_post": 10**6, "rate_get": 10**6, "rate_sse": 10**6}
        self.inputs = make_inputs(folder / "inputs")
        roots = {"data_roots": (self.inputs,)}
        self.parts = Parts(folder, child, **(generous | rates | roots | settings))
        self.home = self.parts.settings.home
        self.processes = {"api": self.parts.start_api()}
        self.processes |= {
            f"worker-{number}": self.parts.start_worker() for number in range(1, workers + 1)
        }
        self.store_pid = self.parts.server.pid
        self.down: set[str] = set()  # names that must stay down for now
        self._closing = threading.Event()
        self._tender = threading.Thread(target=self._tend, name="tender")
        self._tender.start()

    @property
    def workers(self) -> list[str]:
        """The names of the workers."""
        return [name for name in self.processes if name != "api"]

    def _tend(self) -> None:
        while not self._closing.wait(TEND_SECONDS):
            if "store" not in self.down:
                self._tend_store()
            for name, process in self.processes.items():
                if process.poll() is not None and name not in self.down:
                    self.processes[name] = self.parts.start(
                        "services.api" if name == "api" else "services.worker"
                    )

    def _tend_store(self) -> None:
        if not _is_running(self.store_pid):
            with contextlib.suppress(StoreUnavailable):  # it tries again
                self.parts.server.ensure()
                self.store_pid = self.parts.server.pid

    def stop_store(self) -> None:
        """Kill the server; it stays away until ``down`` holds it no more."""
        self.down.add("store")
        _send_signal(self.store_pid, signal.SIGKILL)

    def find_children(self, worker: str) -> list[tuple[int, str]]:
        """Process and job of what a worker runs at this moment."""
        found = []
        for file in Path(f"/proc/{self.processes[worker].pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += [
                    (int(pid), job)
                    for pid in file.read_text().split()
                    if (job := self.find_job(int(pid)))
                ]
        return found

    def find_job(self, pid: int) -> str | None:
        """Find the job whose log a process writes to; None for any other process."""
        return find_job_of(self.home, pid)

    def find_live_runs(self) -> dict[int, str]:
        """Find every process that works on a job of this service, also one without its worker."""
        return find_live_runs(self.home)

    def close(self) -> None:
        """End every process."""
        self._closing.set()
        self._tender.join()
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
        self.parts.close()


def find_job_of(home: Path, pid: int) -> str | None:
    """Find the job in ``home`` whose log a process writes to; None for any other process."""
    try:
        log = Path(f"/proc/{pid}/fd/2").readlink()
    except OSError:
        return None
    return log.relative_to(home / "runs").parts[0] if log.is_relative_to(home / "runs") else None


def find_live_runs(home: Path) -> dict[int, str]:
    """Find every process that works on a job in ``home``, also one without its worker."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return {pid: job for pid in pids if (job := find_job_of(home, pid)) and _is_running(pid)}


def make_inputs(folder: Path) -> Path:
    """Write a text and a model that pass the checks at POST."""
    folder.mkdir(parents=True)
    (folder / "text.txt").write_text("It is a truth universally acknowledged.\n" * 50)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"x")
    return folder


def make_light_body(
    inputs: Path, name: str, kind: str = "distill", **changes: Any
) -> dict[str, Any]:
    """Make a job that POST accepts and ``bench/support/light_child.py`` runs."""
    job = make_body(name, kind, data={"train": str(inputs / "text.txt")}, **changes)
    job["student"]["init"]["tokenizer"] = str(inputs)
    if kind != "train":
        job["teacher"]["model"] = str(inputs)
    return job


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# ---------------------------------------------------------------------- clients


@dataclass
class Answer:
    """One answer to a client; ``status`` is None if the connection failed."""

    at: float
    path: str
    status: int | None
    seconds: float
    retry_after: bool = False
    version: int | None = None
    job_status: str | None = None


@dataclass
class RequestedAction:
    """An action that a client asked for, and the status in its answer: None without one."""

    action: str
    heard: str | None


@dataclass
class RequestedJob:
    """A job that a client posts, and the actions that it asks for."""

    key: str
    body: dict[str, Any]
    parents: tuple[RequestedJob, ...] = ()
    id: str = ""
    wishes: list[RequestedAction] = field(default_factory=list)


class RetryingClient:
    """Repeats requests for as long as the service may need to recover."""

    def __init__(self, server: str) -> None:
        self.http = httpx.Client(base_url=server, timeout=10, trust_env=False)
        self.answers: list[Answer] = []

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response | None:
        """Send one request and record its answer; None if the connection failed."""
        began = time.monotonic()
        try:
            response = self.http.request(method, path, **options)
        except httpx.TransportError:
            self.answers.append(Answer(began, path, None, time.monotonic() - began))
            return None
        answer = Answer(
            began,
            path,
            response.status_code,
            time.monotonic() - began,
            "retry-after" in response.headers,
        )
        if response.is_success and path.startswith("/jobs/"):
            job = response.json()
            answer.version = job.get("version")
            answer.job_status = job.get("status")
        self.answers.append(answer)
        return response

    def insist(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Repeat a request until its answer is something other than 503."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            response = self.ask(method, path, **options)
            if response is not None and response.status_code != 503:
                return response
            time.sleep(0.1)
        raise AssertionError(f"{method} {path}: no answer within {PATIENCE_SECONDS} s")

    def post(self, order: RequestedJob) -> None:
        """Post the job until it is accepted."""
        headers = {"Idempotency-Key": order.key}
        response = self.insist("POST", "/jobs", json=order.body, headers=headers)
        if response.status_code == 422 and order.parents:
            # A parent was cancelled meanwhile, so the refusal is right.
            self.answers.pop()
            order.parents = ()
            order.body["depends_on"] = []
            response = self.insist("POST", "/jobs", json=order.body, headers=headers)
        assert response.status_code == 202, response.text
        order.id = response.json()["id"]

    def wish(self, order: RequestedJob, action: str) -> None:
        """Ask once for an action and record the outcome."""
        wish = RequestedAction(action, None)
        order.wishes.append(wish)
        response = self.ask("POST", f"/jobs/{order.id}/{action}")
        if response is not None and response.is_success:
            wish.heard = response.json()["status"]
        elif response is not None and response.status_code == 409:
            order.wishes.remove(wish)

    def close(self) -> None:
        """Close the connections."""
        self.http.close()


class Prober:
    """Asks for readiness and for one job in turn, all the time, in its own thread."""

    def __init__(self, server: str) -> None:
        self.client = RetryingClient(server)
        self.jobs: list[str] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prober")
        self._thread.start()

    def _run(self) -> None:
        turn = 0
        while not self._closing.wait(PROBE_SECONDS):
            turn += 1
            self.client.ask("GET", "/readyz")
            if self.jobs:
                self.client.ask("GET", f"/jobs/{self.jobs[-1 - turn % min(len(self.jobs), 8)]}")

    @property
    def answers(self) -> list[Answer]:
        """The answers so far."""
        return list(self.client.answers)

    def close(self) -> None:
        """Stop asking."""
        self._closing.set()
        self._thread.join()
        self.client.close()


# ---------------------------------------------------------------------- the faults


@dataclass
class Fault:
    """One fault: when it began, when its cause ended, and the job that it hit, if any."""

    kind: str
    victim: str
    at: float
    healed: float = 0.0
    job: str | None = None


class FaultInjector:
    """Injects faults by a seeded plan; every fault is a generator of the seconds to wait."""

    #: kind of fault -> (weight in the draw, kind of victim)
    KINDS: ClassVar[dict[str, tuple[int, str]]] = {
        "child killed": (16, "worker"),
        "child stopped": (8, "worker"),
        "child terminated": (6, "worker"),
        "worker killed": (9, "worker"),
        "worker terminated": (7, "worker"),
        "worker stopped": (7, "worker"),
        "host stopped": (6, "worker"),
        "Redis killed": (5, "plane"),
        "Redis stopped": (5, "plane"),
        "API killed": (5, "plane"),
        "API stopped": (3, "plane"),
        "hints doubled": (6, "job"),
        "cancelled": (7, "job"),
        "paused, resumed": (10, "job"),
        "retried": (4, "ended job"),
    }

    def __init__(
        self, cluster: Cluster, seed: int, kinds: Mapping[str, tuple[int, str]] | None = None
    ) -> None:
        self.cluster = cluster
        self.dice = random.Random(seed)
        self.kinds = kinds or self.KINDS
        self.client = RetryingClient(cluster.parts.settings.server)
        self.injuries: list[Fault] = []
        self.orders: list[RequestedJob] = []
        self._busy: set[str] = set()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(16)
        self._pending: list[Any] = []

    def strike(self) -> bool:
        """Begin one random fault; False if its victim is busy or there is nothing to hurt."""
        weights = [weight for weight, _ in self.kinds.values()]
        kind = self.dice.choices(list(self.kinds), weights)[0]
        victim = self._victim(self.kinds[kind][1])
        with self._lock:
            if victim is None or victim in self._busy:
                return False
            self._busy.add(victim)
        injury = Fault(kind, victim, time.monotonic())
        steps = getattr(self, "_" + kind.replace(", ", "_").replace(" ", "_").lower())(injury)
        try:
            pause = next(steps)
        except StopIteration:  # the victim has no process or job that this fault could hit
            self._busy.discard(victim)
            return False
        self.injuries.append(injury)
        self._pending.append(self._pool.submit(self._heal, injury, steps, pause))
        return True

    def _heal(self, injury: Fault, steps: Iterator[float], pause: float) -> None:
        try:
            while True:
                time.sleep(pause)
                pause = next(steps)
        except StopIteration:
            pass
        finally:
            injury.healed = time.monotonic()
            self._busy.discard(injury.victim)

    def settle(self) -> None:
        """Wait until every fault has ended, and resume every paused job."""
        for pending in self._pending:
            pending.result(PATIENCE_SECONDS)
        for order in self.orders:
            response = self.client.insist("GET", f"/jobs/{order.id}")
            if response.json()["status"] in ("paused", "pausing"):
                self.client.insist("POST", f"/jobs/{order.id}/resume")

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)
        self.client.close()

    def _victim(self, whom: str) -> str | None:
        if whom == "worker":
            return self.dice.choice(self.cluster.workers)
        if whom == "plane":
            return "plane"
        found = [order.id for order in self.orders[-12:] if order.id]
        return self.dice.choice(found) if found else None

    def _order(self, injury: Fault) -> RequestedJob:
        injury.job = injury.victim
        return next(order for order in self.orders if order.id == injury.victim)

    # -- a child

    def _child(self, injury: Fault, number: int) -> int | None:
        """Send a signal to the child of a worker, if it has one; returns its process id."""
        for pid, job in self.cluster.find_children(injury.victim):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                injury.job = job
                return pid
        return None

    def _child_killed(self, injury: Fault) -> Iterator[float]:
        if self._child(injury, signal.SIGKILL):
            yield 0.0

    def _child_terminated(self, injury: Fault) -> Iterator[float]:
        if self._child(injury, signal.SIGTERM):
            yield 0.0

    def _child_stopped(self, injury: Fault) -> Iterator[float]:
        if pid := self._child(injury, signal.SIGSTOP):
            yield self.dice.uniform(0.2, 2 * LEASE_SECONDS)
            _send_signal(pid, signal.SIGCONT)

    # -- a worker

    def _worker(self, injury: Fault, number: int) -> int:
        process = self.cluster.processes[injury.victim]
        injury.job = next((job for _, job in self.cluster.find_children(injury.victim)), None)
        process.send_signal(number)
        return process.pid

    def _worker_killed(self, injury: Fault) -> Iterator[float]:
        self._worker(injury, signal.SIGKILL)
        yield self.dice.uniform(0.2, 1.0)

    def _worker_terminated(self, injury: Fault) -> Iterator[float]:
        self._worker(injury, signal.SIGTERM)
        yield self.dice.uniform(0.2, 1.0)

    def _worker_stopped(self, injury: Fault) -> Iterator[float]:
        pid = self._worker(injury, signal.SIGSTOP)
        yield self.dice.uniform(0.3, 2.5 * LEASE_SECONDS)
        _send_signal(pid, signal.SIGCONT)

    def _host_stopped(self, injury: Fault) -> Iterator[float]:
        """Stop worker and child together, as if a virtual machine were paused."""
        pids = [
            self._worker(injury, signal.SIGSTOP),
            *(pid for pid, _ in self.cluster.find_children(injury.victim)),
        ]
        for pid in pids:
            _send_signal(pid, signal.SIGSTOP)
        yield self.dice.uniform(0.3, 2.5 * LEASE_SECONDS)
        for pid in reversed(pids):  # the child first: it must notice by itself that it is late
            _send_signal(pid, signal.SIGCONT)

    # -- the store and the API

    def _redis_killed(self, injury: Fault) -> Iterator[float]:
        self.cluster.stop_store()
        yield self.dice.uniform(0.0, 2.0)
        self.cluster.down.discard("store")

    def _redis_stopped(self, injury: Fault) -> Iterator[float]:
        _send_signal(self.cluster.store_pid, signal.SIGSTOP)
        yield self.dice.uniform(0.3, 2 * LEASE_SECONDS)
        _send_signal(self.cluster.store_pid, signal.SIGCONT)

    def _api_killed(self, injury: Fault) -> Iterator[float]:
        self.cluster.processes["api"].kill()
        yield 0.0

    def _api_stopped(self, injury: Fault) -> Iterator[float]:
        process = self.cluster.processes["api"]
        process.send_signal(signal.SIGSTOP)
        yield self.dice.uniform(0.3, 1.5 * LEASE_SECONDS)
        process.send_signal(signal.SIGCONT)

    # -- what clients and the broker do

    def _hints_doubled(self, injury: Fault) -> Iterator[float]:
        order = self._order(injury)
        with contextlib.suppress(Exception):  # the broker may be away: then no hint is sent
            for _ in range(20):
                stage = self.dice.choice(["precompute", "train"])
                self.cluster.parts.queue.send_task(TASK_NAME, args=[order.id, stage], queue=stage)
        yield 0.0

    def _cancelled(self, injury: Fault) -> Iterator[float]:
        order = self._order(injury)
        yield 0.0
        self.client.wish(order, "cancel")

    def _paused_resumed(self, injury: Fault) -> Iterator[float]:
        order = self._order(injury)
        yield 0.0
        self.client.wish(order, "pause")
        yield self.dice.uniform(0.0, 2.0)
        self.client.wish(order, "resume")

    def _retried(self, injury: Fault) -> Iterator[float]:
        order = self._order(injury)
        yield 0.0
        if any(wish.action == "cancel" for wish in order.wishes) and not order.parents:
            self.client.wish(order, "retry")


def _send_signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


# ---------------------------------------------------------------------- the soak


@dataclass(frozen=True)
class SoakPlan:
    """The size of a soak."""

    faults: int
    jobs: int
    seed: int = 1
    workers: int = 3
    backlog: int = 7
    pace: tuple[float, float] = (0.2, 1.2)  # seconds between two faults


class Soak:
    """Posts jobs and injects faults until there were enough of both; then waits for the jobs."""

    def __init__(
        self, cluster: Cluster, plan: SoakPlan, chaos: FaultInjector | None = None
    ) -> None:
        self.cluster = cluster
        self.plan = plan
        self.dice = random.Random(plan.seed + 1)
        self.chaos = chaos or FaultInjector(cluster, plan.seed)
        self.prober = Prober(cluster.parts.settings.server)
        self.client = RetryingClient(cluster.parts.settings.server)
        self.began = time.monotonic()

    @property
    def orders(self) -> list[RequestedJob]:
        """The jobs that were posted."""
        return self.chaos.orders

    def run(self, say: Callable[[str], None] = lambda line: None) -> None:
        """Run the soak to its end."""
        with ThreadPoolExecutor(1) as pool:
            poster = pool.submit(self._post)
            self._strike(poster, say)
            poster.result()
        self.chaos.settle()
        say(f"{len(self.chaos.injuries)} faults are over; waiting for the open jobs")
        self._await_the_end()

    def _strike(self, poster: Future[None], say: Callable[[str], None]) -> None:
        while len(self.chaos.injuries) < self.plan.faults and not poster.done():
            if self.chaos.strike() and len(self.chaos.injuries) % 50 == 0:
                faults = len(self.chaos.injuries)
                say(f"{faults} faults, {len(self.orders)} jobs, {self.seconds:.0f} s")
            ahead = len(self.chaos.injuries) * self.plan.jobs > len(self.orders) * self.plan.faults
            # Slow down where faults are ahead of jobs, so that both end at the same time.
            time.sleep(self.dice.uniform(*self.plan.pace) * (2 if ahead else 1))

    @property
    def seconds(self) -> float:
        """Seconds since the soak began."""
        return time.monotonic() - self.began

    def _post(self) -> None:
        while len(self.orders) < self.plan.jobs or len(self.chaos.injuries) < self.plan.faults:
            if self._open() < self.plan.backlog:
                order = self._next_order(len(self.orders))
                self.client.post(order)
                self.orders.append(order)
                self.prober.jobs.append(order.id)
            else:
                time.sleep(0.1)

    def _open(self) -> int:
        try:
            return int(self.cluster.parts.jobs.redis.zcard("kd:open"))  # type: ignore[arg-type]
        except Exception:  # Redis is away: look again later
            return self.plan.backlog

    def _next_order(self, number: int) -> RequestedJob:
        """Make a job: a third share a cache, a tenth wait for another, a thirtieth always die.

        Of a quarter several workers capture the cache together, which no other job needs.
        """
        dice = self.dice
        inputs = self.cluster.inputs
        key = f"{self.plan.seed}-{number}"
        if number % 30 == 29:
            return RequestedJob(key, make_light_body(inputs, "poison", max_attempts=3))
        together = number % 4 == 3
        seed = number - dice.randint(1, 3) if number > 3 and dice.random() < 1 / 3 else number
        shards = 3 + seed % 4
        if together:
            seed, shards = number + TOGETHER, 8 + number % 9
        name = f"light-{seed}-{shards}-{50 + 10 * (seed % 5)}"
        plain = [order for order in self.orders[-5:] if order.body["name"] != "poison"]
        parents = (dice.choice(plain),) if plain and dice.random() < 0.1 else ()
        options: dict[str, Any] = {
            "depends_on": [parent.id for parent in parents],
            "priority": dice.randint(3, 7),
        }
        if together:
            options["resources"] = {"workers": dice.choice([2, 3, "auto"])}
        return RequestedJob(key, make_light_body(inputs, name, **options), parents)

    def _await_the_end(self) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        store = self.cluster.parts.jobs
        while time.monotonic() < deadline:
            waiting = [
                order.id
                for order in self.orders
                if store.get(order.id).status not in TERMINAL_STATUSES
            ]  # type: ignore[union-attr]
            if not waiting:
                return
            time.sleep(0.5)

    def close(self) -> None:
        """End the threads."""
        self.prober.close()
        self.chaos.close()
        self.client.close()


# ---------------------------------------------------------------------- private disks and networks


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a tmpfs of ``size`` at ``folder``; skips the test if this process may not mount."""
    if os.geteuid() != 0 or sys.platform != "linux":
        pytest.skip("mounting a tmpfs needs root on Linux")
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def run_command(*command: str) -> None:
    """Run a command that must succeed."""
    subprocess.run(command, check=True, capture_output=True)


class Network:
    """Two network namespaces, ``near`` and ``far``, joined by one cable.

    Their names hold this process's id, so that several tests can run at once.
    """

    ADDRESS: ClassVar[dict[str, str]] = {"near": "10.77.0.1", "far": "10.77.0.2"}

    def __init__(self) -> None:
        self.names = {side: f"kd-{side}-{os.getpid()}" for side in self.ADDRESS}
        for side in self.ADDRESS:
            run_command("ip", "netns", "add", self.names[side])
        near = ("near", "netns", self.names["near"])
        far = ("far", "netns", self.names["far"])
        run_command("ip", "link", "add", *near, "type", "veth", "peer", "name", *far)
        for side, address in self.ADDRESS.items():
            self._ip(side, "addr", "add", f"{address}/24", "dev", side)
            self._ip(side, "link", "set", "lo", "up")
            self._ip(side, "link", "set", side, "up")

    def _ip(self, side: str, *arguments: str) -> None:
        run_command("ip", "-n", self.names[side], *arguments)

    @contextlib.contextmanager
    def inside(self, side: str) -> Iterator[None]:
        """Run the block in the namespace of one side."""
        with inside_namespace(self.names[side]):
            yield

    def cut(self, direction: str) -> None:
        """Cut the cable (``both``), or drop all packets ``out`` of the far side or ``in`` to it."""
        if direction == "both":
            self._ip("far", "link", "set", "far", "down")
        else:  # send the packets to a hardware address that does not exist
            side, other = ("far", "near") if direction == "out" else ("near", "far")
            nobody = ("lladdr", "02:00:00:00:00:99")
            place = ("dev", side, "nud", "permanent")
            self._ip(side, "neigh", "replace", self.ADDRESS[other], *nobody, *place)

    def heal(self, direction: str) -> None:
        """Undo ``cut``."""
        if direction == "both":
            self._ip("far", "link", "set", "far", "up")
        else:
            side, other = ("far", "near") if direction == "out" else ("near", "far")
            self._ip(side, "neigh", "del", self.ADDRESS[other], "dev", side)

    def close(self) -> None:
        """Remove both namespaces."""
        for name in self.names.values():
            run_command("ip", "netns", "del", name)
