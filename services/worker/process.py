"""The process that runs a stage, seen from its supervisor: started, listened to, stopped, killed with all its kin."""

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import services
from services.jobs import Batch
from services.settings import Settings

BATCH_EVENTS = 500

#: What a run may need of the worker's environment; KD_REDIS_URL, which holds a password, is not among it.
KEPT_VARIABLES = re.compile(
    r"""
    PATH | HOME | USER | LOGNAME | SHELL | TERM | LANG | TZ | TMPDIR | VIRTUAL_ENV | LD_LIBRARY_PATH | LD_PRELOAD
    | KD_TRUST_REMOTE_CODE | SSL_CERT_(FILE|DIR) | REQUESTS_CA_BUNDLE | (?i:(http|https|all|no)_proxy)
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
class Child:
    """The process that does the work, the leader of a process group of its own."""

    process: subprocess.Popen[bytes]
    outbox: Outbox
    result: dict[str, Any] | None = None
    error: dict[str, str] | None = None
    heard: float = field(default_factory=time.monotonic)
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
            self.heard = time.monotonic()
            event = json.loads(line)
            if event["type"] == "result":
                self.result = event["data"]
            elif event["type"] == "error":
                self.error = event["data"]
            else:
                self.outbox.put(event)

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
                pipe.close()


def start_child(settings: Settings, stage: str, config: dict[str, Any], run_dir: Path) -> Child:
    """Start the process; its output goes to ``run_dir``/log.txt."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / "log.txt").open("ab") as log_file:
        process = subprocess.Popen(
            module_command(settings.child_module),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log_file,
            cwd=settings.root,
            env=child_environment(),
            start_new_session=True,
        )
    order = {"stage": stage, "config": config, "home": str(settings.home), "run_dir": str(run_dir)}
    child = Child(process, Outbox())
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it died at once; its exit code tells
        process.stdin.write(json.dumps(order).encode() + b"\n")
        process.stdin.flush()
    return child


def child_environment() -> dict[str, str]:
    """The worker's environment without its secrets; the child imports this very copy of the packages."""
    kept = {name: value for name, value in os.environ.items() if KEPT_VARIABLES.fullmatch(name)}
    return kept | package_environment()


def module_command(module: str) -> list[str]:
    """The command that runs a module; -P keeps a folder named ``cache`` or ``kd`` in the working folder out of it."""
    return [sys.executable, "-P", "-m", module]


def package_environment() -> dict[str, str]:
    """Variables with which a subprocess imports the very packages that this process runs."""
    return {"PYTHONPATH": str(Path(services.__file__).resolve().parent.parent), "PYTHONUNBUFFERED": "1"}
