"""A service on several hosts, each a network namespace of this machine, and faults between them.

    store --+
    api   --+-- a bridge in a namespace of its own
    one   --+
    two   --+   three workers, each with a clock of its own
    three --+

All hosts see one file system, as they would with NFS. Needs root on Linux, `ip` and `tc`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from safetensors.numpy import load_file

from bench.support.faults import find_live_runs, make_inputs, run_command
from bench.support.harness import Parts, Started
from bench.support.judge import find_job_violations
from bench.support.paths import AUSTEN
from bench.support.ranks import inside_namespace
from bench.support.waiting import wait_until
from kd.client.wire.jobs import TERMINAL_STATUSES
from kd.tracking.metrics import read_metrics

WORKERS = ("one", "two", "three")
HOSTS = ("store", "api", *WORKERS)
#: Seconds that all jobs may take after the last fault.
PATIENCE_SECONDS = 900.0


class Net:
    """Namespaces that are joined by a bridge. Their names hold this process's id."""

    def __init__(self, hosts: Sequence[str] = HOSTS) -> None:
        self.hub = f"kd-hub-{os.getpid()}"
        self.names = {host: f"kd-{host}-{os.getpid()}" for host in hosts}
        self.address = {host: f"10.78.0.{number}" for number, host in enumerate(hosts, 1)}
        for name in (self.hub, *self.names.values()):
            run_command("ip", "netns", "add", name)
        self._hub("link", "add", "bridge0", "type", "bridge")
        self._hub("link", "set", "bridge0", "up")
        for host, name in self.names.items():
            cable = ("link", "add", f"to-{host}", "type", "veth", "peer", "name", "net0")
            run_command("ip", "-n", self.hub, *cable, "netns", name)
            self._hub("link", "set", f"to-{host}", "master", "bridge0")
            self._hub("link", "set", f"to-{host}", "up")
            place = ("addr", "add", f"{self.address[host]}/24", "dev", "net0")
            for words in (place, ("link", "set", "lo", "up"), ("link", "set", "net0", "up")):
                run_command("ip", "-n", name, *words)

    def _hub(self, *words: str) -> None:
        run_command("ip", "-n", self.hub, *words)

    @contextlib.contextmanager
    def inside(self, host: str) -> Iterator[None]:
        """Run the block in the namespace of a host."""
        with inside_namespace(self.names[host]):
            yield

    def cut(self, host: str) -> None:
        """Cut the cable of a host."""
        self._hub("link", "set", f"to-{host}", "down")

    def mend(self, host: str) -> None:
        """Mend the cable of a host."""
        self._hub("link", "set", f"to-{host}", "up")

    def slow(self, host: str) -> None:
        """Let 32 kbit/s through to a host, and drop what waits longer than 0.4 s."""
        limits = ("rate", "32kbit", "burst", "4kb", "latency", "400ms")
        _shape(self.hub, f"to-{host}", "add", "tbf", *limits)

    def unslow(self, host: str) -> None:
        """Undo ``slow``."""
        _shape(self.hub, f"to-{host}", "del")

    def set_rate(self, host: str, mbits: float) -> None:
        """Let so many Mbit/s through to a host, and as many from it."""
        # A burst holds a packet as large as TCP hands them to the interface.
        limits = ("rate", f"{mbits:g}mbit", "burst", "128kb", "latency", "50ms")
        for namespace, device in ((self.hub, f"to-{host}"), (self.names[host], "net0")):
            _shape(namespace, device, "replace", "tbf", *limits)

    def list_pids(self, host: str) -> list[int]:
        """List the processes of a host."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.names[host]], capture_output=True, text=True, check=True
        )
        return [int(pid) for pid in listed.stdout.split() if int(pid) != os.getpid()]

    def close(self) -> None:
        """End the processes of all hosts and remove the namespaces."""
        for host in self.names:
            _send(self.list_pids(host), signal.SIGKILL)
        for name in (self.hub, *self.names.values()):
            run_command("ip", "netns", "del", name)


def _shape(namespace: str, device: str, verb: str, *words: str) -> None:
    """Change what ``device`` lets out: ``tc qdisc VERB``."""
    call = ("tc", "qdisc", verb, "dev", device, "root", *words)
    run_command("ip", "netns", "exec", namespace, *call)


def _send(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


class HostedService:
    """Job store, API and three workers, each on its host. Runs inside the host of the store.

    ``child`` is the module of the processes of stages; jobs may read ``roots``. With ``skewed`` the
    clocks of the workers are wrong; torchrun cannot sleep under the library that does it.
    """

    def __init__(
        self,
        net: Net,
        folder: Path,
        seed: int,
        child: str = "bench.support.light_child",
        roots: tuple[Path, ...] = (),
        skewed: bool = True,
    ) -> None:
        self.net = net
        self.skewed = skewed
        self.dice = random.Random(seed)
        self.clocks = {host: folder / f"clock-{host}" for host in WORKERS}
        folder.mkdir(parents=True, exist_ok=True)
        # A fork would be in the network of the process that it comes from.
        self.parts = Parts(
            folder / "home",
            child,
            forked=False,
            max_attempts=1000,
            # The ranks of a member are silent while the leader makes the report.
            silence_seconds=600.0,
            data_roots=roots or (make_inputs(folder / "inputs"),),
        )
        self.open_store()
        self.processes: dict[str, Started] = {}
        self.start("api")
        for host in WORKERS:
            self.set_clock(host)
            self.start(host)
        wait_until(self.api_answers)
        wait_until(lambda: len(self.parts.jobs.list_workers()) == len(WORKERS))

    def open_store(self) -> None:
        """Let the store be reached from the other hosts."""
        self.parts.jobs.redis.config_set("bind", f"127.0.0.1 {self.net.address['store']}")

    def start(self, host: str) -> None:
        """Start the process of a host."""
        address = self.net.address["store"]
        assert self.parts.settings.redis_url is not None
        url = self.parts.settings.redis_url.replace("127.0.0.1", address)
        module = "services.api" if host == "api" else "services.worker"
        skewed = self.skewed and host != "api"
        clock = make_clock_variables(self.clocks[host]) if skewed else {}
        with self.net.inside(host):
            self.processes[host] = self.parts.start(module, KD_REDIS_URL=url, **clock)

    def set_clock(self, host: str) -> int:
        """Set a worker's clock wrong by up to an hour; returns the seconds."""
        seconds = self.dice.randint(-3600, 3600)
        self.clocks[host].write_text(f"{seconds:+d}")
        return seconds

    def api_answers(self) -> bool:
        """Return whether the API says on its own host that it is ready."""
        with self.net.inside("api"), contextlib.suppress(httpx.TransportError):
            port = self.parts.settings.port
            answer = httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=5, trust_env=False)
            return answer.is_success
        return False

    # -- faults: each ends healed

    def cut(self, host: str) -> None:
        """Cut the host off for a while."""
        self.net.cut(host)
        time.sleep(self.dice.uniform(0.5, 6))
        self.net.mend(host)

    def slow(self, host: str) -> None:
        """Let little through to the host for a while."""
        self.net.slow(host)
        time.sleep(self.dice.uniform(2, 8))
        self.net.unslow(host)

    def freeze(self, host: str) -> None:
        """Stop every process of the host, and let them go on."""
        pids = self.net.list_pids(host)
        _send(pids, signal.SIGSTOP)
        time.sleep(self.dice.uniform(0.5, 6))
        _send(pids, signal.SIGCONT)

    def kill(self, host: str) -> None:
        """Kill every process of the host, and start it again a while later, with another clock."""
        _send(self.net.list_pids(host), signal.SIGKILL)
        self.processes[host].wait()
        time.sleep(self.dice.uniform(0, 3))
        if host in self.clocks:
            self.set_clock(host)
        self.start(host)

    def kill_store(self, _: str) -> None:
        """Kill the job store, and start it again with its data."""
        _send([self.parts.server.pid], signal.SIGKILL)
        time.sleep(self.dice.uniform(0.2, 2))
        self.parts.server.ensure()
        self.open_store()

    def skew(self, host: str) -> None:
        """Move the clock of a worker while it works."""
        self.set_clock(host)

    def strike(self) -> str:
        """Inject one fault; returns its name and host once it is healed."""
        kinds: list[tuple[Callable[[str], None], tuple[str, ...]]] = [
            (self.cut, HOSTS),
            (self.slow, HOSTS),
            (self.freeze, ("api", *WORKERS)),
            (self.kill, ("api", *WORKERS)),
            (self.kill_store, ("store",)),
            (self.skew, WORKERS),
        ]
        fault, hosts = self.dice.choice(kinds)
        host = self.dice.choice(hosts)
        fault(host)
        return f"{fault.__name__} {host}"


