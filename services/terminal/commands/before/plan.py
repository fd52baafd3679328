"""``kd plan``: the strategies that train a job's student on given devices."""

from __future__ import annotations

import os
from typing import Annotated, Any

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
    print_facts,
    print_table,
)
from services.terminal.exit_codes import FAILED

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
    typer.Option(
        min=0,
        help="Price of an hour of one device; the cost is in the same currency. Default: "
        "KD_DEVICE_PRICES.",
    ),
]
Tokens = Annotated[
    float | None,
    typer.Option(
        min=1,
        help="Tokens that the training reads, such as 1e12. Default: those of the job.",
    ),
]

#: What the table shows of a strategy's settings.
SETTINGS = (
    "strategy", "ranks", "batch_size", "gradient_accumulation_steps", "gradient_checkpointing",
    "precision",
)  # fmt: skip

app = typer.Typer()


@app.command()
def plan(
    job_file: JobFile,
    overrides: Overrides = None,
    devices: Devices = None,
    price: Price = None,
    tokens: Tokens = None,
    home: Home = None,
) -> None:
    """List the strategies by which N devices can train a job, the best first.

    Prints memory, time and cost of each, also of one device alone if the student fits on it. If
    nothing fits, prints by how much, and what lowers the memory. Runs no model: all numbers are
    arithmetic, 6 N D FLOP at 40% of the maker's rate. The number of sequences in a step stays as
    in the job. (`kd estimate` rehearses a job with its present settings.)
    """
    from kd.forecast.device_names import DeviceGroup
    from kd.preflight.problems import Folders, require_no_problems
    from services.store.costs import find_price

    settings = make_settings(home=home)
    config = load_job_file(job_file, overrides)
    require_no_problems(config, Folders(settings.root, settings.home))
    group = DeviceGroup.here() if devices is None else DeviceGroup.parse(devices)
    if price is None:
        price = find_price(settings.prices, "cuda" if group.is_gpu else "cpu", group.rates.name)
    from kd.forecast.strategies import plan_job
    from kd.models.loading import hide_progress_bars

    hide_progress_bars()
    os.chdir(settings.root)  # a job's relative paths start there
    count = None if tokens is None else round(tokens)
    found = plan_job(config, settings.root, settings.home, group, count, price).to_json()
    if not print_as_json(found):
        _print_plan(found)
    raise typer.Exit(0 if found["strategies"] else FAILED)


def _print_plan(found: dict[str, Any]) -> None:
    """Print a plan for people."""
    how = "rates measured here" if found["measured"] else "by the maker's figures"
    size = format_value(found["device_bytes"], "bytes")
    _say(f"{found['devices']} with {size} each, {how}; all numbers are expected:")
    print_facts(
        {
            "sequences_per_step": found["sequences_per_step"],
            "steps": found["steps"],
            "tokens": f"{found['tokens']:,}",
            "student_parameters": f"{found['parameters']:,}",
            "FLOP of the training": f"{found['flops']:.3g}",
        }
    )
    out.print("")
    shown = found["strategies"] or [found["least"]]
    print_table(
        ["strategy", "devices", "batch_size", "accumulation", "checkpointing", "precision",
         "a device needs", "a step takes", "waits", "training", "cost"],
        [_format_strategy(each) for each in shown],
    )  # fmt: skip
    out.print("")
    for each in shown:
        parts = {f"{name}_bytes": size for name, size in each["memory"].items() if size}
        _say(f"{each['strategy']}, {each['ranks']}: {format_value(parts)}")
    if not found["strategies"]:
        usable = found["usable_bytes"]
        missing = found["least"]["memory_bytes"] - usable
        _say(
            f"Nothing fits. This needs least: {format_value(missing, 'bytes')} more of each device "
            f"than the {format_value(usable, 'bytes')} that a plan may use. Any of these needs "
            "less:"
        )
        for remedy in found["remedies"]:
            _say(f"- {remedy}")
    if (capture := found["capture"]) is not None:
        cost = "" if capture["cost"] is None else f", cost {_format_cost(capture['cost'])}"
        _say(
            f"\nA capture of these tokens: {format_value(capture['seconds'], 'seconds')} on all "
            f"devices{cost}. The teacher's weights take "
            f"{format_value(capture['weight_bytes'], 'bytes')} in bfloat16."
        )


def _say(line: str) -> None:
    out.print(line, markup=False, highlight=False, soft_wrap=True)


def _format_strategy(each: dict[str, Any]) -> list[str]:
    return [
        *(str(each[name]) for name in SETTINGS),
        format_value(each["memory_bytes"], "bytes"),
        format_value(each["step_seconds"], "seconds"),
        f"{each['waiting_seconds'] / each['step_seconds']:.0%}",
        format_value(each["seconds"], "seconds"),
        _format_cost(each["cost"]),
    ]


def _format_cost(cost: float | None) -> str:
    return "-" if cost is None else f"{cost:,.4g}"
