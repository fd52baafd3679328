"""Whether a learned temperature ends where the best fixed one is: students of the example's teacher, from one cache.

    python bench/temperature.py [--seeds 3] [--start-steps 400] [--steps 400] [--init 1.0] [--work FOLDER] [--out FILE]

Every student of a seed begins with the same weights and sees the same tokens in the same order; only the temperature
differs. They begin where a student that was trained on cross-entropy alone came to: from fresh weights a change of T in
its last digit moves the end by hundredths of a nat, which is more than what is asked here. The cache is of profile
hidden, which is exact at any T; alpha is 0, so nothing but the teacher teaches.
*Persuasion* is held out. A mode is fit to be recommended if it ends within 0.002 nats of the best fixed temperature and
T is at a bound (within 2 % of the range of log T) in at most 2 % of its steps. Mode entropy is given the teacher's own
mean entropy as its target. A run that was stopped goes on in the same --work.
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

from kd.jobfile import parse_config
from kd.levers.temperature import NEAR
from kd.metrics import read_metrics
from kd.pipeline import distill

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "austen"
FIXED = (0.5, 0.7, 1.0, 1.4, 2.0)
MODES = ("adversarial", "entropy", "lookahead", "teacher_only")
NATS, AT_BOUND = 0.002, 0.02


@dataclass(frozen=True)
class Student:
    """What one student came to: held-out cross-entropy in nats, T at the end, share of the steps at a bound."""

    loss: float
    temperature: float
    at_bound: float
    teacher_entropy: float


def make_job(loss: dict[str, Any], student: dict[str, Any], arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    """The job of one student."""
    text = sorted(path for path in (EXAMPLE / "text").glob("*.txt") if path.stem != "persuasion")
    fresh = "init" in student
    steps = arguments.start_steps if fresh else arguments.steps
    return {
        "name": "temperature",
        "teacher": {"model": str(EXAMPLE / "teacher"), "batch_size": 16},
        "student": student,
        "data": {
            "train": [str(path) for path in text],
            "validation": str(EXAMPLE / "text" / "persuasion.txt"),
            "sequence_length": arguments.length,
            "max_train_samples": arguments.sequences,
            "max_eval_samples": arguments.held_out,
        },
        "cache": {"profile": "hidden"},
        "evaluation": {"plots": False},
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


def start_of(arguments: argparse.Namespace, seed: int, work: Path) -> Path:
    """The folder of the student that all the others of ``seed`` begin as."""
    run_dir = work / "runs" / f"start, seed {seed}"
    job = make_job({"alpha": 1.0}, {"init": {"layers": 2, "hidden_size": arguments.width}}, arguments, seed)
    finished(job, run_dir, work)
    return run_dir / "student"


def finished(job: dict[str, Any], run_dir: Path, work: Path) -> dict[str, Any]:
    """The report of ``job``, which is run if it has not been."""
    kept = run_dir / "finished.json"
    if kept.is_file() and (found := json.loads(kept.read_text(encoding="utf-8")))["job"] == job:
        return found["report"]
    report = distill(parse_config(job), work, run_dir)["report"]
    kept.write_text(json.dumps({"job": job, "report": report}), encoding="utf-8")
    return report


def train_one(name: str, temperature: Any, arguments: argparse.Namespace, seed: int, work: Path) -> Student:
    """One student, or what it came to in an earlier run of this script."""
    run_dir = work / "runs" / f"{name}, seed {seed}"
    student = {"model": str(start_of(arguments, seed, work))}
    report = finished(make_job({"alpha": 0.0, "temperature": temperature}, student, arguments, seed), run_dir, work)
    lines = read_metrics(run_dir / "metrics.jsonl")
    steps = [line for line in lines if line["type"] == "metrics"]
    found = Student(
        loss=next(line["validation_loss"] for line in reversed(lines) if line["type"] == "evaluation"),
        temperature=steps[-1]["temperature"],
        at_bound=statistics.fmean(is_at_bound(line) for line in steps),
        teacher_entropy=report["teacher_entropy"],
    )
    print(f"{name}, seed {seed}: {found.loss:.4f}, T {found.temperature:.3f}", file=sys.stderr, flush=True)
    return found


def is_at_bound(line: dict[str, Any]) -> bool:
    """Whether T was there in a step; a fixed one has no bounds."""
    margin = line["temperature_margin"]
    return margin is not None and margin < NEAR


def learned(mode: str, arguments: argparse.Namespace, teacher_entropy: float) -> dict[str, Any]:
    """The temperature section of a learned one."""
    target = {"target_entropy": round(teacher_entropy, 3)} if mode == "entropy" else {}
    return {"mode": mode, "init": arguments.init, **target}


def table(fixed: dict[str, list[Student]], modes: dict[str, list[Student]]) -> str:
    """All students as markdown; differences are to the fixed temperature that is the best in the mean."""
    best = min(fixed.values(), key=lambda students: statistics.fmean(student.loss for student in students))
    lines = [
        "| temperature | held-out CE, mean (each seed) | to best fixed, nats | steps at a bound | T at the end | fit |",
        "|---|---|--:|--:|---|---|",
    ]
    for name, students in [*fixed.items(), *modes.items()]:
        losses = [student.loss for student in students]
        behind = statistics.fmean(loss - other.loss for loss, other in zip(losses, best, strict=True))
        at_bound = max(student.at_bound for student in students)
        fit = "-" if name in fixed else "yes" if behind <= NATS and at_bound <= AT_BOUND else "no"
        each, ends = (
            ", ".join(f"{value:.{digits}f}" for value in values)
            for values, digits in ((losses, 4), ([student.temperature for student in students], 2))
        )
        lines.append(
            f"| {name} | {statistics.fmean(losses):.4f} ({each}) | {behind:+.4f} | {at_bound:.1%} | {ends} | {fit} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--start-steps", type=int, default=400, help="on cross-entropy alone")
    parser.add_argument("--start-learning-rate", type=float, default=3e-3)
    parser.add_argument("--steps", type=int, default=400, help="at each temperature")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--batch", type=int, default=8, help="sequences a step")
    parser.add_argument("--sequences", type=int, default=3200, help="training sequences; the students see each in turn")
    parser.add_argument("--held-out", type=int, default=150, help="held-out sequences")
    parser.add_argument("--length", type=int, default=256, help="tokens a sequence")
    parser.add_argument("--width", type=int, default=128, help="of the students, which have two layers")
    parser.add_argument("--init", type=float, default=1.0, help="where a learned temperature begins")
    parser.add_argument("--only", default="", help="of the learned ones, run those with this in their name")
    parser.add_argument("--work", type=Path, help="where to keep cache and students; a temporary folder without it")
    parser.add_argument("--out", type=Path, help="write the table to this file too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        page = run(arguments, arguments.work or Path(temporary))
    print(page)
    if arguments.out:
        arguments.out.write_text(page + "\n", encoding="utf-8")


def run(arguments: argparse.Namespace, work: Path) -> str:
    """Train all the students and make the page."""
    seeds = range(arguments.seeds)
    fixed = {f"{T:g}": [train_one(f"{T:g}", T, arguments, seed, work) for seed in seeds] for T in FIXED}
    entropy = fixed["1"][0].teacher_entropy
    modes = {
        mode: [
            train_one(f"{mode} from {arguments.init:g}", learned(mode, arguments, entropy), arguments, seed, work)
            for seed in seeds
        ]
        for mode in MODES
        if arguments.only in mode
    }
    about = (
        f"Students of 2 layers of {arguments.width}, {arguments.seeds} seeds, {arguments.start_steps} steps on "
        f"cross-entropy and {arguments.steps} at each temperature, of {arguments.batch * arguments.length:,} tokens, "
        f"at learning rates {arguments.start_learning_rate:g} and {arguments.learning_rate:g}; learned ones from T = "
        f"{arguments.init:g} (target entropy {entropy:.3f}), {platform.system()} {platform.machine()}, "
        f"torch {torch.__version__}."
    )
    return f"{about}\n\n{table(fixed, modes)}"


if __name__ == "__main__":
    main()
