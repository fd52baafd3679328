"""``kd validate``: show what is wrong with a job, before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from services.terminal import console
from services.terminal.exit_codes import INVALID

if TYPE_CHECKING:
    from kd.config.job import JobConfig
    from kd.errors import Problem
    from kd.preflight.learned_rows import LearnedRow
    from kd.progress import Notice
    from services.settings import Settings

app = typer.Typer()


@app.command()
def validate(
    job_file: console.JobFile, overrides: console.Overrides = None, home: console.Home = None
) -> None:
    """Show the problems of a job that can be found without loading a model.

    A warning says what this machine lacks: a package, a GPU, a webhook's permission. The worker
    that runs the job may be another machine. A notice says what a run would leave out or change.
    Of chats the first rows are shown, with the tokens that are learned in colour or ⟦brackets⟧.
    Where the models are in folders of this machine, it says what data.packing auto means for them.
    """
    from kd.errors import ConfigError
    from kd.preflight.problems import Folders, find_problems

    settings = console.make_settings(home=home)
    warnings: list[Problem] = []
    notices: list[Notice] = []
    rows: list[LearnedRow] = []
    packing: bool | None = None
    try:
        config = console.load_job_file(job_file, overrides)
        warnings = _find_warnings(config, settings)
        folders = Folders(
            settings.root, settings.home, opened=True, note=notices.append, show=rows.append
        )
        problems = find_problems(config, folders)
        if not problems and config.data.packing == "auto" and not config.teachers:
            packing = _settle_packing(config, settings.root, notices)
    except ConfigError as error:
        problems = error.problems
    found: dict[str, Sequence[Problem | Notice | LearnedRow]] = {
        "problems": problems,
        "warnings": warnings,
        "notices": notices,
        "learned": rows,
    }
    shown = {name: [each.to_json() for each in found[name]] for name in found}
    if not console.print_as_json({"valid": not problems, "packing": packing} | shown):
        if not problems:
            console.out.print(f"{job_file} is a valid job: {config.kind} {config.name}")
        if packing is not None:
            means = "documents share rows" if packing else "each document has rows of its own"
            console.out.print(f"data.packing auto is {str(packing).lower()}: {means}")
        for row in rows:
            _show_row(row)
        for problem in problems:
            console.print_error(str(problem), "")
        for warning in warnings:
            console.err.print(f"warning: {warning}", markup=False)
        for notice in notices:
            console.err.print(f"notice: {notice}", markup=False)
    raise typer.Exit(INVALID if problems else 0)


def _settle_packing(config: JobConfig, root: Path, notices: list[Notice]) -> bool | None:
    """Return what data.packing auto means for a job; None: its models must be fetched or read."""
    from kd.capture.plan import settle_packing
    from kd.config.jobfile import parse_config
    from kd.preflight.named_paths import list_named_resources, make_paths_absolute
    from kd.progress import Monitor

    models = [each for each in list_named_resources(config) if each.kind == "model"]
    if any(each.file or each.own_code or not (root / each.name).is_dir() for each in models):
        return None
    monitor = Monitor()
    settled = settle_packing(parse_config(make_paths_absolute(config, root)), monitor)
    notices += monitor.notices
    return None if settled.data.packing == "auto" else settled.data.packing


def _show_row(row: LearnedRow) -> None:
    """Print a text with the tokens in it that are learned in colour, or in brackets."""
    from rich.text import Text

    text = Text(f"{row.where}\n", style="bold")
    for piece in row.pieces:
        style = "not bold black on green" if piece.learned else "not bold"
        plain = piece.learned and not console.out.color_system
        text.append(f"⟦{piece.text}⟧" if plain else piece.text, style=style)
    console.out.print(text)


def _find_warnings(config: JobConfig, settings: Settings) -> list[Problem]:
    """Find what the job needs and this machine, or a service on it, does not have."""
    from kd.config.extras import find_missing_extras
    from kd.preflight.teacher_checks import find_missing_readers, find_unreadable_weights
    from services.loops.webhooks import find_webhook_problems

    found = [*find_missing_extras(config)]
    if (teacher := config.active_teacher) is not None:
        found += find_missing_readers(teacher)
        found += find_unreadable_weights(teacher, settings.root)
    found += find_webhook_problems(config.webhook, settings)
    return found + _find_missing_resources(config, settings)


def _find_missing_resources(config: JobConfig, settings: Settings) -> list[Problem]:
    """Find that a worker on this machine would never take the job."""
    from kd.client.wire.jobs import JobResources
    from kd.client.wire.service import Device
    from kd.errors import Problem
    from services.store.jobs.workers import describe_needs

    needs = JobResources(gpus=config.resources.gpus, memory=config.resources.memory)
    # The package that finds GPUs is one of the worker's.
    if not (needs.gpus or needs.memory) or find_spec("pynvml") is None:
        return []
    from services.worker.devices import WorkerDevice, count_cpus, find_gpus

    cpus = count_cpus(settings.devices)
    found = WorkerDevice(() if cpus else tuple(find_gpus()), cpus=max(cpus, 1))
    device = Device(count=found.count, memory_bytes=found.memory_bytes)
    if device.covers(needs.gpus, needs.memory):
        return []
    detail = f"this machine lacks {describe_needs(needs)}, so no worker on it takes the job."
    remedy = "Ask for less, or start a worker on a machine that has it. `kd run` runs it here."
    return [Problem("/resources", detail, remedy)]
