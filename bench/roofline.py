"""Print the expected rate of each stage on some GPUs, or measure the stages on the device at hand.

    python bench/roofline.py [--out FILE]               expected rates, with the formula of each
    python bench/roofline.py --measure [--rounds 5]     expected beside measured, in one run
                             [--small] [--out FILE]

Expected rates are arithmetic, as in ``kd plan``: the FLOP of a token, the rate of the maker, and
the share of it that a job is assumed to reach. Nothing is measured for them.

``--measure`` runs every stage that fits into the memory of the device, with random models of the
same sizes; on a CPU, or with ``--small``, with small ones. The expected rates are those of the
table where the maker's are known, else those of rates that a short probe measures. A measured rate
is the median of the rounds.

    capture     the teacher's logits and their records in memory; not sealed
    step        a training step on records: student, fused LM head, clipping and AdamW
    LM head     the fused loss of records alone, forward and backward
    reader      records of a cache to batches, on one thread of the host. Expected is a mere copy of
                its bytes; the reader decodes them too. On a GPU the table of expected rates says
                what the step asks of it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.gpu.device_rates import measure_rates
from bench.gpu.stage_work import (
    REAL,
    SMALL,
    Sizes,
    Stage,
    choose_setting,
    count_read_bytes,
    list_stages,
)
from bench.speed import name_machine
from kd.forecast.strategies import ASSUMED_UTILIZATION
from kd.memory.devices import DEVICE_KINDS, DeviceRates, find_device_kind
from kd.models.loading import hide_progress_bars
from kd.models.precision import find_hardware, pick_device

GIB = 2**30
#: The kinds of GPU of the page.
KINDS = ("t4", "a100-80gb", "h100", "rtx4090")
NOT_MEASURED = "not measured"
MEASURED_COLUMNS = (
    "stage", "setting", "FLOP a token", "expected, tokens/s", "measured", "ratio",
)  # fmt: skip
LEGEND = """\
N: parameters of the layers that a token meets. A: width of all heads of all layers. C: tokens of a
document. D: hidden width. V: vocabulary."""


@dataclass(frozen=True)
class Expected:
    """The expected rate of a stage on a device, in tokens/s, and how it comes about."""

    setting: str
    flops: float
    formula: str
    rate: float


def expect(stage: Stage, rates: DeviceRates, precision: str) -> Expected | str:
    """Compute the expected rate; a text where the stage does not fit into the memory."""
    setting = choose_setting(stage, rates)
    if setting is None:
        needed = min(each.count_memory(rates) for each in stage.settings)
        return f"does not fit: {needed / GIB:,.0f} GiB of {rates.memory / GIB:,.0f}"
    products = rates.find_rate(precision, tf32=False)
    formula = f"{ASSUMED_UTILIZATION} x {format_count(products)} / {format_count(setting.flops)}"
    rate = ASSUMED_UTILIZATION * products / setting.flops
    return Expected(setting.name, setting.flops, formula, rate)


def expect_on_gpu(stage: Stage, rates: DeviceRates) -> Expected | str:
    """Compute the rate in the precision that "auto" means on a GPU."""
    return expect(stage, rates, "bf16" if rates.has_bfloat16 else "fp16")


def format_count(value: float) -> str:
    """Format a number with three digits and a letter for its size."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


# ---------------------------------------------------------------------- expected


def render_stages(stages: Sequence[Stage]) -> list[str]:
    """The FLOP of a token in each stage, with its formula."""
    lines = ["| stage | FLOP a token | |", "|---|---|--:|"]
    for stage in stages:
        lines.append(
            f"| {stage.name} | {stage.formula} | {format_count(stage.settings[0].flops)} |"
        )
    return lines


def render_rates(stages: Sequence[Stage], kinds: Sequence[DeviceRates]) -> list[str]:
    """The expected rate of each stage on each device."""
    lines = [
        "| stage | device | setting | tokens/s | expected | measured |",
        "|---|---|---|---|--:|--:|",
    ]
    for stage in stages:
        for rates in kinds:
            found = expect_on_gpu(stage, rates)
            if isinstance(found, str):
                cells = ["-", found, "-", "-"]
            else:
                cells = [found.setting, found.formula, f"{found.rate:,.0f}", NOT_MEASURED]
            lines.append(f"| {' | '.join([stage.name, rates.name, *cells])} |")
    return lines


