"""One stage of one job, in a process of its own: ``python -m services.worker.child``, started by the supervisor.

stdin     one line, {stage, config, home, run_dir}; its end means that the supervisor is gone
stdout    JSON lines: the events of kd.progress, then {"type": "result"} or {"type": "error"}
stderr    the run's log; whatever the run prints goes there too
SIGTERM   save, then end
exit      0 done, 1 failed, 75 stopped on request with everything saved
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cache.disk import storage_errors
from cache.errors import PotstillError
from kd.config.job import JobConfig
from kd.errors import Interrupted
from kd.jobfile import parse_config
from kd.progress import Event, Monitor, finite
from services.lifeline import die_with_parent, die_with_stdin

DONE, FAILED, STOPPED = 0, 1, 75
LOCK_SECONDS = 30.0

StageRunner = Callable[[str, JobConfig, Path, Path, Monitor], dict[str, Any]]


def run_stage_of_pipeline(*arguments: Any) -> dict[str, Any]:
    """``kd.pipeline.run_stage``; torch is loaded here, and in no other process of the service."""
    from kd.pipeline import run_stage

    return run_stage(*arguments)


def main(run_stage: StageRunner = run_stage_of_pipeline) -> int:
    """Run the stage that stdin names; returns the exit code."""
    die_with_parent(signal.SIGKILL)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    events = Events()
    job = json.loads(_read_line())
    die_with_stdin()
    run_dir = Path(job["run_dir"])
    try:
        with storage_errors(run_dir), locked(run_dir, stop):
            config, monitor = parse_config(job["config"]), Monitor(events.send, stop.is_set)
            result = run_stage(job["stage"], config, Path(job["home"]), run_dir, monitor)
    except Interrupted as error:
        sys.stderr.write(f"{error}\n")
        return STOPPED
    except Exception as error:
        traceback.print_exc()
        events.send(Event("error", describe(error)))
        return FAILED
    events.send(Event("result", result))
    return DONE


class Events:
    """The pipe to the supervisor: the stdout that this process was started with, which from now on is the log."""

    def __init__(self) -> None:
        self._pipe = os.dup(1)  # not inherited by programs that the run starts
        self._lock = threading.Lock()
        os.dup2(2, 1)

    def send(self, event: Event) -> None:
        """Write one event as one line."""
        line = json.dumps(finite(event.to_json()), allow_nan=False).encode() + b"\n"
        with self._lock:
            while line:
                line = line[os.write(self._pipe, line) :]


def describe(error: Exception) -> dict[str, str]:
    """The error as the job's record shows it; one that nobody foresaw names its class and its place."""
    if isinstance(error, PotstillError):
        return error.to_json()
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    detail = f"{type(error).__name__}: {error}{place}"
    return {"type": "internal", "detail": detail, "remedy": "The traceback is in log.txt in the job's run folder."}


@contextmanager
def locked(run_dir: Path, stop: threading.Event) -> Iterator[None]:
    """Hold the run folder alone, so that a process that lost its lease cannot write beside its successor."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / ".lock").open("w") as lock:
        deadline = time.monotonic() + LOCK_SECONDS
        while not _try_lock(lock.fileno()):
            if stop.wait(0.1) or time.monotonic() > deadline:
                raise Interrupted(f"{run_dir} is still held by an earlier process.", "It will be tried again.")
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_line() -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 65536)
        if not byte:
            raise SystemExit("services.worker.child is started by a worker, which tells it on stdin what to do.")
        line += byte
    return line


if __name__ == "__main__":
    sys.exit(main())
