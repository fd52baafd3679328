"""``kd run``: run a job's pipeline in this process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from cache.disk import locked, storage_errors
from kd.config.job import JobConfig
from kd.errors import Interrupted
from kd.files import LOCK
from kd.preflight.problems import Folders, Machine, require_no_problems
from kd.progress import Event, Monitor
from services.settings import Settings
from services.terminal.display import Display


def run_here(
    config: JobConfig, settings: Settings, run_dir: Path, console: Console
) -> dict[str, Any]:
    """Run every stage and return the pipeline's report.

    The first Ctrl-C saves the state and stops; the second stops without saving.
    """
    require_no_problems(config, Folders(settings.root, settings.home, opened=True), Machine())
    os.chdir(settings.root)  # a job's relative paths start there
    os.environ.update(settings.environment())
    os.environ.setdefault("TQDM_DISABLE", "1")  # the libraries' bars would overwrite ours
    with alone_in(run_dir, console):
        stop = stop_on_signal(console)
        # Imported only now: it loads torch, which reads the environment that is set above.
        from kd.pipeline import run_stages

        with Display(console) as display:

            def show(event: Event) -> None:
                display.show(event.type, event.data)

            try:
                return run_stages(config, settings.home, run_dir, Monitor(show, stop.is_set))
            except Interrupted as error:
                console.print(str(error))
                raise KeyboardInterrupt from None


@contextmanager
def alone_in(run_dir: Path, console: Console) -> Iterator[None]:
    """Lock the run folder, as a worker's process does.

    If another run holds the lock, say so once and wait for it.
    """
    announced = threading.Event()

    def announce_wait() -> None:
        if not announced.is_set():
            announced.set()
            console.print(
                f"Another run uses {run_dir}; this one waits until it has ended."
                " --run-dir names another folder.",
                markup=False,
                soft_wrap=True,
            )

    with storage_errors(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
    with locked(run_dir / LOCK, announce_wait):
        yield


def stop_on_signal(console: Console) -> threading.Event:
    """Return an event that the first SIGINT or SIGTERM sets; the second ends the process."""
    stop = threading.Event()

    def request_stop(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        console.print("saving; press Ctrl-C again to stop without saving")

    signal.signal(signal.SIGINT, request_stop)
    signal.signal(signal.SIGTERM, request_stop)
    return stop
