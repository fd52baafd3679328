"""Run one job with a teacher of real size, and print what it took beside what was forecast.

    python bench/gpu/reference_run.py [--small] [--steps N] [--home FOLDER] [--out FILE]

The teacher is a random Llama of the size of Llama 3.2 1B, with the example's tokenizer and its
vocabulary filled up to 128,256 tokens; the student is a fresh one of eight layers; the text is four
of Jane Austen's novels, and a fifth is held out. On a CPU, or with ``--small``, both models and the
text are small. Nothing is downloaded.

    told       what ``kd estimate`` forecasts on this device, before the job
    measured   the job itself: tokens/s of the whole phase, and the peak of the device's memory (on
               a CPU that of the process)
    of peak    the share of the maker's rate in bfloat16 that the training reached, where that rate
               is known

Where the device has products in float8 and torchao is installed, a second student is trained on the
same cache with ``train.fp8``.

The loss of a random teacher says nothing about language. That the student comes near it says that
the job works at this size.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.gpu.stage_work import REAL, SMALL, Sizes, make_config
from bench.speed import name_machine
from bench.support.paths import AUSTEN, HELD_OUT
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.forecast.rehearsal import estimate_job
from kd.memory.step_memory import read_peak_memory, reset_peak_memory
from kd.models.loading import hide_progress_bars
from kd.models.precision import pick_device
from kd.models.products.float8 import has_float8
from kd.models.tokenizers import load_tokenizer
from kd.pipeline import run_stage
from kd.progress import Event, Monitor

GIB = 2**30
#: The forecast bytes and seconds of a phase; None if it was not forecast.
Told = tuple[int, float] | None
#: Of a random model the final norm is so large that its distributions have the entropy of text.
LOGIT_SCALE = 4.0
COLUMNS = (
    "phase", "tokens", "told, s", "measured, s", "tokens/s", "told, GiB", "measured, GiB",
    "of peak",
)  # fmt: skip


@dataclass(frozen=True)
class RunSizes:
    """The models and the text of a run.

    ``sequences`` are the most of the text for training, ``held_out`` of that for evaluation;
    ``batch`` are the sequences of a step.
    """

    models: Sizes
    student: dict[str, int]
    sequences: int | None
    held_out: int
    batch: int
    steps: int


LARGE_RUN = RunSizes(REAL, {"layers": 8, "hidden_size": 1024}, None, 64, 16, 150)
SMALL_RUN = RunSizes(SMALL, {"layers": 2, "hidden_size": 128}, 64, 8, 8, 10)


@dataclass
class Phases:
    """Listens to a run: the seconds between the beginnings of its phases, and its other events."""

    began: list[tuple[str, float]] = field(default_factory=list)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def listen(self, event: Event) -> None:
        """Keep the time at which a phase begins, and the newest event of each other type."""
        if event.type == "stage" and "phase" in event.data:
            self.began.append((event.data["phase"], time.monotonic()))
        else:
            self.facts[event.type] = event.data

    def measure(self, phase: str) -> float:
        """The seconds from the first beginning of ``phase`` until the next phase."""
        names = [name for name, _ in self.began]
        place = names.index(phase)
        return self.began[place + 1][1] - self.began[place][1]


def save_teacher(sizes: Sizes, folder: Path) -> Path:
    """Save a random teacher with the example's tokenizer, whose vocabulary is made as large."""
    name = next(iter(sizes.teachers))
    torch.manual_seed(0)
    device = pick_device()
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(make_config(sizes, name), dtype=torch.bfloat16)
        model.model.norm.weight.data.fill_(LOGIT_SCALE)
    model.save_pretrained(folder)
    load_tokenizer(AUSTEN / "teacher").save_pretrained(folder)
    widen_vocabulary(folder / "tokenizer.json", sizes.vocabulary)
    return folder


