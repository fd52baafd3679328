"""``kd run``: run a job's pipeline in this process."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from cache.disk import require_locks
from kd.config.job import JobConfig
from kd.errors import Interrupted
from kd.face.running import alone_in, lossy, stop_on_signals
from kd.preflight.problems import Folders, Machine, require_no_problems
from kd.progress import Event, Monitor
from services.settings import Settings
from services.terminal.display import Display


def run_here(
    config: JobConfig, settings: Settings, run_dir: Path, console: Console
) -> dict[str, Any]:
    """Run every stage and return the pipeline's report.

    The first Ctrl-C, SIGTERM or SIGHUP saves the state and stops; the second stops without saving.
    """
    require_no_problems(config, Folders(settings.root, settings.home, opened=True), Machine())
    os.chdir(settings.root)  # a job's relative paths start there
    os.environ.update(settings.environment())
    os.environ.setdefault("TQDM_DISABLE", "1")  # the libraries' bars would overwrite ours
    for folder in settings.places.values():
        require_locks(folder)
    tell = partial(console.print, markup=False, soft_wrap=True)
    with alone_in(run_dir, tell, "--run-dir"), stop_on_signals(tell) as stop:
        # Imported only now: it loads torch, which reads the environment that is set above.
        from kd.pipeline import run_stages

        with Display(console) as display:

            def show(event: Event) -> None:
                display.show(event.type, event.data)

            try:
                return run_stages(config, settings.home, run_dir, Monitor(lossy(show), stop.is_set))
            except Interrupted as error:
                console.print(str(error))
                raise KeyboardInterrupt from None
