"""Measure how much of full distillation a cache keeps, on students of each kind of record.

    python bench/quality.py [--seeds 3] [--steps N] [--work FOLDER] [--out FILE]

All students of a seed begin with the same weights and see the same tokens in the same order; only
the records of the teacher differ. The teacher is the example's, the text its five training novels,
and *Persuasion* is held out. alpha is 0: nothing but the record teaches.

    share = (CE of cross-entropy only - CE) / (CE of cross-entropy only - CE of dense)

Other ways to keep few tokens go through the same loss and the same loop:

    top-k                     the k most probable tokens, renormalised, as in most top-k caches
    top-k and a ghost         the same tokens, and one bucket for the rest: profile topk
    draws with replacement    each token has its share of the draws as its weight (RS-KD, arXiv
                              2503.16870)
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from bench.support.paths import AUSTEN
from cache.codec import TOP_STEP, UNKNOWN, Codec
from cache.manifest import CacheIdentity, Provenance
from cache.records import Records, Sequences
from cache.store import open_cache
from cache.store import open_writer as open_for_capture
from kd.capture.plan import make_capture_plan
from kd.capture.teacher import find_sealed_cache, prepare_teacher, select_shard_sequences
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.models.loading import build_student, hide_progress_bars, load_model
from kd.models.tokenizers import load_tokenizer
from kd.progress import SILENT
from kd.text.batches import CachedRecords, Source
from kd.text.corpus import Corpus, load_corpus
from kd.training.loop import train

Alter = Callable[[NDArray[np.int64], Records], Records]


@dataclass(frozen=True)
class Supervision:
    """A student learns from these sections of a job, and from records that ``alter`` may change."""

    name: str
    cache: dict[str, Any]
    loss: dict[str, Any]
    alter: Alter | None = None


@dataclass(frozen=True)
class AlteredCache:
    """A cache whose records are altered into those of another method when they are read.

    The altered records have profile topk.
    """

    source: CachedRecords
    alter: Alter

    train_count = property(lambda self: self.source.train_count)
    validation_count = property(lambda self: self.source.validation_count)
    identity = property(lambda self: self.source.identity)

    @property
    def codec(self) -> Codec:
        """The codec of the altered columns."""
        return Codec("topk", self.source.codec.vocabulary_size)

    def teacher_head(self) -> dict[str, NDArray[Any]]:
        """The teacher's LM head, if the cache has one."""
        return self.source.teacher_head()

    def read(
        self, indices: NDArray[Any], draws: int | NDArray[Any] = 0
    ) -> tuple[Sequences, Records]:
        """Read the sequences of ``indices`` and their altered records."""
        sequences, records = self.source.read(indices, draws)
        return sequences, self.alter(np.asarray(indices), records)


def make_renormalisation(k: int) -> Alter:
    """Keep the k most probable tokens alone; the loss divides their probabilities by their sum."""

    def alter(_: NDArray[np.int64], records: Records) -> Records:
        columns = dict(records.columns)
        columns |= {name: columns[name][:, :k] for name in ("top_ids", "top_logprobs")}
        return Records(columns | {"residual": np.full(len(records), UNKNOWN, np.uint16)})

    return alter


def make_replacement_draws(draws: int) -> Alter:
    """Draw with replacement from the dense record; a sequence always gets the same draws."""

    def alter(indices: NDArray[np.int64], records: Records) -> Records:
        p = np.exp(records["logprobs"].astype(np.float64))
        rng = np.random.default_rng([draws, *indices.tolist()])
        points = rng.random((len(p), draws)) * p.sum(1, keepdims=True)
        running = np.cumsum(p, axis=1)
        ids = np.stack([np.searchsorted(row, at) for row, at in zip(running, points, strict=True)])
        ids = np.sort(np.minimum(ids, p.shape[1] - 1), axis=1)
        first = np.concatenate([np.ones((len(p), 1), bool), ids[:, 1:] != ids[:, :-1]], axis=1)
        count = np.diff(np.append(np.flatnonzero(first), first.size)).astype(np.float64)
        steps = np.full(ids.shape, UNKNOWN, np.uint16)
        steps[first] = np.rint(-np.log(count / draws) / TOP_STEP)
        order = np.argsort(steps, axis=1, kind="stable")
        return Records(
            {
                "known": records["known"],
                "entropy": records["entropy"],
                "top_ids": np.take_along_axis(ids, order, 1).astype(np.uint16),
                "top_logprobs": np.take_along_axis(steps, order, 1),
                "residual": np.full(len(p), UNKNOWN, np.uint16),
            }
        )

    return alter


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
        Supervision("28 draws with replacement", DENSE, T1, make_replacement_draws(28)),
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
    """Held-out cross-entropy of one student in nats, and the record's entries and bytes per token.

    The result is kept in ``work``, so that a stopped run can continue.
    """
    size = f"{arguments.steps or group.steps} x {group.batch} x {arguments.length}"
    kept = work / f"{told.name}, {size}, seed {seed}.json"
    if kept.is_file() and (told.loss["alpha"] < 1.0 or _locate_trained_before(seed, work).is_dir()):
        return tuple(json.loads(kept.read_text()))
    job = make_job(told, group, arguments, seed)
    wanted = make_capture_plan(job, *_load_text(arguments))
    store = open_cache(work / "caches" / wanted.identity.fingerprint)
    sealed = CachedRecords(store)
    source: Source = sealed if told.alter is None else AlteredCache(sealed, told.alter)
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
        return build_student(job.student, _load_text(arguments)[0], arguments.length)
    folder = _locate_trained_before(seed, work)
    if not folder.is_dir():
        plain = AT_ONE.told[0]
        capture_all(replace(AT_ONE, told=[plain]), arguments, work)
        measure_held_out(plain, AT_ONE, arguments, seed, work)
    return load_model(folder, torch.float32)


