"""Print the expected rate of each stage on some GPUs, or measure the stages on the device at hand.

    python bench/roofline.py [--out FILE]               expected rates, with the formula of each
    python bench/roofline.py --measure [--rounds 5]     expected beside measured, in one run
                             [--small] [--out FILE]

Expected rates are arithmetic, by the one module that ``kd estimate`` uses (``kd.memory.work`` and
``kd.memory.phases``): FLOP and bytes of a token, the rates of the maker, and the share of them that
a job is assumed to reach. Nothing is measured for them.

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
from kd.memory.devices import CUDA_CONTEXT, DEVICE_KINDS, find_device_kind
from kd.memory.rates import measure_rates
from kd.memory.training_phase import Place
from kd.memory.work import ASSUMED_UTILIZATION
from kd.models.loading import hide_progress_bars
from kd.models.precision import find_hardware, pick_device

GIB = 2**30
#: The kinds of GPU of the page.
KINDS = ("t4", "a100-80gb", "h100", "rtx4090")
#: The kind whose numbers stand beside the formulas. Of other kinds the LM head moves other bytes,
#: because less memory holds smaller chunks.
SHOWN = "h100"
NOT_MEASURED = "not measured"
MEASURED_COLUMNS = (
    "stage", "setting", "FLOP a token", "bytes a token", "expected, tokens/s", "measured", "ratio",
)  # fmt: skip
LEGEND = """\
N: parameters of the layers that a token meets. P: all parameters. A: width of all heads of all
layers. C: tokens of a document. D: hidden width. V: vocabulary. M: tokens of a micro-batch.
S: bytes that autograd keeps for a token. c: positions of a chunk of logits. k: chunks of a
micro-batch. w: bytes of a weight, 2 in a capture and 4 in a training."""


@dataclass(frozen=True)
class Expected:
    """The expected rate of a stage on a device, in tokens/s, and how it comes about."""

    setting: str
    flops: float
    bytes: float
    formula: str
    bound: str
    rate: float


def expect(stage: Stage, place: Place) -> Expected | str:
    """Compute the expected rate; a text where the stage does not fit into the memory."""
    setting = choose_setting(stage, place)
    if setting is None:
        needed = min(each.count_memory(place) for each in stage.settings)
        return f"does not fit: {needed / GIB:,.0f} GiB of {place.rates.memory / GIB:,.0f}"
    work = setting.count_work(place)
    flops = work.flops / stage.tokens
    moved = work.bytes / stage.tokens
    products = place.rates.find_rate(place.auto, False)
    formula = (
        f"{ASSUMED_UTILIZATION} min({format_count(products)} / {format_count(flops)}, "
        f"{format_count(place.rates.bandwidth)} / {format_count(moved)})"
    )
    bound = "FLOP" if flops / products > moved / place.rates.bandwidth else "bytes"
    seconds = work.seconds(place.rates, place.auto, False, ASSUMED_UTILIZATION)
    return Expected(setting.name, flops, moved, formula, bound, stage.tokens / seconds)


def format_count(value: float) -> str:
    """Format a number with three digits and a letter for its size."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


# ---------------------------------------------------------------------- expected


def render_stages(stages: Sequence[Stage], place: Place) -> list[str]:
    """The work of a token in each stage, with its formula."""
    device = f"on {place.rates.name}"
    lines = [f"| stage | FLOP a token | | bytes a token | {device} |", "|---|---|--:|---|--:|"]
    for stage in stages:
        work = stage.settings[0].count_work(place)
        counts = (format_count(each / stage.tokens) for each in (work.flops, work.bytes))
        flops, moved = (f"{formula} | {count}" for formula, count in
                        zip(stage.formulas, counts, strict=True))  # fmt: skip
        lines.append(f"| {stage.name} | {flops} | {moved} |")
    return lines


def render_rates(stages: Sequence[Stage], places: Sequence[Place]) -> list[str]:
    """The expected rate of each stage on each device."""
    lines = [
        "| stage | device | setting | tokens/s | expected | bound by | measured |",
        "|---|---|---|---|--:|---|--:|",
    ]
    for stage in stages:
        for place in places:
            found = expect(stage, place)
            if isinstance(found, str):
                cells = ["-", found, "-", "-", "-"]
            else:
                cells = [found.setting, found.formula, f"{found.rate:,.0f}", found.bound]
                cells.append(NOT_MEASURED)
            lines.append(f"| {' | '.join([stage.name, place.rates.name, *cells])} |")
    return lines


