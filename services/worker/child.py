"""One stage of one job, in a process of its own: ``python -m services.worker.child``, started by the supervisor.

stdin     one line, an ``Order`` (process.py), then a byte now and then; its end, or silence, means that the
          supervisor is gone: this process is killed with all that it has started
stdout    JSON lines: the events of kd.progress, then {"type": "result"}, {"type": "error"} or {"type": "elsewhere"}
stderr    the run's log; whatever the run prints goes there too
SIGTERM   save, then end
exit      0 done, 1 failed, 75 stopped on request with everything saved, 76 another process does the same work
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
from kd.config.job import JobConfig
from kd.confinement import confined_datasets, require_confined
from kd.errors import Interrupted
from kd.jobfile import parse_config
from kd.progress import Elsewhere, Event, Monitor, finite
from services.lifeline import die_with_parent, die_with_stdin
from services.telemetry import traced_stage
from services.worker.failures import describe

DONE, FAILED, STOPPED, ELSEWHERE = 0, 1, 75, 76
LOCK_SECONDS = 30.0
LOCK = ".lock"  #: in a run folder: held by who writes there

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
    order = json.loads(_read_line())
    die_with_stdin(order["patience"])
    return attempt(run_stage, order, events, stop)


def attempt(run_stage: StageRunner, order: dict[str, Any], events: Events, stop: threading.Event) -> int:
    """Run the stage alone in its run folder, and tell how it ended."""
    run_dir, stage = Path(order["run_dir"]), order["stage"]
    try:
        with storage_errors(run_dir), locked(run_dir, stop), traced_stage(stage, events.send) as listen:
            config, monitor = parse_config(order["config"]), Monitor(listen, stop.is_set, patient=False)
            require_confined(config, Path(), order["confinement"])
            with confined_datasets(order["confinement"]):
                result = run_stage(stage, config, Path(order["home"]), run_dir, monitor)
    except Elsewhere as error:
        events.send(Event("elsewhere", {"lock": str(error.lock)}))
        return ELSEWHERE
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


@contextmanager
def locked(run_dir: Path, stop: threading.Event) -> Iterator[None]:
    """Hold the run folder alone, so that a process that lost its lease cannot write beside its successor."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / LOCK).open("w") as lock:
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
    """The first line; of what comes after it, which are signs of life, some may be lost here."""
    read = b""
    while b"\n" not in read:
        part = os.read(0, 65536)
        if not part:
            raise SystemExit("services.worker.child is started by a worker, which tells it on stdin what to do.")
        read += part
    return read.partition(b"\n")[0]


if __name__ == "__main__":
    sys.exit(main())
