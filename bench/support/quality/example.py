"""The example: students of the example's teacher at V = 2,048, in three groups.

The text is its five training novels, and *Persuasion* is held out.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from bench.support.paths import AUSTEN
from bench.support.quality.capture import capture_together
from bench.support.quality.methods import (
    Alter,
    AlteredCache,
    count_entries,
    make_dense_draws,
    make_renormalisation,
)
from cache.store import open_cache
from kd.capture.plan import make_capture_plan
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.models.loading import build_student, load_model
from kd.models.teacher_files import TeacherFiles
from kd.models.tokenizers import load_tokenizer
from kd.progress import SILENT
from kd.text.batches import Source
from kd.text.corpus import Corpus, load_corpus
from kd.training.loop import train

#: Training sequences, unless others are asked for.
SEQUENCES = 3200


@dataclass(frozen=True)
class Supervision:
    """A student learns from these sections of a job, and from records that ``alter`` may change."""

    name: str
    cache: dict[str, Any]
    loss: dict[str, Any]
    alter: Alter | None = None


DENSE = {"profile": "dense"}
TOP = {"profile": "topk", "k": 50}
T1: dict[str, Any] = {"alpha": 0.0}
T2: dict[str, Any] = {"alpha": 0.0, "temperature": 2.0}


@dataclass(frozen=True)
class StudentGroup:
    """Students of one size (layers, width) and their training; ``batch`` is in sequences.

    ``trained``: they begin with the weights of the first group's students of cross-entropy only.
    """

    told: list[Supervision]
    student: tuple[int, int]
    steps: int
    batch: int
    learning_rate: float
    trained: bool = False


#: Students at T = 1.
AT_ONE = StudentGroup(
    [
        Supervision("cross-entropy only", DENSE, {"alpha": 1.0}),
        Supervision("dense", DENSE, T1),
        Supervision("threshold 0.04", {"threshold": 0.04}, T1),
        Supervision("threshold 0.02", {"threshold": 0.02}, T1),
        Supervision("threshold 0.01", {"threshold": 0.01}, T1),
        Supervision("top-12", TOP, T1, make_renormalisation(12)),
        Supervision("top-50", TOP, T1, make_renormalisation(50)),
        Supervision("top-50 and a ghost", TOP, T1),
        Supervision("28 draws with replacement", DENSE, T1, make_dense_draws(28)),
    ],
    student=(2, 128),
    steps=400,
    batch=8,
    learning_rate=3e-3,
)
#: Students at T = 2. Most of the mass there is tail, so a sample has much noise, which slows a
#: student that still has far to go. So these small students are trained until they hold what they
#: can.
AT_TWO = StudentGroup(
    [
        Supervision("dense, T = 2", DENSE, T2),
        *(
            Supervision(
                f"tempered {threshold}, T = 2",
                {"profile": "tempered", "threshold": threshold, "draws": 4},
                T2,
            )
            for threshold in (0.0155, 0.001)
        ),
    ],
    student=(1, 32),
    steps=800,
    batch=16,
    learning_rate=6e-3,
)
#: Students at T = 2 that begin with trained weights, as most students do.
AT_TWO_TRAINED = StudentGroup(
    [replace(told, name=f"{told.name}, trained before") for told in AT_TWO.told],
    student=AT_ONE.student,
    steps=400,
    batch=16,
    learning_rate=1e-3,
    trained=True,
)


def make_job(
    told: Supervision, group: StudentGroup, arguments: argparse.Namespace, seed: int
) -> JobConfig:
    """Make the job of one student."""
    text = sorted(path for path in (AUSTEN / "text").glob("*.txt") if path.stem != "persuasion")
    layers, width = group.student
    steps = arguments.steps or group.steps
    return parse_config(
        {
            "kind": "distill",
            "teacher": {"model": str(AUSTEN / "teacher"), "batch_size": 16},
            "student": {"init": {"layers": layers, "hidden_size": width}},
            "data": {
                "train": [str(path) for path in text],
                "validation": str(AUSTEN / "text" / "persuasion.txt"),
                "sequence_length": arguments.length,
                "max_train_samples": arguments.sequences,
                "max_eval_samples": 38_400 // arguments.length,
            },
            "cache": told.cache,
            "loss": told.loss,
            "train": {
                "max_steps": steps,
                "batch_size": group.batch,
                "learning_rate": group.learning_rate,
                "warmup_steps": 40,
                "eval_steps": steps,
                "save_steps": steps,
                "seed": seed,
            },
        }
    )


def measure_held_out(
    told: Supervision, group: StudentGroup, arguments: argparse.Namespace, seed: int, work: Path
) -> tuple[float, float, float]:
    """Measure a student's held-out cross-entropy in nats, and the entries and bytes per token.

    The result is kept in ``work``, so that a stopped run can continue.
    """
    size = f"{arguments.steps or group.steps} x {group.batch} x {arguments.length}"
    kept = work / f"{told.name}, {size}, seed {seed}.json"
    if kept.is_file() and (told.loss["alpha"] < 1.0 or _locate_trained_before(seed, work).is_dir()):
        return tuple(json.loads(kept.read_text()))
    job = make_job(told, group, arguments, seed)
    wanted = make_capture_plan(job, *_load_text(arguments))
    store = open_cache(work / "caches" / wanted.identity.fingerprint)
    source: Source = store if told.alter is None else AlteredCache(store, told.alter, told.name)
    student = make_student(group, job, arguments, seed, work)
    with tempfile.TemporaryDirectory(dir=work) as run_dir:
        progress = train(
            job, source, student, wanted.identity.tokenizer.vocabulary_size, Path(run_dir), SILENT
        )
    assert progress.last_evaluation is not None
    found = (
        float(progress.last_evaluation["validation_loss"]),
        count_entries(source),
        store.bytes_per_token,
    )
    if told.loss["alpha"] == 1.0:
        student.save_pretrained(_locate_trained_before(seed, work))
    kept.write_text(json.dumps(found))
    return found


def make_student(
    group: StudentGroup, job: JobConfig, arguments: argparse.Namespace, seed: int, work: Path
) -> PreTrainedModel:
    """Make the student that every row of a seed begins with."""
    torch.manual_seed(seed)
    if not group.trained:
        return build_student(job.student, _load_text(arguments)[1], arguments.length)
    folder = _locate_trained_before(seed, work)
    if not folder.is_dir():
        plain = AT_ONE.told[0]
        capture_all(replace(AT_ONE, told=[plain]), arguments, work)
        measure_held_out(plain, AT_ONE, arguments, seed, work)
    return load_model(folder, torch.float32)


def _locate_trained_before(seed: int, work: Path) -> Path:
    return work / f"student of cross-entropy only, seed {seed}"


def capture_all(group: StudentGroup, arguments: argparse.Namespace, work: Path) -> None:
    """Capture the caches of a group in one pass of the teacher."""
    plans = [
        make_capture_plan(make_job(told, group, arguments, 0), *_load_text(arguments))
        for told in group.told
    ]
    capture_together(plans, work / "caches")


_TEXT: list[tuple[TeacherFiles, Any, Corpus]] = []


def _load_text(arguments: argparse.Namespace) -> tuple[TeacherFiles, Any, Corpus]:
    """Find the teacher, and load tokenizer and packed text, once for all students."""
    if not _TEXT:
        job = make_job(AT_ONE.told[0], AT_ONE, arguments, 0)
        assert job.teacher is not None
        teacher = TeacherFiles(job.teacher, AUSTEN / "teacher")
        tokenizer = load_tokenizer(teacher.folder)
        _TEXT.append((teacher, tokenizer, load_corpus(job.data, tokenizer)))
    return _TEXT[0]


def render_table(rows: list[tuple[Supervision, list[float], float, float]]) -> str:
    """Render the rows as markdown; shares need rows of cross-entropy only and of dense."""
    found = {told.name: losses for told, losses, _, _ in rows}
    plain = found.get("cross-entropy only")
    dense = found.get("dense")
    lines = [
        "| told | entries | bytes/token | held-out CE, mean (each seed) | share of the gap |",
        "|---|--:|--:|---|--:|",
    ]
    for told, losses, entries, size in rows:
        each = ", ".join(f"{loss:.4f}" for loss in losses)
        share = "-"
        if plain and dense:
            triples = zip(plain, losses, dense, strict=True)
            share = f"{statistics.fmean((c - x) / (c - d) for c, x, d in triples):.1%}"
        own = told.alter is None and told.loss.get("alpha") != 1.0
        lines.append(
            f"| {told.name} | {entries:,.1f} | {f'{size:,.1f}' if own else '-'} "
            f"| {statistics.fmean(losses):.4f} ({each}) | {share} |"
        )
    return "\n".join(lines)


def run_example(arguments: argparse.Namespace, work: Path) -> str:
    """Train the students of all groups, and render their tables."""
    arguments.sequences = arguments.sequences or SEQUENCES
    pages = [run_group(group, arguments, work) for group in (AT_ONE, AT_TWO, AT_TWO_TRAINED)]
    head = (
        f"{arguments.seeds} seeds, {arguments.sequences} training sequences of "
        f"{arguments.length} tokens, {platform.system()} {platform.machine()}, "
        f"torch {torch.__version__}."
    )
    return "\n\n".join([head, *(page for page in pages if page)])


def run_group(group: StudentGroup, arguments: argparse.Namespace, work: Path) -> str:
    """Train the students of a group, one seed after the other, and render their table."""
    ends = ("cross-entropy only", "dense", "dense, T = 2", "dense, T = 2, trained before")
    chosen = [told for told in group.told if arguments.only in told.name or told.name in ends]
    if len(chosen) <= len([told for told in chosen if told.name in ends]) and arguments.only:
        return ""
    capture_all(replace(group, told=chosen), arguments, work)
    rows = []
    for told in chosen:
        found = [
            measure_held_out(told, group, arguments, seed, work) for seed in range(arguments.seeds)
        ]
        rows.append((told, [loss for loss, _, _ in found], *found[0][1:]))
        print(
            f"{told.name}: {', '.join(f'{loss:.4f}' for loss, _, _ in found)}",
            file=sys.stderr,
            flush=True,
        )
    layers, width = group.student
    steps = arguments.steps or group.steps
    before = ", trained before on cross-entropy only" * group.trained
    about = (
        f"Students of {layers} layer{'s' * (layers > 1)} of {width}{before}, {steps} steps of "
        f"{group.batch * arguments.length:,} tokens, learning rate {group.learning_rate:g}."
    )
    return f"{about}\n\n{render_table(rows)}"
