"""``kd run``: run a job's pipeline in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.terminal import console

app = typer.Typer()


@app.command()
def run(
    job_file: console.JobFile,
    overrides: console.Overrides = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder of the run. Default: runs/NAME in KD_HOME.")
    ] = None,
    home: console.Home = None,
) -> None:
    """Run a job in this process, without a server or a job store.

    Ctrl-C saves the state and stops, and so do SIGTERM and the end of the terminal; the same
    command continues from there.
    """
    from cache.disk import require_locks
    from kd.preflight.problems import Folders, Machine, require_no_problems
    from kd.python.running import alone_in
    from services.terminal.in_process import (
        enter_root,
        interrupt_on_signals,
        stopping_on_signals,
        tell,
    )

    interrupt_on_signals()
    settings = console.make_settings(home=home)
    config = console.load_job_file(job_file, overrides)
    run_dir = (run_dir or settings.run_dir(config.name)).resolve()
    require_no_problems(config, Folders(settings.root, settings.home, opened=True), Machine())
    enter_root(settings)
    for folder in settings.places.values():
        require_locks(folder)
    with alone_in(run_dir, tell, "--run-dir"), stopping_on_signals() as monitor:
        # Imported only now: it loads torch, which reads the environment that is set above.
        from kd.pipeline import run_stages

        made = run_stages(config, settings.home, run_dir, monitor)
    if console.print_as_json(made.to_json()):
        return
    for name, path in made.artifacts.items():
        console.out.print(f"{name}: {path}", soft_wrap=True)
    page = Path(made.artifacts.get("report.md", ""))
    if page.is_file():
        console.print_page(page.read_text(encoding="utf-8"))