def _locate_trained_before(seed: int, work: Path) -> Path:
    return work / f"student of cross-entropy only, seed {seed}"


@torch.no_grad()
def capture_all(group: StudentGroup, arguments: argparse.Namespace, work: Path) -> None:
    """Capture the caches of a group in one pass of the teacher."""
    plans = {
        plan.identity: plan
        for plan in (
            make_capture_plan(make_job(told, group, arguments, 0), *_load_text(arguments))
            for told in group.told
        )
    }
    wanted = {
        identity: plan
        for identity, plan in plans.items()
        if find_sealed_cache(work / "caches" / identity.fingerprint, identity) is None
    }
    if not wanted:
        return
    with contextlib.ExitStack() as stack:
        writers = {
            each: stack.enter_context(open_for_capture(work / "caches", each)) for each in wanted
        }
        teachers = {
            each: prepare_teacher(plan, writers[each], SILENT) for each, plan in wanted.items()
        }
        reader = next(iter(teachers.values()))
        for index in range(next(iter(wanted)).shard_count):
            numbers = next(iter(wanted)).shard_range(index)
            sequences = select_shard_sequences(next(iter(wanted.values())), index)
            parts: dict[CacheIdentity, list[Records]] = {each: [] for each in wanted}
            for row in range(len(sequences)):
                ((hidden_ND, gold_N, positions_N),) = reader.read_rows(
                    sequences.select(slice(row, row + 1))
                )
                for each, teacher in teachers.items():
                    found = teacher.recorder.record(hidden_ND, gold_N, numbers[row], positions_N)
                    parts[each].append(found)
            for each, writer in writers.items():
                writer.write_shard(index, sequences, Records.concatenate(parts[each]))
        for each, writer in writers.items():
            writer.finish(Provenance())
            print(f"captured {each.codec.profile} {each.fingerprint}", file=sys.stderr, flush=True)


_TEXT: list[tuple[Any, Corpus, Path]] = []


def _load_text(arguments: argparse.Namespace) -> tuple[Any, Corpus, Path]:
    """Load tokenizer, packed text and the teacher's folder, once for all students."""
    if not _TEXT:
        folder = AUSTEN / "teacher"
        tokenizer = load_tokenizer(folder)
        _TEXT.append(
            (
                tokenizer,
                load_corpus(make_job(AT_ONE.told[0], AT_ONE, arguments, 0).data, tokenizer),
                folder,
            )
        )
    return _TEXT[0]


def count_entries(source: Source) -> float:
    """Count the mean entries of a record: known, head and tail, or the tokens present."""
    _, records = source.read(np.arange(16))
    assert records is not None
    columns = records.columns
    if "top_ids" in columns:
        return float((columns["top_logprobs"] != UNKNOWN).sum(1).mean())
    if "logprobs" in columns:
        return float(columns["logprobs"].shape[1])
    sampled = (
        columns["head_count"].mean() + columns["tail_count"].mean()
        if "head_count" in columns
        else 0.0
    )
    return float(columns["known"].shape[1] + sampled)


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, help="steps of every student; without it each group has its own"
    )
    parser.add_argument(
        "--sequences",
        type=int,
        default=3200,
        help="training sequences; the students see each in turn",
    )
    parser.add_argument("--length", type=int, default=256, help="tokens a sequence")
    parser.add_argument(
        "--only",
        default="",
        help="run only the rows with this in their name, and the two ends of the gap",
    )
    parser.add_argument(
        "--work", type=Path, help="where to keep the caches; a temporary folder without it"
    )
    parser.add_argument("--out", type=Path, help="write the tables to this file too")
    arguments = parser.parse_args()
    hide_progress_bars()
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        pages = [run_group(group, arguments, work) for group in (AT_ONE, AT_TWO, AT_TWO_TRAINED)]
    head = (
        f"{arguments.seeds} seeds, {arguments.sequences} training sequences of "
        f"{arguments.length} tokens, {platform.system()} {platform.machine()}, "
        f"torch {torch.__version__}."
    )
    page = "\n\n".join([head, *(page for page in pages if page)])
    print(page)
    if arguments.out:
        arguments.out.write_text(page + "\n", encoding="utf-8")


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


if __name__ == "__main__":
    main()
