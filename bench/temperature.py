"""Compare learned temperatures with the best fixed one, on students of the example's teacher.

    python bench/temperature.py [--seeds 3] [--start-steps 400] [--steps 400] [--init 1.0]
                                [--work FOLDER] [--out FILE]

All students of a seed begin with the same weights and see the same tokens in the same order; only
the temperature differs. They begin with the weights of a student trained on cross-entropy alone:
from fresh weights a change in the last digit of T moves the result by hundredths of a nat, which is
more than the differences to be measured. All students share one cache of profile hidden, which is
exact at any T; alpha is 0, so nothing but the teacher teaches. *Persuasion* is held out.

A mode is fit to be recommended if it ends within 0.002 nats of the best fixed temperature, and T is
at a bound (within 2 % of the range of log T) in at most 2 % of its steps. The target of mode
entropy is the teacher's own mean entropy. A stopped run continues in the same --work.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.support.paths import AUSTEN, HELD_OUT, NOVELS
from kd.config.jobfile import parse_config
from kd.loss.temperature import NEAR_BOUND
from kd.pipeline import run_stages
from kd.tracking.metrics import read_metrics

FIXED = (0.5, 0.7, 1.0, 1.4, 2.0)
MODES = ("adversarial", "entropy", "lookahead", "teacher_only")
#: A fit mode ends at most this far from the best fixed temperature, in nats.
NATS = 0.002
#: A fit mode is at a bound in at most this share of its steps.
AT_BOUND = 0.02


@dataclass(frozen=True)
class StudentResult:
    """The result of one student.

    Held-out cross-entropy in nats, T at the end, share of the steps at a bound, and the teacher's
    mean entropy in nats.
    """

    loss: float
    temperature: float
    at_bound: float
    teacher_entropy: float


def make_job(
    loss: dict[str, Any], student: dict[str, Any], arguments: argparse.Namespace, seed: int
) -> dict[str, Any]:
    """Make the job of one student."""
    fresh = "init" in student
    steps = arguments.start_steps if fresh else arguments.steps
    return {
        "name": "temperature",
        "teacher": {"model": str(AUSTEN / "teacher"), "batch_size": 16},
        "student": student,
        "data": {
            "train": [str(path) for path in NOVELS],
            "validation": str(HELD_OUT),
            "sequence_length": arguments.length,
            "max_train_samples": arguments.sequences,
            "max_eval_samples": arguments.held_out,
        },
        "cache": {"profile": "hidden"},
        "loss": loss,
        "train": {
            "max_steps": steps,
            "batch_size": arguments.batch,
            "learning_rate": arguments.start_learning_rate if fresh else arguments.learning_rate,
            "warmup_steps": steps // 10,
            "logging_steps": 1,
            "eval_steps": steps,
            "save_steps": steps,
            "seed": seed if fresh else 1000 + seed,
        },
    }


def train_start(arguments: argparse.Namespace, seed: int, work: Path) -> Path:
    """Train the student whose weights all others of ``seed`` begin with; returns its folder."""
    run_dir = work / "runs" / f"start, seed {seed}"
    job = make_job(
        {"alpha": 1.0}, {"init": {"layers": 2, "hidden_size": arguments.width}}, arguments, seed
    )
    run_or_load(job, run_dir, work)
    return run_dir / "student"


def run_or_load(job: dict[str, Any], run_dir: Path, work: Path) -> dict[str, Any]:
    """The report of ``job``, which is run unless an earlier run of this script did so."""
    kept = run_dir / "finished.json"
    if kept.is_file() and (found := json.loads(kept.read_text(encoding="utf-8")))["job"] == job:
        return found["report"]
    report = run_stages(parse_config(job), work, run_dir).report
    kept.write_text(json.dumps({"job": job, "report": report}), encoding="utf-8")
    return report


def train_one(
    name: str, temperature: Any, arguments: argparse.Namespace, seed: int, work: Path
) -> StudentResult:
    """Train one student, or load its result from an earlier run of this script."""
    run_dir = work / "runs" / f"{name}, seed {seed}"
    student = {"model": str(train_start(arguments, seed, work))}
    report = run_or_load(
        make_job({"alpha": 0.0, "temperature": temperature}, student, arguments, seed),
        run_dir,
        work,
    )
    lines = read_metrics(run_dir / "metrics.jsonl")
    steps = [line for line in lines if line["type"] == "metrics"]
    found = StudentResult(
        loss=next(
            line["validation_loss"] for line in reversed(lines) if line["type"] == "evaluation"
        ),
        temperature=steps[-1]["temperature"],
        at_bound=statistics.fmean(is_at_bound(line) for line in steps),
        teacher_entropy=report["teacher_entropy"],
    )
    print(
        f"{name}, seed {seed}: {found.loss:.4f}, T {found.temperature:.3f}",
        file=sys.stderr,
        flush=True,
    )
    return found


def is_at_bound(line: dict[str, Any]) -> bool:
    """Whether T was at a bound in a step; a fixed temperature has no bounds."""
    margin = line["temperature_margin"]
    return margin is not None and margin < NEAR_BOUND


def make_learned_section(
    mode: str, arguments: argparse.Namespace, teacher_entropy: float
) -> dict[str, Any]:
    """Make the section ``loss.temperature`` of a learned temperature."""
    target = {"target_entropy": round(teacher_entropy, 3)} if mode == "entropy" else {}
    return {"mode": mode, "init": arguments.init, **target}


def render_table(
    fixed: dict[str, list[StudentResult]], modes: dict[str, list[StudentResult]]
) -> str:
    """Render all students as markdown, beside the fixed temperature of the best mean."""
    best = min(
        fixed.values(), key=lambda students: statistics.fmean(student.loss for student in students)
    )
    columns = ["temperature", "held-out CE, mean (each seed)", "to best fixed, nats"]
    columns += ["steps at a bound", "T at the end", "fit"]
    lines = [f"| {' | '.join(columns)} |", "|---|---|--:|--:|---|---|"]
    for name, students in [*fixed.items(), *modes.items()]:
        losses = [student.loss for student in students]
        behind = statistics.fmean(
            loss - other.loss for loss, other in zip(losses, best, strict=True)
        )
        at_bound = max(student.at_bound for student in students)
        fit = "-" if name in fixed else "yes" if behind <= NATS and at_bound <= AT_BOUND else "no"
        each, ends = (
            ", ".join(f"{value:.{digits}f}" for value in values)
            for values, digits in ((losses, 4), ([student.temperature for student in students], 2))
        )
        loss = f"{statistics.fmean(losses):.4f} ({each})"
        lines.append(f"| {name} | {loss} | {behind:+.4f} | {at_bound:.1%} | {ends} | {fit} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--start-steps", type=int, default=400, help="on cross-entropy alone")
    parser.add_argument("--start-learning-rate", type=float, default=3e-3)
    parser.add_argument("--steps", type=int, default=400, help="at each temperature")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--batch", type=int, default=8, help="sequences a step")
    parser.add_argument(
        "--sequences",
        type=int,
        default=3200,
        help="training sequences; the students see each in turn",
    )
    parser.add_argument("--held-out", type=int, default=150, help="held-out sequences")
    parser.add_argument("--length", type=int, default=256, help="tokens a sequence")
    parser.add_argument(
        "--width", type=int, default=128, help="width of the students, which have two layers"
    )
    parser.add_argument(
        "--init", type=float, default=1.0, help="where a learned temperature begins"
    )
    parser.add_argument(
        "--only", default="", help="run only the learned modes with this in their name"
    )
    parser.add_argument(
        "--work", type=Path, help="where to keep cache and students; a temporary folder without it"
    )
    parser.add_argument("--out", type=Path, help="write the table to this file too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        page = run_all(arguments, arguments.work or Path(temporary))
    print(page)
    if arguments.out:
        arguments.out.write_text(page + "\n", encoding="utf-8")


def run_all(arguments: argparse.Namespace, work: Path) -> str:
    """Train all students and render the page."""
    seeds = range(arguments.seeds)
    fixed = {
        f"{T:g}": [train_one(f"{T:g}", T, arguments, seed, work) for seed in seeds] for T in FIXED
    }
    entropy = fixed["1"][0].teacher_entropy
    modes = {
        mode: [
            train_one(
                f"{mode} from {arguments.init:g}",
                make_learned_section(mode, arguments, entropy),
                arguments,
                seed,
                work,
            )
            for seed in seeds
        ]
        for mode in MODES
        if arguments.only in mode
    }
    about = (
        f"Students of 2 layers of {arguments.width}, {arguments.seeds} seeds, "
        f"{arguments.start_steps} steps on cross-entropy and {arguments.steps} at each "
        f"temperature, of {arguments.batch * arguments.length:,} tokens, at learning rates "
        f"{arguments.start_learning_rate:g} and {arguments.learning_rate:g}; learned ones from T = "
        f"{arguments.init:g} (target entropy {entropy:.3f}), "
        f"{platform.system()} {platform.machine()}, torch {torch.__version__}."
    )
    return f"{about}\n\n{render_table(fixed, modes)}"


if __name__ == "__main__":
    main()
