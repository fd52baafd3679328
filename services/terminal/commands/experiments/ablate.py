"""``kd ablate``: short runs that differ in one setting, side by side on one page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.terminal import console
from services.terminal.exit_codes import FAILED

if TYPE_CHECKING:
    from kd.experiments.ablation_page import AblationReport, RunReport

AxisTexts = Annotated[
    list[str],
    typer.Option(
        "--axis",
        metavar="AXIS",
        help="What varies; may be repeated: any field, train.optim=adamw,lion, or a ready-made "
        "axis: schedules, clipping, precision, accumulation, optimisers, label_smoothing, "
        "checkpointing, alpha, threshold or temperature.",
    ),
]
Steps = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Steps of a run, each as large as a step of the job. Default: the job's, at most 200.",
    ),
]
Folder = Annotated[
    Path | None,
    typer.Option("--out", help="Folder of the ablation. Default: ablations/NAME in KD_HOME."),
]

app = typer.Typer()


@app.command()
def ablate(
    job_file: console.JobFile,
    axis: AxisTexts,
    overrides: console.Overrides = None,
    steps: Steps = None,
    grid: Annotated[bool, typer.Option(help="Run every combination of the axes.")] = False,
    folder: Folder = None,
    home: console.Home = None,
) -> None:
    """Train short runs of a job that differ in one setting, and show them on one page.

    All runs have the same seed, tokens and data order, and share the caches that they need. After a
    stop, the same command continues, and does not train finished runs again.
    """
    from services.terminal.in_process import enter_root, stopping_on_signals, tell

    settings = console.make_settings(home=home)
    config = console.load_job_file(job_file, overrides)
    folder = (folder or settings.home / "ablations" / config.name).resolve()
    enter_root(settings)
    from kd.experiments.axes import cross_axes, make_short_job, parse_axis
    from kd.experiments.plan import make_plan_of_axes
    from kd.models.precision import pick_device
    from kd.preflight.problems import Folders, Machine, find_problems, require_no_problems
    from kd.python.running import alone_in

    folders = Folders(settings.root, settings.home)
    machine = Machine(device=pick_device())
    base = make_short_job(config, steps)
    require_no_problems(base, Folders(settings.root, settings.home, opened=True), machine)
    axes = [parse_axis(text, base) for text in axis]
    axes = [cross_axes(axes)] if grid else axes
    plan = make_plan_of_axes(base, axes, lambda job: find_problems(job, folders, machine))
    tell(f"{len(plan.jobs)} runs of {base.require_train().max_steps} steps in {folder}")
    for name, row in plan.list_refused():
        console.print_error(f"{name} {row.label} is refused: {row.refusal}", "")
    with alone_in(folder, tell, "--out"), stopping_on_signals() as monitor:
        from kd.experiments.ablation import ablate as run_ablation

        report = run_ablation(plan, settings.home, folder, monitor)
    if not console.print_as_json(report.to_json()):
        _print(report, folder)
    if any(not run.figures for run in report.runs.values()):
        raise typer.Exit(FAILED)


def _print(report: AblationReport, folder: Path) -> None:
    rows = []
    for axis in report.plan.axes:
        for row in axis.rows:
            run = None if row.run is None else report.runs[row.run]
            state = "refused" if run is None else run.state
            rows.append([axis.name, row.label, state, *_format_run(run)])
    console.print_table(
        ["axis", "setting", "state", "perplexity", "KL", "time", "tokens/s", "peak memory"], rows
    )
    for run in report.runs.values():
        if run.error:
            console.print_error(f"{run.label}: {run.error}", "")
    console.out.print(f"\npage: {folder / 'index.html'}", markup=False, soft_wrap=True)


def _format_run(run: RunReport | None) -> list[str]:
    if run is None or not run.figures:
        return [""] * 5
    found = run.figures
    names = ("held_out_perplexity", "held_out_kl", "tokens_per_second")
    perplexity, kl, speed = (found[name] for name in names)
    return [
        "" if perplexity is None else f"{perplexity:,.2f}",
        "" if kl is None else f"{kl:.4f}",
        console.format_value(found["train_seconds"], "seconds"),
        "" if speed is None else f"{speed:,.0f}",
        console.format_value(found["peak_memory_bytes"], "bytes"),
    ]
