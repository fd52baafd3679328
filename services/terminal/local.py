"""``kd run``: the same pipeline in this very process."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from kd.config.job import JobConfig
from kd.errors import ConfigError, Interrupted
from kd.extras import missing_extras
from kd.progress import Event, Monitor
from kd.validate import check_inputs
from services.settings import Settings
from services.terminal.follow import Display
from services.worker.child import locked


def run_here(config: JobConfig, settings: Settings, run_dir: Path, console: Console) -> dict[str, Any]:
    """Run every stage; returns the pipeline's report. The first Ctrl-C saves and stops, the second does not wait."""
    if found := [*check_inputs(config, settings.root, settings.home), *missing_extras(config)]:
        raise ConfigError(found)
    os.chdir(settings.root)  # what a job's relative paths resolve against
    os.environ.update(settings.environment())
    os.environ.setdefault("TQDM_DISABLE", "1")  # the libraries' bars would write over ours
    stop = _stop_on_signal(console)
    from kd.pipeline import distill

    with Display(console) as display, locked(run_dir, stop):

        def show(event: Event) -> None:
            display.show(event.type, event.data)

        try:
            return distill(config, settings.home, run_dir, Monitor(show, stop.is_set))
        except Interrupted as error:
            console.print(str(error))
            raise KeyboardInterrupt from None


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
