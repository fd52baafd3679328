"""What a job needs before it runs: ``kd estimate``, ``kd plan`` and ``kd lr``."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.terminal import console
from services.terminal.exit_codes import FAILED

if TYPE_CHECKING:
    from kd.config.job import JobConfig
    from kd.forecast.rehearsal import JobForecast
    from kd.forecast.strategies import Strategy, TrainingPlan
    from services.settings import Settings

#: Rows in the table of `kd lr`, besides that of the highest rate.
RATE_ROWS = 12
#: The names of ``DEVICE_KINDS``, so that help imports nothing else.
_KINDS = "v100, t4, a10, l4, l40s, rtx3090, rtx4090, a100-40gb, a100-80gb, h100, h200, b200"
Fast = Annotated[
    bool,
    typer.Option(
        help="Estimate the capture by a table: load no model, and read a sample of the text."
    ),
]
Price = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="Price of an hour of a device; the cost is in the same currency. Default: "
        "KD_DEVICE_PRICES.",
    ),
]
Devices = Annotated[
    str, typer.Option(help=f"Number and kind of the devices: 8xh100 or h100. Kinds: {_KINDS}.")
]
Tokens = Annotated[
    float | None,
    typer.Option(
        min=1, help="Tokens that the training reads, such as 1e12. Default: those of the job."
    ),
]
Plot = Annotated[Path | None, typer.Option("--out", help="Also plot the rates into this PNG file.")]

app = typer.Typer()


@app.command()
def estimate(
    job_file: console.JobFile,
    overrides: console.Overrides = None,
    fast: Fast = False,
    home: console.Home = None,
) -> None:
    """Estimate a job's capture and training: tokens, bytes, memory and hours.

    Reads a sample of the text, and rehearses some steps of both on this device. With --fast no
    model runs: only tokens and bytes of the capture are estimated, by a table. (`kd plan` computes
    what GPUs of a kind need.)
    """
    from kd.capture.estimate.job import estimate_by_table
    from kd.preflight.problems import Folders, require_no_problems

    settings = console.make_settings(home=home)
    config = console.load_job_file(job_file, overrides)
    require_no_problems(config, Folders(settings.root, settings.home))
    caches = settings.locate_caches(config.cache.store)
    forecast = None if fast else _rehearse(config, settings)
    by_table = estimate_by_table(config, settings.root, caches) if fast else None
    capture = by_table if forecast is None else forecast.capture
    facts = {} if capture is None else capture.model_dump(exclude={"cost", "account"})
    if forecast is not None:
        facts |= {"device": forecast.device, "device_bytes": forecast.device_bytes}
        facts |= {"capture_memory_bytes": forecast.capture_memory_bytes or None}
    trained = {} if forecast is None or forecast.training is None else asdict(forecast.training)
    if not console.print_as_json(facts | ({"training": trained} if trained else {})):
        # The hours are left out, because the seconds are printed in readable units.
        facts |= {f"training_{name}": value for name, value in trained.items()}
        console.print_facts({name: value for name, value in facts.items() if "hours" not in name})
    fits = capture is None or capture.fits
    if not fits:
        console.print_error(
            f"The disk of {caches} cannot hold the cache.",
            "Free space, set KD_STORE or KD_HOME to another disk, or keep less: a larger"
            " cache.threshold, fewer sequences, or of a bucket a lower KD_STORE_CACHE_BYTES.",
        )
    raise typer.Exit(0 if fits else FAILED)


def _rehearse(config: JobConfig, settings: Settings) -> JobForecast:
    """Run the teacher and take a few steps, and print what happens meanwhile."""
    from kd.forecast.rehearsal import estimate_job
    from kd.models.loading import hide_progress_bars
    from services.terminal.in_process import make_phase_monitor

    hide_progress_bars()
    os.chdir(settings.root)  # a job's relative paths start there
    os.environ.update(settings.environment())
    return estimate_job(config, settings.home, make_phase_monitor())


@app.command()
def plan(
    job_file: console.JobFile,
    devices: Devices,
    overrides: console.Overrides = None,
    price: Price = None,
    tokens: Tokens = None,
    home: console.Home = None,
) -> None:
    """List the strategies by which N devices can train a job, the best first.

    Prints memory, time and cost of each, also of one device alone if the student fits on it. If
    nothing fits, prints by how much, and what lowers the memory. Runs no model: all numbers are
    arithmetic, 6 N D FLOP at 40% of the maker's rate, and a step takes at least its launches. The
    number of sequences in a step stays as in the job. (`kd estimate` rehearses a job with its
    present settings on this machine.)
    """
    from kd.forecast.strategies import DeviceGroup, plan_job
    from kd.models.loading import hide_progress_bars
    from kd.preflight.problems import Folders, require_no_problems
    from services.store.costs import find_price

    settings = console.make_settings(home=home)
    config = console.load_job_file(job_file, overrides)
    require_no_problems(config, Folders(settings.root, settings.home))
    group = DeviceGroup.parse(devices)
    if price is None:
        price = find_price(settings.prices, "cuda", group.rates.name)
    hide_progress_bars()
    os.chdir(settings.root)  # a job's relative paths start there
    count = None if tokens is None else round(tokens)
    found = plan_job(config, settings.root, settings.home, group, count, price)
    if not console.print_as_json(asdict(found)):
        _print_plan(found)
    raise typer.Exit(0 if found.strategies else FAILED)


def _print_plan(found: TrainingPlan) -> None:
    """Print a plan for people."""
    from kd.memory.devices import HOST_DEVICES

    size = console.format_value(found.device_bytes, "bytes")
    _say(f"{found.devices} with {size} each, by the maker's figures; all numbers are expected:")
    console.print_facts(
        {
            "sequences_per_step": found.sequences_per_step,
            "steps": found.steps,
            "tokens": f"{found.tokens:,}",
            "student_parameters": f"{found.parameters:,}",
            "FLOP of the training": f"{found.flops:.3g}",
        }
    )
    console.out.print("")
    shown = found.strategies or (found.least,)
    rows = list(map(_list_cells, shown))
    console.print_table(list(rows[0]), [list(row.values()) for row in rows])
    console.out.print("")
    for each in shown:
        parts = {f"{name}_bytes": size for name, size in asdict(each.memory).items() if size}
        hosts = max(each.ranks // HOST_DEVICES, 1)
        place = f"resources: {{hosts: {hosts}, gpus: {each.ranks // hosts}}}"
        _say(f"{each.strategy}, {place}: {console.format_value(parts)}")
    if not found.strategies:
        missing = console.format_value(found.least.memory_bytes - found.usable_bytes, "bytes")
        usable = console.format_value(found.usable_bytes, "bytes")
        _say(
            f"Nothing fits. This needs least: {missing} more of each device than the {usable} that "
            "a plan may use. Any of these needs less:"
        )
        for remedy in found.remedies:
            _say(f"- {remedy}")
    if (capture := found.capture) is not None:
        cost = "" if capture.cost is None else f", cost {_format_cost(capture.cost)}"
        time = console.format_value(capture.seconds, "seconds")
        size = console.format_value(capture.weight_bytes, "bytes")
        _say(
            f"\nA capture of these tokens: {time} on all devices{cost}. The teacher's weights take "
            f"{size} in bfloat16."
        )


def _say(line: str) -> None:
    console.out.print(line, markup=False, highlight=False, soft_wrap=True)


def _list_cells(each: Strategy) -> dict[str, str]:
    return {
        "strategy": each.strategy,
        "devices": str(each.ranks),
        "batch_size": str(each.batch_size),
        "accumulation": str(each.gradient_accumulation_steps),
        "checkpointing": str(each.gradient_checkpointing),
        "precision": each.precision,
        "a device needs": console.format_value(each.memory_bytes, "bytes"),
        "a step takes": console.format_value(each.step_seconds, "seconds"),
        "waits": f"{each.waiting_seconds / each.step_seconds:.0%}",
        "training": console.format_value(each.seconds, "seconds"),
        "cost": _format_cost(each.cost),
    }


def _format_cost(cost: float | None) -> str:
    return "-" if cost is None else f"{cost:,.4g}"


@app.command()
def lr(
    job_file: console.JobFile,
    overrides: console.Overrides = None,
    plot: Plot = None,
    home: console.Home = None,
) -> None:
    """Show the learning rate over a job's whole run, as a table and a plot.

    Trains nothing. Use --set to try another schedule: --set train.lr_scheduler_type=cosine. A
    schedule that depends on the held-out loss is shown as if this loss never fell.
    """
    from kd.evaluation.plots import draw_rates
    from kd.forecast.length import find_length
    from kd.optim.schedules import list_rates

    settings = console.make_settings(home=home)
    config = console.load_job_file(job_file, overrides)
    picture = None if plot is None else plot.resolve()
    os.chdir(settings.root)  # a job's relative paths start there
    steps, _ = find_length(config, settings.root, settings.home)
    options = config.require_train()
    rates = list_rates(options, steps)
    if picture is not None:
        draw_rates(picture, rates)
    facts = {
        "schedule": options.lr_scheduler_type,
        "steps": steps,
        "sequences_per_step": options.sequences_per_step,
        "peak": options.learning_rate,
    }
    if console.print_as_json({**facts, "rates": rates}):
        return
    console.print_facts(facts)
    console.out.print("")
    # Even distances with both ends, and the highest rate.
    shown = {round(part * (steps - 1) / (RATE_ROWS - 1)) for part in range(RATE_ROWS)}
    shown.add(max(range(steps), key=lambda step: rates[step]))
    rows = [
        [f"{step + 1:,}", f"{rates[step]:.4g}", f"{rates[step] / options.learning_rate:.1%}"]
        for step in sorted(shown)
    ]
    console.print_table(["step", "learning rate", "of the peak"], rows)
    if picture is not None:
        console.out.print(f"\nplot: {picture}", markup=False, soft_wrap=True)