def make_clock_variables(clock: Path) -> dict[str, str]:
    """Variables with which libfaketime moves a process's clock by what a file says.

    The child of a worker keeps the machine's clock, because these variables are not handed on.
    """
    found = importlib.util.find_spec("libfaketime")
    if found is None or found.origin is None:
        return {}
    library = Path(found.origin).parent / "vendor" / "libfaketime" / "src" / "libfaketime.so.1"
    return {
        "LD_PRELOAD": str(library),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }


@contextlib.contextmanager
def joined_hosts() -> Iterator[Net]:
    """Make the hosts for the length of the block."""
    net = Net()
    try:
        yield net
    finally:
        net.close()


@contextlib.contextmanager
def inside_network() -> Iterator[Net]:
    """Make the hosts, and run the block on that of the store."""
    with joined_hosts() as net, net.inside("store"):
        yield net


def run_faults(
    folder: Path, faults: int, seed: int, say: Callable[[str], None]
) -> tuple[Counter[str], list[str]]:
    """Run light jobs on the hosts under faults; returns the faults, counted, and the violations."""
    with inside_network() as net:
        return _run_inside(net, folder, faults, seed, say)


def _run_inside(
    net: Net, folder: Path, faults: int, seed: int, say: Callable[[str], None]
) -> tuple[Counter[str], list[str]]:
    service = HostedService(net, folder, seed)
    parts = service.parts
    jobs: dict[str, str] = {}
    struck: Counter[str] = Counter()
    try:
        for number in range(faults):
            open_jobs = [job for job in jobs if parts.job(job).status not in TERMINAL_STATUSES]
            for _ in range(len(WORKERS) + 1 - len(open_jobs)):
                name = f"light-{900 + len(jobs)}-4-150"
                jobs[parts.submit(name, "distill")] = name
            time.sleep(service.dice.uniform(0.2, 2))
            fault = service.strike()
            struck[fault.split()[0]] += 1
            say(f"{number + 1}/{faults} {fault}, {len(jobs)} jobs")
        say("waiting for the jobs")
        for job in jobs:
            parts.wait_for(job, *TERMINAL_STATUSES, seconds=PATIENCE_SECONDS)
        found = [
            line
            for job, name in jobs.items()
            for line in find_job_violations(parts, job, name, folder / "spare")
        ]
        if not service.api_answers():
            found.append("the API does not answer after the faults")
        found += [
            f"orphan: process {pid} of {job}"
            for pid, job in find_live_runs(parts.settings.home).items()
        ]
        struck["jobs"] = len(jobs)
        return struck, found
    finally:
        parts.close()


