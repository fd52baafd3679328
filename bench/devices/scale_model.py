"""Print the cost of a step that is expected on 8 to 1,024 GPUs, from bytes and link rates.

    python bench/devices/scale_model.py [--model NAME ...] [--kind NAME ...] [--out FILE]

Nothing is run. The arithmetic is that of ``kd plan`` (``kd/memory/parallel.py``); the page
docs/scale.md has what this prints. Every device does the same work at each number of devices.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kd.config.student import StudentConfig, StudentInit
from kd.config.train import TrainConfig
from kd.memory.devices import DEVICE_KINDS, HOST_DEVICES
from kd.memory.model_memory import read_student_shapes
from kd.memory.parallel import (
    ParallelStrategy,
    Split,
    StepTime,
    add_replicas,
    count_all_reduce_bytes,
    count_traffic,
    estimate_rank,
    estimate_step_time,
)
from kd.memory.step_bytes import StepShape
from kd.memory.training_phase import Place, TrainingPhase
from kd.planning.shapes import describe_tensors

#: Kinds of the page: with NVLink and InfiniBand, and without.
KINDS = ("h100", "l40s")
DEVICES = (8, 64, 256, 1024)
STRATEGIES: tuple[ParallelStrategy, ...] = ("ddp", "fsdp", "pipeline")
VOCABULARY = 128_256
#: Tokens of a sequence, and forward passes of a device in a step, one sequence each.
LENGTH = 4096
PASSES = 4
#: Students in the sizes of Llama 3.2 1B and Llama 3.1 8B.
MODELS = {
    "1B": StudentInit(
        layers=16, hidden_size=2048, intermediate_size=8192, num_attention_heads=32,
        num_key_value_heads=8,
    ),
    "8B": StudentInit(
        layers=32, hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
        num_key_value_heads=8, tie_word_embeddings=False,
    ),
}  # fmt: skip
COLUMNS = (
    "student", "device", "devices", "strategy", "a rank needs GB", "fits", "work s",
    "sends GB", "links s", "waits s", "idle s", "step s", "efficiency", "tokens/s",
)  # fmt: skip
GB = 1e9


@dataclass(frozen=True)
class Case:
    """A student on a number of devices of a kind."""

    model: str
    kind: str
    devices: int
    strategy: ParallelStrategy

    @property
    def ranks(self) -> int:
        """The ranks that work on the same sequences' gradients: a pipeline fills a host."""
        return HOST_DEVICES if self.strategy == "pipeline" else self.devices

    @property
    def split(self) -> Split:
        """How a step is split over these ranks."""
        return Split(self.strategy, self.ranks)

    @property
    def replicas(self) -> int:
        """Copies of the ranks."""
        return self.devices // self.ranks


def describe_step(case: Case) -> tuple[TrainingPhase, StepShape, Place]:
    """Describe what one rank does in a step."""
    place = Place.named(DEVICE_KINDS[case.kind])
    shapes = read_student_shapes(StudentConfig(init=MODELS[case.model]), Path(), lambda: VOCABULARY)
    heads = {"num_attention_heads": MODELS[case.model].attention_heads}
    student = describe_tensors(shapes, heads)
    training = TrainingPhase(
        student=student.shape,
        options=TrainConfig(
            max_steps=1,
            batch_size=1,
            gradient_accumulation_steps=PASSES * case.ranks,
            gradient_checkpointing="full",
        ),
        vocabulary=VOCABULARY,
        length=LENGTH,
        targets=LENGTH - 1,
        steps=1,
        evaluations=0,
        held_out=0,
        loader=0,
        saved=student.saved,
        model=student.work,
        suits_kernels=True,
    )
    own = training.take_rank(case.split)
    return own, own.describe_step(place, case.split), place


def compute_time(case: Case) -> tuple[StepTime, float]:
    """The time of a step, and the bytes that a rank sends in it."""
    own, step, place = describe_step(case)
    work = own.compute_work_seconds(place, case.split)
    passes = own.options.gradient_accumulation_steps
    sent = count_traffic(step, case.split)
    time = estimate_step_time(work, sent, case.split, passes, place.rates)
    if case.strategy != "pipeline":
        return time, sent
    gradients = step.student.sum_blocks(lambda each: each.count_gradient_bytes(step.options))
    reduced = count_all_reduce_bytes(gradients / case.ranks, case.replicas)
    replicated = add_replicas(time, gradients, case.ranks, case.replicas, passes, place.rates)
    return replicated, sent + reduced


def list_rows(models: list[str], kinds: list[str]) -> Iterator[list[str]]:
    """The rows of the table."""
    for model in models:
        for kind in kinds:
            for devices in DEVICES:
                for strategy in STRATEGIES:
                    yield format_row(Case(model, kind, devices, strategy))


def format_row(case: Case) -> list[str]:
    """Format the cost of one case; no time is told of what does not fit."""
    _, step, place = describe_step(case)
    needed = estimate_rank(step, case.split).total + place.process
    fits = needed <= place.rates.memory
    name = case.strategy if case.strategy != "pipeline" else f"pipeline {case.ranks}"
    start = [case.model, case.kind, f"{case.devices:,}", name, f"{needed / GB:.1f}"]
    if not fits:
        return [*start, "no", *["-"] * (len(COLUMNS) - len(start) - 1)]
    time, sent = compute_time(case)
    tokens = PASSES * case.devices * LENGTH
    return [
        *start,
        "yes",
        f"{time.work:.2f}",
        f"{sent / GB:.1f}",
        f"{time.communication:.2f}",
        f"{time.waiting:.2f}",
        f"{time.idle:.2f}",
        f"{time.total:.2f}",
        f"{time.efficiency:.0%}",
        f"{tokens / time.total:,.0f}",
    ]


def render_table(models: list[str], kinds: list[str]) -> str:
    """Render the table of these students on these kinds of devices."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---|---|--:|---|" + "--:|" * (len(COLUMNS) - 4)]
    lines += [f"| {' | '.join(row)} |" for row in list_rows(models, kinds)]
    return "\n".join(lines) + "\n"


def render_links() -> str:
    """Render the rates of the links of all kinds of devices, in GB/s and one direction."""
    lines = [
        "| device | to a device of the host | from a host to others | by |",
        "|---|--:|--:|---|",
    ]
    for kind in DEVICE_KINDS.values():
        by = "data sheets" if kind.peer is not None else "assumptions: PCIe 4.0, 100 Gb/s"
        lines.append(
            f"| {kind.name} | {kind.neighbour / GB:.4g} | {kind.network / GB:.4g} | {by} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--kind", nargs="+", default=list(KINDS), choices=list(DEVICE_KINDS))
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    text = f"{render_links()}\n{render_table(arguments.model, arguments.kind)}"
    sys.stdout.write(text)
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
