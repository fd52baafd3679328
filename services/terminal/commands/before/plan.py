"""``kd plan``: settings that train a job's student on given devices; the plan of a distillation."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.terminal.commands.before.distillation import print_distillation
from services.terminal.console import (
    AsJson,
    Home,
    Overrides,
    format_value,
    load_job_file,
    make_settings,
    out,
    print_facts,
    print_json,
    print_table,
)
from services.terminal.exit_codes import FAILED

if TYPE_CHECKING:
    from kd.planning.devices import DeviceName
    from services.settings import Settings

OptionalJobFile = Annotated[
    Path | None,
    typer.Argument(
        help="Job file, in YAML or JSON. Not needed for --tokens if --teacher is given."
    ),
]
Devices = Annotated[
    str | None,
    typer.Option(
        help="Number and kind of the devices: 8xh100, h100 or cpu. Default: the devices of this "
        "machine. Kinds: cpu, v100, t4, a10, l4, l40s, rtx3090, rtx4090, a100-40gb, a100-80gb, "
        "h100, h200, b200.",
    ),
]
Price = Annotated[
    float | None,
    typer.Option(min=0, help="Price of an hour of one device; the cost is in the same currency."),
]
Runs = Annotated[
    list[Path] | None,
    typer.Option(
        help="Folder of a finished run, or of several runs; may be repeated. With five or more "
        "runs a law is fitted, and the expected held-out loss is printed."
    ),
]
Tokens = Annotated[
    str | None,
    typer.Option(
        help="Plan a whole distillation of this many tokens, such as 1e12, before there is a "
        "text: shards, bytes, hours, cost, and which resource is exhausted first. Needs --devices."
    ),
]
Teacher = Annotated[
    str | None,
    typer.Option(
        help="With --tokens: the teacher, instead of the job's: a folder, a config.json, or a "
        "size such as 70B."
    ),
]
Student = Annotated[
    str | None,
    typer.Option(
        help="With --tokens: the student, instead of the job's, in the same forms. Without a "
        "student only the capture is planned."
    ),
]
Profile = Annotated[
    str | None,
    typer.Option(
        help="With --tokens: the profile, instead of the job's: threshold, tempered, topk, dense "
        "or hidden."
    ),
]
Within = Annotated[
    float | None,
    typer.Option(
        min=0.01,
        max=1e6,
        help="With --tokens: hours that the capture may take; prints how many workers this needs. "
        "Default: 24.",
    ),
]

#: Hours that a capture may take where nothing is said.
WITHIN_HOURS = 24.0

app = typer.Typer()


@app.command()
def plan(
    job_file: OptionalJobFile = None,
    overrides: Overrides = None,
    devices: Devices = None,
    price: Price = None,
    runs: Runs = None,
    tokens: Tokens = None,
    teacher: Teacher = None,
    student: Student = None,
    profile: Profile = None,
    within: Within = None,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Find how to train a job on N devices: strategy, micro-batch, checkpointing and precision.

    Prints the settings that fit, the best first, with memory by part, time and cost. If nothing
    fits, prints by how much, and what lowers the memory. Runs no model: all numbers are estimates.
    The number of sequences in a step stays as in the job. (`kd estimate` estimates a job with its
    present settings.) --tokens plans a whole distillation before there is a text.
    """
    from kd.planning.devices import DeviceName

    name = None if devices is None else DeviceName.parse(devices)
    settings = make_settings(home=home)
    if tokens is None:
        given = {"teacher": teacher, "student": student, "profile": profile, "within": within}
        if wrong := [option for option, value in given.items() if value is not None]:
            raise typer.BadParameter(f"--{wrong[0]} is for a plan by --tokens: give that, too.")
        if job_file is None:
            raise typer.BadParameter("Give a job file, or --tokens with --teacher and --devices.")
        _plan_training(job_file, overrides, name, price, runs, settings, as_json)
        return
    if name is None or runs:
        raise typer.BadParameter(
            "--tokens needs --devices, such as 64xh100." if name is None
            else "--runs is for the plan of a job's training, without --tokens."
        )  # fmt: skip
    from kd.planning.distillation.plan import plan_distillation
    from kd.planning.distillation.request import PlanRequest, parse_tokens, read_config

    count = parse_tokens(tokens)
    config = read_config(job_file, teacher, student, profile, name.count, overrides or ())
    prices = _list_prices(settings, name, price)
    asked = PlanRequest(count, name, teacher, student, within or WITHIN_HOURS, prices)
    os.chdir(settings.root)  # a job's relative paths start there
    found = plan_distillation(config, asked, settings.root)
    if as_json:
        print_json(found)
    else:
        print_distillation(found)
    raise typer.Exit(FAILED if found["missing"] else 0)


def _list_prices(settings: Settings, devices: DeviceName, price: float | None) -> dict[str, float]:
    """The price of an hour of a device of each kind that has one; --price is of the named kind."""
    from kd.memory.devices import DEVICE_KINDS
    from services.store.costs import find_price

    found = {kind: find_price(settings.prices, "cuda", kind) for kind in DEVICE_KINDS}
    found |= {} if price is None else {devices.kind: price}
    return {kind: each for kind, each in found.items() if each is not None}