def widen_vocabulary(file: Path, vocabulary: int) -> None:
    """Give the tokenizer of ``file`` tokens that no text has, until it knows ``vocabulary``."""
    content = json.loads(file.read_text(encoding="utf-8"))
    known = content["model"]["vocab"]
    used = set(known.values()) | {token["id"] for token in content["added_tokens"]}
    known |= {f"unused {number}": number for number in range(vocabulary) if number not in used}
    file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def make_job(teacher: Path, sizes: RunSizes, steps: int) -> JobConfig:
    """Make the job, which captures and trains."""
    names = ("prideprejudice", "sensesensibility", "emma", "mansfieldpark")
    return parse_config({
        "name": "reference",
        "teacher": {"model": str(teacher)},
        "student": {"init": sizes.student},
        "data": {
            "train": [str(AUSTEN / "text" / f"{name}.txt") for name in names],
            "validation": str(HELD_OUT),
            "sequence_length": sizes.models.document,
            "max_train_samples": sizes.sequences,
            "max_eval_samples": sizes.held_out,
        },
        "train": {
            "max_steps": steps, "batch_size": sizes.batch, "learning_rate": 1e-3,
            "warmup_steps": max(1, steps // 10), "eval_steps": steps,
        },
    })  # fmt: skip


def run_job(job: JobConfig, home: Path) -> list[str]:
    """Forecast and run the job; returns the lines of its table, and those about its report."""
    device = pick_device()
    phases = Phases()
    forecast = estimate_job(job, home / "forecast")
    captured, trained = forecast.capture, forecast.training
    assert captured is not None and captured.seconds is not None, "the job captures"
    assert trained is not None, "the job trains"
    say("the job is forecast")

    reset_peak_memory(device)
    run_stage("precompute", job, home, home / "run", Monitor(phases.listen))
    tokens = phases.facts["cache"]["tokens"]
    rows = [
        make_row(
            "capture",
            tokens,
            phases.measure("capturing"),
            device,
            (forecast.capture_memory_bytes, captured.seconds),
        )
    ]
    say("the teacher is captured")

    report, row = train(job, home, "run", (trained.memory_bytes, trained.seconds))
    rows.append(row)
    lines = describe_report(report)
    if find_spec("torchao") is not None and has_float8(device):
        changed = parse_config(job.model_dump(mode="json") | {
            "train": job.require_train().model_dump(mode="json") | {"fp8": True},
        })  # fmt: skip
        report, row = train(changed, home, "run in float8", None)
        rows.append(["training, float8", *row[1:]])
        lines.append(f"- In float8 the perplexity is {report['student_perplexity']:,.0f} after it.")
    table = [f"| {' | '.join(row)} |" for row in [COLUMNS, *rows]]
    return [table[0], "|---|" + "--:|" * (len(COLUMNS) - 1), *table[1:], "", *lines]


def train(job: JobConfig, home: Path, run: str, told: Told) -> tuple[dict[str, Any], list[str]]:
    """Train the student; returns the report and the row of the table."""
    device = pick_device()
    phases = Phases()
    reset_peak_memory(device)
    report = run_stage("train", job, home, home / run, Monitor(phases.listen)).report
    say("a student is trained")
    profile = phases.facts["profile"]
    seconds = report["tokens"] / profile["tokens_per_second"]
    row = make_row("training", report["tokens"], seconds, device, told)
    return report, [*row[:-1], "-" if profile["mfu"] is None else f"{profile['mfu']:.0%}"]


def make_row(
    phase: str, tokens: int, seconds: float, device: torch.device, told: Told
) -> list[str]:
    """Make a row of the table; the peak of the memory is that since it was reset."""
    return [
        phase,
        f"{tokens:,}",
        "-" if told is None else f"{told[1]:.1f}",
        f"{seconds:.1f}",
        f"{tokens / seconds:,.0f}",
        "-" if told is None else f"{told[0] / GIB:.1f}",
        f"{read_peak_memory(device) / GIB:.1f}",
        "-",
    ]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def describe_report(report: dict[str, Any]) -> list[str]:
    """What the report says of the cache and of the student."""
    checks = ", ".join(check["check"] for check in report["checks"] if check["ok"])
    failed = [check["message"] for check in report["checks"] if not check["ok"]]
    cache = (
        f"- The cache: {report['cache_tokens']:,} tokens, {report['bytes_per_token']:.1f} bytes a "
        f"token, {report['entries_per_token']:.1f} entries; the teacher's entropy is "
        f"{report['teacher_entropy']:.2f} nats."
    )
    student = (
        f"- The student: {report['parameters']:,} parameters; perplexity "
        f"{report['student_perplexity_before']:,.0f} before and "
        f"{report['student_perplexity']:,.0f} after {report['steps']} steps; forward KL from the "
        f"teacher {report['validation_kl']:.3f} nats."
    )
    return [cache, student, f"- Checks passed: {checks}. Failed: {'; '.join(failed) or 'none'}."]


@contextmanager
def keep_or_make(home: Path | None) -> Iterator[Path]:
    """The folder for the job's files: the given one, or one that is deleted at the end."""
    if home is not None:
        home.mkdir(parents=True, exist_ok=True)
        yield home
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="small models, on a GPU too")
    parser.add_argument("--steps", type=int, help="steps of the training")
    parser.add_argument("--home", type=Path, help="keep the job's files in this folder")
    parser.add_argument("--out", type=Path, help="also write the page to this file")
    arguments = parser.parse_args()
    hide_progress_bars()
    device = pick_device()
    sizes = SMALL_RUN if arguments.small or device.type == "cpu" else LARGE_RUN
    with keep_or_make(arguments.home) as home:
        teacher = save_teacher(sizes.models, home / "teacher")
        say("the teacher is saved")
        job = make_job(teacher, sizes, arguments.steps or sizes.steps)
        lines = run_job(job, home)
    teacher_name = next(iter(sizes.models.teachers))
    models = (
        f"Teacher of {teacher_name}, V = {sizes.models.vocabulary:,}; sequences of "
        f"{sizes.models.document:,} tokens; student {json.dumps(sizes.student)}."
    )
    text = (
        "\n".join([f"Machine: {name_machine()}, torch {torch.__version__}.", models, "", *lines])
        + "\n"
    )
    sys.stdout.write(text)
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
