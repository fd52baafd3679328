"""The process that runs a stage, seen from its supervisor: started, listened to, stopped, killed with all its kin.

It is given a byte on stdin with every turn of the supervisor's loop, and ends itself where none comes (lifeline).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import services
from kd.config.job import JobConfig
from services.jobs import Batch
from services.settings import Settings
from services.worker.tally import Tally

BATCH_EVENTS = 500
STEP_SECONDS = 300.0
STEPS_OF_SILENCE = 10
LEAST_PATIENCE_SECONDS = 5.0

#: What a run may need of the worker's environment; KD_REDIS_URL, which holds a password, is not among it.
KEPT_VARIABLES = re.compile(
    r"""
    PATH | HOME | USER | LOGNAME | SHELL | TERM | LANG | TZ | TMPDIR | VIRTUAL_ENV | LD_LIBRARY_PATH | LD_PRELOAD
    | KD_TRUST_REMOTE_CODE | SSL_CERT_(FILE|DIR) | REQUESTS_CA_BUNDLE | (?i:(http|https|all|no)_proxy)
    | (WANDB|MLFLOW|TRACKIO)_\w+
    | (LC|XDG|HF|HUGGINGFACE|TRANSFORMERS|TOKENIZERS|DATASETS|TORCH|TORCHINDUCTOR|PYTORCH|TRITON)_\w+
    | (CUDA|CUBLAS|NVIDIA|NCCL|OMP|MKL|OPENBLAS|SLURM)_\w+
    """,
    re.VERBOSE,
)


class Outbox:
    """Events that wait for delivery: every one, save that only the newest progress counts. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[dict[str, Any]] = deque()
        self._progress: dict[str, Any] | None = None
        self._sending = Batch(0, ())

    def put(self, event: dict[str, Any]) -> None:
        """Add an event."""
        with self._lock:
            if event["type"] == "progress":
                self._progress = event
            else:
                self._waiting.append(event)

    def batch(self) -> Batch:
        """What to send now; the same again until it is delivered."""
        with self._lock:
            if not self._sending.events:
                self._sending = Batch(self._sending.number + 1, self._next())
            return self._sending

    def _next(self) -> tuple[dict[str, Any], ...]:
        events = [self._waiting.popleft() for _ in range(min(len(self._waiting), BATCH_EVENTS))]
        if self._progress is not None:
            events.append(self._progress)
            self._progress = None
        return tuple(events)

    def delivered(self) -> None:
        """The batch has arrived."""
        with self._lock:
            self._sending = Batch(self._sending.number, ())

    @property
    def empty(self) -> bool:
        """Whether everything was delivered."""
        with self._lock:
            return not (self._sending.events or self._waiting or self._progress)


@dataclass
class Hearing:
    """When the run was last heard of, and how long it may be silent: little while it says that a loop turns."""

    at: float = field(default_factory=time.monotonic)
    stepping: bool = False
    longest_step: float = 0.0

    def note(self, event: dict[str, Any]) -> None:
        """Something was heard."""
        now = time.monotonic()
        if self.stepping:
            self.longest_step = max(self.longest_step, now - self.at)
        if event["type"] in ("alive", "stage"):
            self.stepping = event["type"] == "alive" and event["data"]["stepping"]
        self.at = now

    def patience(self, silence_seconds: float) -> float:
        """Seconds: of a loop, minutes, or ten times its longest step; of anything else ``silence_seconds``."""
        if not self.stepping:
            return silence_seconds
        return min(silence_seconds, max(STEP_SECONDS, STEPS_OF_SILENCE * self.longest_step))

    def silent(self, silence_seconds: float) -> bool:
        """Whether it has said nothing for too long."""
        return time.monotonic() - self.at > self.patience(silence_seconds)