def _plan_training(
    job_file: Path,
    overrides: list[str] | None,
    name: DeviceName | None,
    price: float | None,
    runs: list[Path] | None,
    settings: Settings,
    as_json: bool,
) -> None:
    """Plan the training of the job in the file, and print it."""
    from kd.preflight.problems import Folders, require_no_problems

    folders = [folder.resolve() for folder in runs or ()]
    config = load_job_file(job_file, overrides)
    require_no_problems(config, Folders(settings.root, settings.home))
    from kd.models.loading import hide_progress_bars
    from kd.planning.here import plan_training

    hide_progress_bars()
    os.chdir(settings.root)  # a job's relative paths start there
    found = plan_training(config, settings.root, settings.home, name, price, folders).to_json()
    if as_json:
        print_json(found)
    else:
        _print_plan(found)
    raise typer.Exit(FAILED if found["shortfall"] else 0)


def _print_plan(found: dict[str, Any]) -> None:
    """Print a plan for people."""
    how = "rates measured here" if found["timed"] else "by the maker's figures"
    size = format_value(found["device_bytes"], "bytes")
    out.print(
        f"{found['devices']} with {size} each, {how}; all numbers are expected:",
        markup=False,
        soft_wrap=True,
    )
    _print_budget(found)
    if found["shortfall"]:
        _print_shortfall(found["shortfall"])
    else:
        _print_candidates(found["candidates"])
    _print_expected_loss(found["expected_loss"])


def _print_budget(found: dict[str, Any]) -> None:
    budget = found["budget"]
    print_facts(
        {
            "sequences_per_step": found["sequences_per_step"],
            "steps": found["steps"],
            "tokens": f"{budget['tokens']:,}",
            "student_parameters": f"{budget['parameters']:,}",
            "FLOP of the training (6 N D)": f"{budget['flops']:.3g}",
            "tokens_per_parameter": budget["tokens_per_parameter"],
            "student for these tokens (D / 20)": f"{budget['suited_parameters']:,} parameters",
            "tokens for this student (20 N)": f"{budget['suited_tokens']:,}",
            "student for this FLOP": f"{budget['best_parameters']:,} parameters",
        }
    )


def _print_candidates(candidates: list[dict[str, Any]]) -> None:
    """Print the settings, then their memory by part, then the reasons."""
    out.print("")
    print_table(
        ["", "strategy", "batch_size", "accumulation", "checkpointing", "precision", "a rank needs",
         "a step takes", "training", "cost"],
        [[str(place), *_format_settings(each), *_format_needs(each)]
         for place, each in enumerate(candidates, 1)],
    )  # fmt: skip
    out.print("")
    rows = [_list_parts(each) for each in candidates]
    print_table(
        ["", *rows[0]],
        [
            [str(place), *(format_value(size, "bytes") for size in row.values())]
            for place, row in enumerate(rows, 1)
        ],
    )
    out.print("")
    for place, each in enumerate(candidates, 1):
        out.print(f"{place}: {each['why']}", markup=False, soft_wrap=True)


def _list_parts(candidate: dict[str, Any]) -> dict[str, int]:
    """The parts of what a rank needs. The records of a loader lie on the host of a GPU."""
    parts = candidate["memory"] | {"process": candidate["process"]}
    if candidate["memory_bytes"] > sum(parts.values()):
        parts["loader"] = candidate["loader"]
    return dict(parts)


def _format_settings(candidate: dict[str, Any]) -> list[str]:
    names = (
        "strategy", "batch_size", "gradient_accumulation_steps", "gradient_checkpointing",
        "precision",
    )  # fmt: skip
    return [str(candidate[name]) for name in names]


def _format_needs(candidate: dict[str, Any]) -> list[str]:
    return [
        format_value(candidate["memory_bytes"], "bytes"),
        format_value(candidate["step_seconds"], "seconds"),
        format_value(candidate["seconds"], "seconds"),
        "-" if candidate["cost"] is None else f"{candidate['cost']:.4g}",
    ]


def _print_shortfall(shortfall: dict[str, Any]) -> None:
    least = shortfall["least"]
    settings = ", ".join(
        f"{name} {least[name]}"
        for name in ("strategy", "batch_size", "gradient_checkpointing", "precision")
    )
    out.print(
        f"\nNothing fits. The least ({settings}) needs "
        f"{format_value(least['memory_bytes'], 'bytes')} of each device, "
        f"{format_value(shortfall['missing_bytes'], 'bytes')} more than the "
        f"{format_value(shortfall['usable_bytes'], 'bytes')} that a plan may use.",
        markup=False,
        soft_wrap=True,
    )
    parts = {f"{name}_bytes": size for name, size in least["memory"].items() if size}
    out.print(f"Of that: {format_value(parts)}", markup=False, soft_wrap=True)
    print_table(
        ["alone", "then needs", "saves", "fits", "but"],
        [
            [
                each["setting"],
                format_value(each["memory_bytes"], "bytes"),
                format_value(each["saved_bytes"], "bytes"),
                format_value(each["fits"]),
                each["changes"],
            ]
            for each in shortfall["levers"]
        ],
    )


def _print_expected_loss(expected: dict[str, Any] | None) -> None:
    if expected is None:
        return
    interval = (
        "no interval: the runs do not determine one"
        if expected["low"] is None
        else f"95 % interval of a new run {expected['low']} to {expected['high']}"
    )
    constants = ", ".join(f"{name} = {value:g}" for name, value in expected["constants"].items())
    lines = [
        f"\nExpected held-out loss: {expected['loss']} nats a token, {interval}.",
        f"Law: {expected['law']} with {constants}, fitted to {expected['runs']} runs.",
        expected["beyond"] and f"Beyond the runs: {expected['beyond']}.",
    ]
    for line in filter(None, lines):
        out.print(line, markup=False, soft_wrap=True)