def render_reader(stages: Sequence[Stage], kinds: Sequence[DeviceRates]) -> list[str]:
    """The least rate of the reader with which it never holds up the student."""
    each = count_read_bytes(REAL.vocabulary)
    lines = [
        "| device | the step, tokens/s | bytes a token | the reader must deliver | measured |",
        "|---|--:|--:|--:|--:|",
    ]
    steps = [stage for stage in stages if stage.name.startswith("step")]
    for rates in kinds:
        found = [one for stage in steps if not isinstance(one := expect_on_gpu(stage, rates), str)]
        if not found:
            lines.append(f"| {rates.name} | does not fit | {each:.1f} | - | - |")
            continue
        rate = max(one.rate for one in found)
        cells = [f"{rate:,.0f}", f"{each:.1f}", f"{rate * each / 1e6:.2f} MB/s", NOT_MEASURED]
        lines.append(f"| {rates.name} | {' | '.join(cells)} |")
    return lines


def render_expected() -> str:
    """All tables of the expected rates."""
    kinds = [DEVICE_KINDS[name] for name in KINDS]
    # Documents cost the same in packed rows as alone.
    stages = [stage for stage in list_stages(REAL) if "packed" not in stage.name]
    lines = [
        f"Expected, by arithmetic: {ASSUMED_UTILIZATION:.0%} of the maker's rates. {REAL}",
        "",
        LEGEND,
        "",
        *render_stages(stages),
        "",
        *render_rates(stages, kinds),
        "",
        *render_reader(stages, kinds),
    ]
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------- measured


def find_rates(device: torch.device) -> DeviceRates:
    """The rates of the device at hand: the maker's where they are known, else measured ones."""
    kind = find_device_kind(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return kind or measure_rates(device)


def render_measured(sizes: Sizes, rounds: int) -> str:
    """The expected and the measured rate of each stage on the device at hand."""
    from bench.gpu.stage_runs import measure_reader, measure_stage

    device = pick_device()
    rates = find_rates(device)
    precision = find_hardware(device).precision
    lines = [*make_heading(rates, precision, sizes, rounds), ""]
    lines += [f"| {' | '.join(MEASURED_COLUMNS)} |", "|---|---|" + "--:|" * 4]
    for stage in list_stages(sizes):
        print(f"measuring: {stage.name}", file=sys.stderr, flush=True)
        found = expect(stage, rates, precision)
        if isinstance(found, str):
            lines.append(f"| {stage.name} | {found} | - | - | - | - |")
            continue
        rate = measure_stage(stage, found.setting, sizes, rounds)
        lines.append(
            format_measured(stage.name, found.setting, format_count(found.flops), found.rate, rate)
        )
    reader = measure_reader(sizes, rounds)
    expected = ASSUMED_UTILIZATION * measure_rates(torch.device("cpu")).bandwidth / reader.bytes
    lines.append(format_measured("reader", "one thread", "0", expected, reader.rate))
    return "\n".join(lines) + "\n"


def make_heading(rates: DeviceRates, precision: str, sizes: Sizes, rounds: int) -> list[str]:
    """The lines about the machine, its rates and the sizes."""
    source = "the maker's" if rates.name in DEVICE_KINDS else "measured"
    machine = (
        f"Machine: {name_machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads "
        f"on {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start."
    )
    about_rates = (
        f"Rates ({source}): {precision} products "
        f"{rates.find_rate(precision, tf32=False) / 1e12:.3g} TFLOP/s, memory "
        f"{rates.bandwidth / 1e9:.3g} GB/s; expected: {ASSUMED_UTILIZATION:.0%} of them."
    )
    return [machine, about_rates, f"{sizes} Median of {rounds} rounds."]


def format_measured(name: str, setting: str, flops: str, expected: float, measured: float) -> str:
    """Format a row of the measured table."""
    cells = [name, setting, flops, f"{expected:,.0f}", f"{measured:,.0f}"]
    return f"| {' | '.join(cells)} | {measured / expected:.3g} |"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="run the stages on this device")
    parser.add_argument("--rounds", type=int, default=5, help="timed runs of each stage")
    parser.add_argument("--small", action="store_true", help="small sizes, as on a CPU")
    parser.add_argument("--out", type=Path, help="also write the tables to this file")
    given = parser.parse_args()
    hide_progress_bars()
    if given.measure:
        small = given.small or pick_device().type == "cpu"
        text = render_measured(SMALL if small else REAL, given.rounds)
    else:
        text = render_expected()
    sys.stdout.write(text)
    if given.out is not None:
        given.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