@dataclass
class Child:
    """The process that does the work, the leader of a process group of its own."""

    process: subprocess.Popen[bytes]
    outbox: Outbox
    tally: Tally = field(default_factory=Tally)
    hearing: Hearing = field(default_factory=Hearing)
    result: dict[str, Any] | None = None
    error: dict[str, str] | None = None
    elsewhere: Path | None = None
    kill_at: float | None = None
    kill_reason: str = ""

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read, name="child-events", daemon=True)
        self._reader.start()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = json.loads(line)
            self.hearing.note(event)
            self.tally.note(event)
            self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "result":
                self.result = event["data"]
            case "error":
                self.error = event["data"]
            case "elsewhere":
                self.elsewhere = Path(event["data"]["lock"])
            case "alive" | "shard":
                pass  # heard, and counted
            case _:
                self.outbox.put(event)

    def show_life(self) -> None:
        """Tell it that its supervisor is alive."""
        assert self.process.stdin is not None
        with suppress(BlockingIOError, BrokenPipeError):  # nobody reads: it has ended, or its guard was stopped
            os.write(self.process.stdin.fileno(), b".")

    def stop(self, grace_seconds: float) -> None:
        """Ask it, once, to save and end; it is killed after ``grace_seconds``."""
        if self.kill_at is None:
            self.kill_at = time.monotonic() + grace_seconds
            self.process.terminate()

    def kill(self, reason: str) -> None:
        """Kill it and everything it has started."""
        self.kill_reason = self.kill_reason or reason
        with suppress(ProcessLookupError, PermissionError):  # the group is gone already; macOS says the latter
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Leave nothing behind: no process of the group, no open pipe, no unread line."""
        self.kill("end")
        self.process.wait()
        self._reader.join(timeout=10)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # an order that was not taken
                    pipe.close()


@dataclass(frozen=True)
class Order:
    """What a child is to do; ``confinement`` is what its job may name (``kd.confinement``)."""

    stage: str
    config: dict[str, Any]
    home: str
    run_dir: str
    patience: float
    confinement: dict[str, Any] | None = None


def order_of(settings: Settings, stage: str, config: dict[str, Any], run_dir: Path, limits: dict[str, Any]) -> Order:
    """The order for a stage; a child that hears nothing for the time of a lease is nobody's, and ends."""
    patience = max(settings.lease_seconds, LEAST_PATIENCE_SECONDS)
    return Order(stage, config, str(settings.home), str(run_dir), patience, limits)


def start_child(settings: Settings, order: Order, environment: dict[str, str]) -> Child:
    """Start the process, with ``environment`` besides what it needs; its output goes to log.txt in its run folder."""
    folder = Path(order.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log.txt").open("ab") as log_file:
        process = subprocess.Popen(
            module_command(settings.child_module),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log_file,
            cwd=settings.root,
            env=child_environment() | environment,
            start_new_session=True,
        )
    child = Child(process, Outbox())
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it died at once; its exit code tells
        process.stdin.write(json.dumps(asdict(order)).encode() + b"\n")
        process.stdin.flush()
    os.set_blocking(process.stdin.fileno(), False)
    return child


def child_environment() -> dict[str, str]:
    """The worker's environment without its secrets; the child imports this very copy of the packages.

    Its output is a log: the libraries' progress bars, of which each step is a line there, stay out of it.
    """
    kept = {name: value for name, value in os.environ.items() if KEPT_VARIABLES.fullmatch(name)}
    return kept | {"TQDM_DISABLE": "1"} | package_environment()


def named_secret(config: JobConfig) -> dict[str, str]:
    """The API key of a remote teacher, for the one run whose job names its variable; the others' stay here."""
    name = None if config.teacher is None else config.teacher.api_key_env
    return {} if name is None or name not in os.environ else {name: os.environ[name]}


def module_command(module: str) -> list[str]:
    """The command that runs a module; -P keeps a folder named ``cache`` or ``kd`` in the working folder out of it."""
    return [sys.executable, "-P", "-m", module]


def package_environment() -> dict[str, str]:
    """Variables with which a subprocess imports the very packages that this process runs."""
    return {"PYTHONPATH": str(Path(services.__file__).resolve().parent.parent), "PYTHONUNBUFFERED": "1"}
