"""``kd estimate``: what a job needs, by a rehearsal, before it runs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.terminal.console import (
    Home,
    JobFile,
    Overrides,
    format_value,
    load_job_file,
    make_settings,
    out,
    print_as_json,
    print_error,
    print_facts,
    print_table,
)
from services.terminal.exit_codes import FAILED

if TYPE_CHECKING:
    from kd.capture.estimate.job import Estimate
    from kd.config.job import JobConfig
    from kd.memory.devices import DeviceRates
    from services.settings import Settings

Fast = Annotated[
    bool,
    typer.Option(
        help="Estimate by table and arithmetic: load no model, and read a sample of the text."
    ),
]
Kind = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="Also estimate the job on a kind of GPU, from its maker's figures: v100, t4, "
        "a10, l4, l40s, rtx3090, rtx4090, a100-40gb, a100-80gb, h100, h200 or b200.",
    ),
]
Price = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="Price of an hour of that device, or of this device if you name none; the cost is in "
        "the same currency. Default for a named kind: KD_DEVICE_PRICES.",
    ),
]

app = typer.Typer()


@app.command()
def estimate(
    job_file: JobFile,
    overrides: Overrides = None,
    fast: Fast = False,
    kind: Kind = None,
    price: Price = None,
    home: Home = None,
) -> None:
    """Estimate a job's capture and training: tokens, bytes, memory, hours and cost.

    Reads a sample of the text, and rehearses some steps of both on this device. With --fast no
    model runs: tokens and bytes by a table, and the least memory of the models.
    """
    from kd.preflight.problems import Folders, require_no_problems
    from services.store.costs import find_price

    rates = _find_kind(kind, price, fast)
    settings = make_settings(home=home)
    if price is None and rates is not None:
        price = find_price(settings.prices, "cuda", rates.name)
    config = load_job_file(job_file, overrides)
    require_no_problems(config, Folders(settings.root, settings.home))
    devices: list[dict[str, Any]] = []
    if fast:
        capture, training = _estimate_by_table(config, settings)
    else:
        capture, training, devices = _estimate_by_trial(config, settings, rates, price)
    found = {} if capture is None else capture.to_json()
    more = {"training": training, "devices": devices}
    if not print_as_json({**found, **{name: value for name, value in more.items() if value}}):
        # The hours are left out, because the seconds are printed in readable units.
        print_facts({name: value for name, value in found.items() if name != "hours"})
        if training is not None:
            _print_training(training)
        for device in devices:
            _print_device(device)
    fits = capture is None or capture.fits
    if not fits:
        print_error(
            f"The disk of {settings.locate_caches(config.cache.store)} cannot hold the cache.",
            "Free space, set KD_STORE or KD_HOME to another disk, or keep less: a larger"
            " cache.threshold, fewer sequences, or of a bucket a lower KD_STORE_CACHE_BYTES.",
        )
    raise typer.Exit(0 if fits else FAILED)


def _find_kind(name: str | None, price: float | None, fast: bool) -> DeviceRates | None:
    """Find the kind of GPU called ``name``; refuse what --fast cannot tell."""
    from kd.memory.devices import DEVICE_KINDS

    if fast and (name is not None or price is not None):
        raise typer.BadParameter(
            "--device and --price need a rehearsal of the job, which --fast leaves out: give one "
            "or the other."
        )
    if name is None:
        return None
    if name not in DEVICE_KINDS:
        known = ", ".join(DEVICE_KINDS)
        raise typer.BadParameter(f"--device is {name!r}, but only these kinds are known: {known}.")
    return DEVICE_KINDS[name]


def _print_device(device: dict[str, Any]) -> None:
    """Print the phases of a job on a device."""
    size = format_value(device["device_bytes"], "bytes")
    scaled = "scaled from the rehearsal here, by its maker's figures"
    how = scaled if device["scaled"] else "as it was rehearsed"
    out.print(f"\nOn {device['device']} with {size} ({how}):", markup=False, soft_wrap=True)
    rows = [
        [
            phase["phase"],
            format_value(phase["memory_bytes"], "bytes"),
            format_value(phase["fits"]),
            format_value(phase["seconds"], "seconds"),
            "-" if phase["cost"] is None else f"{phase['cost']:.4g}",
        ]
        for phase in device["phases"]
    ]
    print_table(["", "memory", "fits", "time", "cost"], rows)


def _print_training(training: dict[str, Any]) -> None:
    """Print the facts of the training; one that is not known is left out."""
    print_facts(
        {
            "training_steps": training["steps"],
            "training_tokens": training["tokens"],
            "student_parameters": training["parameters"],
            "training_time_seconds": training.get("seconds"),
            "time_of_a_step_seconds": training.get("step_seconds"),
            "training_memory_bytes": training["memory_bytes"],
        }
    )


def _estimate_by_table(
    config: JobConfig, settings: Settings
) -> tuple[Estimate | None, dict[str, Any] | None]:
    """Estimate the capture from the table, and the training by arithmetic."""
    from kd.capture.estimate.job import estimate_by_table
    from services.api.planning import plan_job

    caches = settings.locate_caches(config.cache.store)
    capture = None if not config.captures else estimate_by_table(config, settings.root, caches)
    if config.train is None:
        return capture, None
    plan = plan_job(config, settings, [])
    memory = plan.memory
    sizes = {"parameters": memory.student_parameters, "memory_bytes": memory.student_bytes}
    return capture, {"steps": plan.steps, "tokens": plan.tokens, **sizes}


def _estimate_by_trial(
    config: JobConfig, settings: Settings, kind: DeviceRates | None, price: float | None
) -> tuple[Estimate | None, dict[str, Any] | None, list[dict[str, Any]]]:
    """Estimate the capture by running the teacher, and the training by a few steps."""
    from kd.forecast.rehearsal import estimate_job
    from kd.models.loading import hide_progress_bars
    from services.terminal.in_process import enter_root, make_phase_monitor

    hide_progress_bars()
    enter_root(settings)
    found = estimate_job(config, settings.home, make_phase_monitor(), kind, price)
    training = None if found.training is None else asdict(found.training)
    return found.capture, training, list(map(asdict, found.devices))
