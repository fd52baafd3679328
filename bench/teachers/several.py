"""One student of two teachers: by sources or as a mixture, by tokens or by domains.

    python bench/teachers/several.py [--seeds 3] [--work FOLDER] [--out FILE] [--quick]

The domains are novels of Jane Austen and the documentation of this project. The teacher of the
novels is the example's, that of the documentation the same one, trained on it further. There are
three times as many tokens of novels. Each seed trains four students with equal steps:

    by sources, tokens     each text by its own teacher; every token counts alike
    by sources, domains    the same; both domains count alike (loss.balance)
    mixture                all text by the mean of both teachers
    one teacher            all text by the teacher of the novels

Measured is KL(the domain's own teacher || student) on held-out text of each domain, from whole
distributions. A stopped run continues in the same --work. --quick takes a few steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.speed import read_cpu_name
from bench.support.paths import AUSTEN, ROOT
from bench.temperature import run_or_load
from bench.text.context import compute_mean_kl
from kd.capture.plan import plan_capture
from kd.config.jobfile import parse_config
from kd.config.routing.parts import list_members

DOMAINS = ("novels", "docs")
EVALUATION = {"continuations": 0, "samples": 0}


@dataclass(frozen=True)
class Sizes:
    """Bytes of text of each domain, steps of teacher and student, and the tokens of a step."""

    novels: int
    docs: int
    teacher_steps: int
    steps: int
    batch: int
    length: int


FULL = Sizes(300_000, 100_000, 250, 500, 8, 128)
QUICK = Sizes(24_000, 12_000, 2, 3, 4, 64)


def write_texts(sizes: Sizes, work: Path) -> dict[str, Path]:
    """Write the beginning of each domain's text to a file."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    contents = {
        "novels": (AUSTEN / "text" / "emma.txt").read_text(encoding="utf-8")[: sizes.novels],
        "docs": "\n\n".join(page.read_text(encoding="utf-8") for page in pages)[: sizes.docs],
    }
    found = {}
    for name, content in contents.items():
        path = found[name] = work / f"{name}.txt"
        # The store of its tokens is found again by the time of the file, too.
        if not path.is_file() or path.read_text(encoding="utf-8") != content:
            path.write_text(content, encoding="utf-8")
    return found


def train_teacher(sizes: Sizes, texts: dict[str, Path], work: Path) -> dict[str, Path]:
    """Train the example's teacher on the documentation further; return both teachers."""
    job = {
        "kind": "train",
        "name": "docs-teacher",
        "student": {"model": str(AUSTEN / "teacher")},
        "data": {"train": str(texts["docs"]), "sequence_length": sizes.length},
        "loss": {"alpha": 1.0},
        "train": {
            "max_steps": sizes.teacher_steps, "batch_size": sizes.batch, "learning_rate": 1e-3,
            "warmup_steps": sizes.teacher_steps // 10, "eval_steps": sizes.teacher_steps,
            "save_steps": 25,
        },
        "evaluation": EVALUATION,
    }  # fmt: skip
    run = work / "runs" / "docs teacher"
    run_or_load(job, run, work)
    return {"novels": AUSTEN / "teacher", "docs": run / "student"}


def make_jobs(
    sizes: Sizes, texts: dict[str, Path], teachers: dict[str, Path], seed: int
) -> dict[str, dict[str, Any]]:
    """Return the jobs of the four students of a seed."""
    own = [{"path": str(texts[name]), "teacher": name} for name in DOMAINS]
    mixed = [{"path": str(texts[name]), "mixture": dict.fromkeys(DOMAINS, 0.5)} for name in DOMAINS]
    both = {"teachers": {name: {"model": str(teachers[name])} for name in DOMAINS}}
    alone = {"teacher": {"model": str(teachers["novels"])}}
    kinds: dict[str, tuple[dict[str, Any], list[Any], dict[str, Any]]] = {
        "by sources, tokens": (both, own, {}),
        "by sources, domains": (both, own, {"balance": "domains"}),
        "mixture": (both, mixed, {}),
        "one teacher": (alone, [str(texts[name]) for name in DOMAINS], {}),
    }
    return {
        name: {
            "name": "several",
            **whose,
            "student": {
                "init": {"layers": 2, "hidden_size": 128, "tokenizer": str(AUSTEN / "teacher")}
            },
            "data": {"train": sources, "sequence_length": sizes.length, "validation_fraction": 0.1},
            "cache": {"seed": seed, "threshold": 0.04, "shard_sequences": 64},
            "loss": {"alpha": 0.0, **loss},
            "train": {
                "max_steps": sizes.steps, "batch_size": sizes.batch, "learning_rate": 3e-3,
                "warmup_steps": sizes.steps // 10, "eval_steps": sizes.steps, "save_steps": 50,
                "seed": seed,
            },
            "evaluation": EVALUATION,
        }
        for name, (whose, sources, loss) in kinds.items()
    }  # fmt: skip


def measure(job: dict[str, Any], student: Path, work: Path) -> dict[str, float]:
    """Measure KL(own teacher || student) on the held-out text of each domain, in nats."""
    found = {}
    for member in list_members(parse_config(job)):
        plan = plan_capture(member.job, texts=work / "texts")
        held_out = plan.corpus.validation
        parts = [held_out.select(slice(row, row + 4)) for row in range(0, len(held_out), 4)]
        theirs = (plan.teacher.folder, parts)
        found[member.name] = compute_mean_kl(theirs, (student, parts), plan)
    return found


def measure_seed(jobs: dict[str, dict[str, Any]], seed: int, work: Path) -> dict[str, Any]:
    """Return the held-out KL by domain of each student of a seed; a stopped run goes on."""
    kept = work / f"seed {seed}.json"
    if kept.is_file():
        known: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
        return known
    found = {}
    for name, job in jobs.items():
        run = work / "runs" / f"{name}, seed {seed}"
        run_or_load(job, run, work)
        found[name] = measure(jobs["by sources, tokens"], run / "student", work)
        print(f"seed {seed}, {name}: {found[name]}", file=sys.stderr, flush=True)
    kept.write_text(json.dumps(found), encoding="utf-8")
    return found


def render(found: list[dict[str, Any]]) -> str:
    """Return the table: the mean over the seeds, and the least and the greatest."""
    lines = [
        f"Machine: {read_cpu_name()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "",
        f"| student, {len(found)} seeds | KL on {' | KL on '.join(DOMAINS)} | mean |",
        "|---|--:|--:|--:|",
    ]
    for student in found[0]:
        cells = []
        for names in (*((name,) for name in DOMAINS), DOMAINS):
            values = [statistics.fmean(each[student][name] for name in names) for each in found]
            cells.append(f"{statistics.fmean(values):.4f} ({min(values):.4f} to {max(values):.4f})")
        lines.append(f"| {student} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure all seeds, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--work", type=Path, help="folder in which a stopped run continues")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="a few steps")
    arguments = parser.parse_args()
    sizes = QUICK if arguments.quick else FULL
    work = arguments.work or Path(tempfile.mkdtemp(prefix="potstill-several-"))
    work.mkdir(parents=True, exist_ok=True)
    texts = write_texts(sizes, work)
    teachers = train_teacher(sizes, texts, work)
    found = [
        measure_seed(make_jobs(sizes, texts, teachers, seed), seed, work)
        for seed in range(arguments.seeds)
    ]
    text = render(found)
    print(text, end="")
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
