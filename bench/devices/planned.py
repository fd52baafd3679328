"""What a step is expected to cost on 8 to 1,024 devices, by the arithmetic of ``kd plan``.

Students of two sizes, on a kind of device with fast links and on one with slow links, eight devices
a host. A device has four sequences of 4,096 tokens in a step, so without waiting each would be as
fast on many. The settings are the fastest that ``kd plan`` finds for each strategy. Nothing runs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.gpu.reference_run import widen_vocabulary
from bench.gpu.stage_work import REAL, make_config
from bench.support.paths import AUSTEN
from kd.config.jobfile import parse_config
from kd.forecast.strategies import DeviceGroup, TrainingPlan, plan_job
from kd.memory.devices import DEVICE_KINDS
from kd.models.tokenizers import load_tokenizer

KINDS = ("h100", "l40s")
DEVICES = (8, 64, 1024)
STRATEGIES = ("ddp", "fsdp", "hsdp")
SEQUENCES = 4
LENGTH = 4096


def plan_many(student: Path, kind: str, devices: int) -> TrainingPlan:
    """Plan a training of the student in a folder."""
    config = parse_config({
        "kind": "train",
        "student": {"model": str(student)},
        "data": {"sequence_length": LENGTH},
        "cache": {"fingerprint": "0" * 32},
        "train": {"max_steps": 1, "gradient_accumulation_steps": SEQUENCES * devices},
    })  # fmt: skip
    return plan_job(config, student, student, DeviceGroup(DEVICE_KINDS[kind], devices))


def print_planned() -> Iterator[str]:
    """Yield the lines of the table: tokens a second of each device; "-" where it does not fit."""
    columns = [f"of {devices:,}" for devices in DEVICES]
    yield f"| student | device | strategy | {' | '.join(columns)} |"
    yield f"|---|---|---|{'--:|' * len(DEVICES)}"
    with tempfile.TemporaryDirectory() as folder:
        for name in REAL.teachers:
            student = save_outline(name, Path(folder) / name)
            for kind in KINDS:
                plans = [plan_many(student, kind, devices) for devices in DEVICES]
                for strategy in STRATEGIES:
                    pairs = zip(plans, DEVICES, strict=True)
                    speeds = [find_speed(plan, strategy, devices) for plan, devices in pairs]
                    if any(speeds):
                        cells = [f"{each:,.0f}" if each else "-" for each in speeds]
                        yield f"| {name} | {kind} | {strategy} | {' | '.join(cells)} |"


def save_outline(name: str, folder: Path) -> Path:
    """Save a model without its weights: its sizes and a tokenizer as large."""
    make_config(REAL, name).save_pretrained(folder)
    load_tokenizer(AUSTEN / "teacher").save_pretrained(folder)
    widen_vocabulary(folder / "tokenizer.json", REAL.vocabulary)
    return folder


def find_speed(plan: TrainingPlan, strategy: str, devices: int) -> float:
    """The tokens a second of each of the devices; 0 where the strategy does not fit."""
    for found in plan.strategies:
        if (found.strategy, found.ranks) == (strategy, devices):
            return SEQUENCES * LENGTH / found.step_seconds
    return 0.0