# ---------------------------------------------------------------------- a training on two hosts

#: Seconds that a run may take.
TRAINING_SECONDS = 900.0
#: Steps between two checkpoints, and between the end of a recovery and the next fault at the most.
SAVE_STEPS, PAUSE_STEPS = 10, 12
#: The modules of the processes that a fault kills.
VICTIMS = {"rank": "kd.rank", "child": "services.worker.stage_child"}
GANG_FAULTS = (*VICTIMS, "worker", "member cut off", "leader cut off", "job store")


@dataclass(frozen=True)
class GangTimes:
    """Seconds, and the largest differences: relative ones of losses, absolute ones of weights.

    gather    from the end of the capture to the first step, imports included
    restarts  of each fault in turn: its kind, and the seconds until the training was further on
    loss      of the curve to that of one host
    student   of the weights to those of two hosts without a fault
    """

    gather: float
    restarts: tuple[tuple[str, float], ...]
    attempts: int
    loss: float
    student: float


def make_body(hosts: int, steps: int, strategy: str, gpus: int) -> dict[str, Any]:
    """Make the job: the example's teacher and a tiny student."""
    return {
        "name": f"hosts-{hosts}-{strategy}",
        "kind": "distill",
        "max_attempts": 100,
        # One device of a CPU is no GPU, which a job could ask for.
        "resources": {"hosts": hosts} | ({"gpus": gpus} if gpus > 1 else {}),
        "teacher": {"model": str(AUSTEN / "teacher")},
        "student": {"init": {"layers": 1, "hidden_size": 32}},
        "data": {
            "train": str(AUSTEN / "text" / "persuasion.txt"),
            "sequence_length": 64,
            "max_train_samples": 256,
            "max_eval_samples": 16,
        },
        "train": {
            "max_steps": steps,
            "batch_size": 4,
            "save_steps": SAVE_STEPS,
            "eval_steps": steps,
            "logging_steps": 1,
            "strategy": strategy if hosts > 1 else "auto",
        },
    }


