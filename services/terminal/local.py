"""``kd run``: the same pipeline in this very process."""

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
from kd.errors import ConfigError, Interrupted
from kd.extras import missing_extras
from kd.progress import Event, Monitor
from kd.validate import check_inputs
from services.settings import Settings
from services.terminal.follow import Display
from services.worker.child import LOCK


def run_here(config: JobConfig, settings: Settings, run_dir: Path, console: Console) -> dict[str, Any]:
    """Run every stage; returns the pipeline's report. The first Ctrl-C saves and stops, the second does not wait."""
    if found := [*check_inputs(config, settings.root, settings.home), *missing_extras(config)]:
        raise ConfigError(found)
    os.chdir(settings.root)  # what a job's relative paths resolve against
    os.environ.update(settings.environment())
    os.environ.setdefault("TQDM_DISABLE", "1")  # the libraries' bars would write over ours
    with _alone_in(run_dir, console):
        stop = _stop_on_signal(console)
        from kd.pipeline import distill

        with Display(console) as display:

            def show(event: Event) -> None:
                display.show(event.type, event.data)

            try:
                return distill(config, settings.home, run_dir, Monitor(show, stop.is_set))
            except Interrupted as error:
                console.print(str(error))
                raise KeyboardInterrupt from None


@contextmanager
def _alone_in(run_dir: Path, console: Console) -> Iterator[None]:
    """Hold the run folder as a worker's process does; says once that another holds it, and waits until it does not."""
    told = threading.Event()

    def waiting() -> None:
        if not told.is_set():
            told.set()
            console.print(
                f"Another run uses {run_dir}: this one waits until it has ended. --run-dir names another folder.",
                markup=False, soft_wrap=True,
            )  # fmt: skip

    with storage_errors(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
    with locked(run_dir / LOCK, waiting):
        yield


def _stop_on_signal(console: Console) -> threading.Event:
    stop = threading.Event()

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        console.print("saving; once more to stop without it")

    signal.signal(signal.SIGINT, ask)
    signal.signal(signal.SIGTERM, ask)
    return stop