def render_reader(stages: Sequence[Stage], places: Sequence[Place]) -> list[str]:
    """The least rate of the reader with which it never holds up the student."""
    each = count_read_bytes(REAL.vocabulary)
    lines = [
        "| device | the step, tokens/s | bytes a token | the reader must deliver | measured |",
        "|---|--:|--:|--:|--:|",
    ]
    steps = [stage for stage in stages if stage.name.startswith("step")]
    for place in places:
        found = [rate for stage in steps if not isinstance(rate := expect(stage, place), str)]
        if not found:
            lines.append(f"| {place.rates.name} | does not fit | {each:.1f} | - | - |")
            continue
        rate = max(one.rate for one in found)
        cells = [f"{rate:,.0f}", f"{each:.1f}", f"{rate * each / 1e6:.2f} MB/s", NOT_MEASURED]
        lines.append(f"| {place.rates.name} | {' | '.join(cells)} |")
    return lines


def render_expected() -> str:
    """All tables of the expected rates."""
    places = [Place.named(DEVICE_KINDS[name]) for name in KINDS]
    stages = list_stages(REAL)
    lines = [
        f"Expected, by arithmetic: {ASSUMED_UTILIZATION:.0%} of the maker's rates. {REAL}",
        "",
        LEGEND,
        "",
        *render_stages(stages, Place.named(DEVICE_KINDS[SHOWN])),
        "",
        *render_rates(stages, places),
        "",
        *render_reader(stages, places),
    ]
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------- measured


def describe_place(device: torch.device) -> Place:
    """The device at hand: the maker's rates where they are known, else measured ones."""
    precision = find_hardware(device).precision
    if device.type == "cuda":
        kind = find_device_kind(torch.cuda.get_device_name(device))
        return Place(kind or measure_rates(device), True, CUDA_CONTEXT, precision, is_timed=True)
    return Place(measure_rates(device), False, 0, precision, is_timed=True)


def render_measured(sizes: Sizes, rounds: int) -> str:
    """The expected and the measured rate of each stage on the device at hand."""
    from bench.gpu.stage_runs import measure_reader, measure_stage

    device = pick_device()
    place = describe_place(device)
    lines = [*make_heading(place, sizes, rounds), ""]
    lines += [f"| {' | '.join(MEASURED_COLUMNS)} |", "|---|---|" + "--:|" * 5]
    for stage in list_stages(sizes):
        print(f"measuring: {stage.name}", file=sys.stderr, flush=True)
        found = expect(stage, place)
        if isinstance(found, str):
            lines.append(f"| {stage.name} | {found} | - | - | - | - | - |")
            continue
        rate = measure_stage(stage, found.setting, sizes, rounds)
        work = [format_count(found.flops), format_count(found.bytes)]
        lines.append(format_measured(stage.name, found.setting, work, found.rate, rate))
    reader = measure_reader(sizes, rounds)
    expected = ASSUMED_UTILIZATION * measure_rates(torch.device("cpu")).bandwidth / reader.bytes
    work = ["0", format_count(reader.bytes)]
    lines.append(format_measured("reader", "one thread", work, expected, reader.rate))
    return "\n".join(lines) + "\n"


def make_heading(place: Place, sizes: Sizes, rounds: int) -> list[str]:
    """The lines about the machine, its rates and the sizes."""
    rates = place.rates
    source = "the maker's" if rates.name in DEVICE_KINDS else "measured"
    machine = (
        f"Machine: {name_machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads "
        f"on {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start."
    )
    about_rates = (
        f"Rates ({source}): {place.auto} products "
        f"{rates.find_rate(place.auto, False) / 1e12:.3g} TFLOP/s, memory "
        f"{rates.bandwidth / 1e9:.3g} GB/s; expected: {ASSUMED_UTILIZATION:.0%} of them."
    )
    return [machine, about_rates, f"{sizes} Median of {rounds} rounds."]


def format_measured(
    name: str, setting: str, work: Sequence[str], expected: float, measured: float
) -> str:
    """Format a row of the measured table."""
    cells = [name, setting, *work, f"{expected:,.0f}", f"{measured:,.0f}"]
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