class GangTrial:
    """Trains on two of three hosts, each with ``gpus`` ranks, and hurts them."""

    def __init__(self, service: HostedService, steps: int, strategy: str, gpus: int) -> None:
        self.service = service
        self.parts = service.parts
        self.steps = steps
        self.strategy = strategy
        self.gpus = gpus

    def submit(self, hosts: int) -> str:
        """Submit the job; returns its id."""
        ranks = self.gpus if hosts > 1 else 1
        return self.parts.submit(**make_body(hosts, self.steps, self.strategy, ranks))

    def count_steps(self, job_id: str) -> int:
        """The steps that the training has told; 0 before it."""
        job = self.parts.job(job_id)
        return (job.progress.done or 0) if job.stage == "train" else 0

    def finish(self, job_id: str) -> tuple[list[float], dict[str, Any]]:
        """Wait for the end; returns the curve and the weights."""
        job = self.parts.wait_for(job_id, *TERMINAL_STATUSES, seconds=TRAINING_SECONDS)
        if job.status != "succeeded":
            raise RuntimeError(f"The job has {job.status}: {job.error}")
        run_dir = self.parts.settings.run_dir(job_id)
        lines = read_metrics(run_dir / "metrics.jsonl")
        curve = [each["loss"] for each in lines if each["type"] == "metrics"]
        return curve, load_file(run_dir / "student" / "model.safetensors")

    def find_hosts(self, job_id: str) -> tuple[str, str] | None:
        """The host that leads, and the other one; None if they are not there now.

        A host that was cut off may name the job for a while, but it has no child.
        """
        workers = {each.pid: each for each in self.parts.jobs.list_workers()}
        leader = self.parts.job(job_id).worker
        found = {"leader": "", "member": ""}
        for host in WORKERS:
            worker = workers.get(self.service.processes[host].pid)
            works = self._list_processes(host, VICTIMS["child"])
            if worker is not None and worker.job == job_id and works:
                found["leader" if worker.id == leader else "member"] = host
        return (found["leader"], found["member"]) if all(found.values()) else None

    def strike(self, job_id: str, kind: str) -> float:
        """Hurt the training; returns the seconds until it is further on than before."""
        before, steps = self.parts.job(job_id), self.count_steps(job_id)
        leader, member = wait_until(lambda: self.find_hosts(job_id), TRAINING_SECONDS)
        host = leader if kind == "leader cut off" else member
        begin = time.monotonic()
        if kind == "job store":
            self.service.kill_store("store")
        elif kind == "worker":
            self.service.kill(host)
        elif kind in VICTIMS:
            _send(self._list_processes(host, VICTIMS[kind])[:1], signal.SIGKILL)
        else:
            self.service.net.cut(host)
        if kind != "job store":
            wait_until(lambda: self.parts.job(job_id).attempt > before.attempt, TRAINING_SECONDS)
            # What the attempt before had still told.
            steps = max(steps, self.count_steps(job_id))
        wait_until(lambda: self.count_steps(job_id) > steps, TRAINING_SECONDS)
        seconds = time.monotonic() - begin
        self.service.net.mend(host)
        return seconds

    def _list_processes(self, host: str, module: str) -> list[int]:
        found = []
        for pid in self.service.net.list_pids(host):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if module.encode() in words and b"kd.parallel.agent" not in words:
                    found.append(pid)
        return found


def run_gang(
    folder: Path,
    steps: int,
    strategy: str,
    say: Callable[[str], None],
    faults: tuple[str, ...] = ("member cut off",),
    gpus: int = 1,
) -> GangTimes:
    """Train on two of three hosts under ``faults`` of GANG_FAULTS, and wait for the end.

    Raises ``RuntimeError`` if a job fails.
    """
    os.environ["KD_DEVICES"] = ",".join(["cpu"] * gpus)
    with inside_network() as net:
        child = "services.worker.stage_child"
        service = HostedService(net, folder, 1, child, (AUSTEN,), skewed=False)
        try:
            return _hurt(GangTrial(service, steps, strategy, gpus), faults, say)
        finally:
            service.parts.close()


def _hurt(trial: GangTrial, faults: tuple[str, ...], say: Callable[[str], None]) -> GangTimes:
    parts, dice = trial.parts, trial.service.dice
    one, _ = trial.finish(trial.submit(1))
    say("one host is done")
    job_id = trial.submit(2)
    wait_until(lambda: parts.job(job_id).stage == "train", TRAINING_SECONDS)
    begin = time.monotonic()
    wait_until(lambda: trial.count_steps(job_id) > 0, TRAINING_SECONDS)
    gather = time.monotonic() - begin
    _, whole = trial.finish(job_id)
    say("two hosts are done")
    job_id = trial.submit(2)
    restarts = []
    for kind in faults:
        pause = trial.count_steps(job_id) + dice.randint(2, PAUSE_STEPS)
        if pause >= trial.steps:
            raise RuntimeError(f"It is over before {kind}: give it more than {pause} steps.")
        wait_until(lambda least=pause: trial.count_steps(job_id) > least, TRAINING_SECONDS)
        restarts.append((kind, trial.strike(job_id, kind)))
        say(f"{kind}: {restarts[-1][1]:.1f} s, step {trial.count_steps(job_id)}")
    two, hurt = trial.finish(job_id)
    worst = max(abs(a / b - 1.0) for a, b in zip(one, two, strict=True))
    farthest = max(float(abs(whole[name] - hurt[name]).max()) for name in whole)
    return GangTimes(gather, tuple(restarts), parts.job(job_id).attempt, worst, farthest)
