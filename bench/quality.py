"""How much of full distillation a cache keeps: students trained from each record, on real text, with a real teacher.

    python bench/quality.py [--seeds 3] [--steps N] [--work FOLDER] [--out FILE]

Every student of a seed begins with the same weights and sees the same tokens in the same order; only what it is told of
the teacher differs. The teacher is the example's, the text its five training novels; *Persuasion* is held out. alpha is
0: nothing but the record teaches.

    share = (CE of the cross-entropy-only student - CE) / (CE of the cross-entropy-only student - CE of dense)

Other ways to keep few tokens are given the same chance: their records go through the same loss and the same loop.

    top-k                     the k most probable tokens, renormalised: what most top-k caches train on
    top-k and a ghost         and one bucket for the rest: profile topk
    draws with replacement    each token weighs its share of them (RS-KD, arXiv 2503.16870)
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

from cache.codec import TOP_STEP, UNKNOWN, Codec
from cache.manifest import CacheIdentity, Provenance
from cache.records import Records, Sequences
from cache.store import capture as open_for_capture
from cache.store import open_cache
from kd import models
from kd.batches import Source
from kd.config.job import JobConfig
from kd.data import Corpus, load_corpus
from kd.jobfile import parse_config
from kd.progress import SILENT
from kd.teacher import CachedRecords, find_sealed, load_teacher, make_plan, shard_sequences
from kd.train import train

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "austen"
Alter = Callable[[NDArray[np.int64], Records], Records]


@dataclass(frozen=True)
class Told:
    """What a student is told: a cache, made by a job with these sections, and what is done to its records."""

    name: str
    cache: dict[str, Any]
    loss: dict[str, Any]
    alter: Alter | None = None


@dataclass(frozen=True)
class Altered:
    """A cache whose records are changed into those of another method, of profile topk, as they are read."""

    source: CachedRecords
    alter: Alter

    train_count = property(lambda self: self.source.train_count)
    validation_count = property(lambda self: self.source.validation_count)
    identity = property(lambda self: self.source.identity)

    @property
    def codec(self) -> Codec:
        """What the changed columns mean."""
        return Codec("topk", self.source.codec.vocabulary_size)

    def teacher_head(self) -> dict[str, NDArray[Any]]:
        """The teacher's LM head, where there is one."""
        return self.source.teacher_head()

    def read(self, indices: NDArray[Any], draws: int | NDArray[Any] = 0) -> tuple[Sequences, Records]:
        """The sequences of ``indices`` and their changed records."""
        sequences, records = self.source.read(indices, draws)
        return sequences, self.alter(np.asarray(indices), records)


def renormalised(k: int) -> Alter:
    """The k most probable tokens alone: the loss divides their probabilities by their sum."""

    def alter(_: NDArray[np.int64], records: Records) -> Records:
        columns = dict(records.columns)
        columns |= {name: columns[name][:, :k] for name in ("top_ids", "top_logprobs")}
        return Records(columns | {"residual": np.full(len(records), UNKNOWN, np.uint16)})

    return alter


def replacement(draws: int) -> Alter:
    """So many draws with replacement from the dense record, the same whenever a sequence is read."""

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
class Group:
    """Students of one size, and how they are trained: (layers, width), steps of so many sequences, learning rate."""

    told: list[Told]
    student: tuple[int, int]
    steps: int
    batch: int
    learning_rate: float
    trained: bool = False  # before: they begin as the first group's students of cross-entropy only


#: At T = 2 most of what is told is tail, so a sample is much noise, which slows a student that still has far to go: the
#: second group's are trained until they hold what they can, the third's begin with trained weights, as most do.
AT_ONE = Group(
    [
        Told("cross-entropy only", DENSE, {"alpha": 1.0}),
        Told("dense", DENSE, T1),
        Told("threshold 0.04", {"threshold": 0.04}, T1),
        Told("threshold 0.02", {"threshold": 0.02}, T1),
        Told("threshold 0.01", {"threshold": 0.01}, T1),
        Told("top-12", TOP, T1, renormalised(12)),
        Told("top-50", TOP, T1, renormalised(50)),
        Told("top-50 and a ghost", TOP, T1),
        Told("28 draws with replacement", DENSE, T1, replacement(28)),
    ],
    student=(2, 128),
    steps=400,
    batch=8,
    learning_rate=3e-3,
)
AT_TWO = Group(
    [
        Told("dense, T = 2", DENSE, T2),
        *(
            Told(f"tempered {threshold}, T = 2", {"profile": "tempered", "threshold": threshold, "draws": 4}, T2)
            for threshold in (0.0155, 0.001)
        ),
    ],
    student=(1, 32),
    steps=800,
    batch=16,
    learning_rate=6e-3,
)
AT_TWO_TRAINED = Group(
    [replace(told, name=f"{told.name}, trained before") for told in AT_TWO.told],
    student=AT_ONE.student,
    steps=400,
    batch=16,
    learning_rate=1e-3,
    trained=True,
)


def make_job(told: Told, group: Group, arguments: argparse.Namespace, seed: int) -> JobConfig:
    """The job of one student."""
    text = sorted(path for path in (EXAMPLE / "text").glob("*.txt") if path.stem != "persuasion")
    (layers, width), steps = group.student, arguments.steps or group.steps
    return parse_config(
        {
            "kind": "distill",
            "teacher": {"model": str(EXAMPLE / "teacher"), "batch_size": 16},
            "student": {"init": {"layers": layers, "hidden_size": width}},
            "data": {
                "train": [str(path) for path in text],
                "validation": str(EXAMPLE / "text" / "persuasion.txt"),
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


def held_out(
    told: Told, group: Group, arguments: argparse.Namespace, seed: int, work: Path
) -> tuple[float, float, float]:
    """Held-out cross-entropy of one student in nats, and the record's entries and bytes per token.

    What a student came to is kept in ``work``, so that a run that was stopped goes on.
    """
    kept = (
        work / f"{told.name}, {arguments.steps or group.steps} x {group.batch} x {arguments.length}, seed {seed}.json"
    )
    if kept.is_file() and (told.loss["alpha"] < 1.0 or _trained_before(seed, work).is_dir()):
        return tuple(json.loads(kept.read_text()))
    job = make_job(told, group, arguments, seed)
    wanted = make_plan(job, *_text(arguments))
    store = open_cache(work / "caches" / wanted.identity.fingerprint)
    sealed = CachedRecords(store)
    source: Source = sealed if told.alter is None else Altered(sealed, told.alter)
    student = begin(group, job, arguments, seed, work)
    with tempfile.TemporaryDirectory(dir=work) as run_dir:
        progress = train(job, source, student, wanted.identity.tokenizer.vocabulary_size, Path(run_dir), SILENT)
    assert progress.last_evaluation is not None
    found = float(progress.last_evaluation["validation_loss"]), entries_of(source), store.bytes_per_token
    if told.loss["alpha"] == 1.0:
        student.save_pretrained(_trained_before(seed, work))
    kept.write_text(json.dumps(found))
    return found


def begin(group: Group, job: JobConfig, arguments: argparse.Namespace, seed: int, work: Path) -> PreTrainedModel:
    """The student that every row of a seed begins with."""
    torch.manual_seed(seed)
    if not group.trained:
        return models.build_student(job.student, _text(arguments)[0], arguments.length)
    folder = _trained_before(seed, work)
    if not folder.is_dir():
        plain = AT_ONE.told[0]
        capture_all(replace(AT_ONE, told=[plain]), arguments, work)
        held_out(plain, AT_ONE, arguments, seed, work)
    return models.load(folder, torch.float32)


def _trained_before(seed: int, work: Path) -> Path:
    return work / f"student of cross-entropy only, seed {seed}"


@torch.no_grad()
def capture_all(group: Group, arguments: argparse.Namespace, work: Path) -> None:
    """Capture what the students of ``group`` need: one pass of the teacher fills all the caches."""
    plans = {
        plan.identity: plan
        for plan in (make_plan(make_job(told, group, arguments, 0), *_text(arguments)) for told in group.told)
    }
    wanted = {
        identity: plan
        for identity, plan in plans.items()
        if find_sealed(work / "caches" / identity.fingerprint, identity) is None
    }
    if not wanted:
        return
    with contextlib.ExitStack() as stack:
        writers = {each: stack.enter_context(open_for_capture(work / "caches", each)) for each in wanted}
        teachers = {each: load_teacher(plan, writers[each], SILENT) for each, plan in wanted.items()}
        reader = next(iter(teachers.values()))
        for index in range(next(iter(wanted)).shard_count):
            numbers = next(iter(wanted)).shard_range(index)
            sequences = shard_sequences(next(iter(wanted.values())), index)
            parts: dict[CacheIdentity, list[Records]] = {each: [] for each in wanted}
            for row in range(len(sequences)):
                ((hidden_ND, gold_N, positions_N),) = reader.rows(sequences.select(slice(row, row + 1)))
                for each, teacher in teachers.items():
                    found = teacher.recorder.records(hidden_ND, gold_N, numbers[row], positions_N)
                    parts[each].append(found)
            for each, writer in writers.items():
                writer.write_shard(index, sequences, Records.concatenate(parts[each]))
        for each, writer in writers.items():
            writer.finish(Provenance())
            print(f"captured {each.codec.profile} {each.fingerprint}", file=sys.stderr, flush=True)


_TEXT: list[tuple[Any, Corpus, Path]] = []


def _text(arguments: argparse.Namespace) -> tuple[Any, Corpus, Path]:
    """Tokenizer, packed text and the teacher's folder: the same for every student."""
    if not _TEXT:
        folder = EXAMPLE / "teacher"
        tokenizer = models.load_tokenizer(folder)
        _TEXT.append((tokenizer, load_corpus(make_job(AT_ONE.told[0], AT_ONE, arguments, 0).data, tokenizer), folder))
    return _TEXT[0]


def entries_of(source: Source) -> float:
    """Mean entries of a record: known, head and tail, or the tokens that are there."""
    _, records = source.read(np.arange(16))
    assert records is not None
    columns = records.columns
    if "top_ids" in columns:
        return float((columns["top_logprobs"] != UNKNOWN).sum(1).mean())
    if "logprobs" in columns:
        return float(columns["logprobs"].shape[1])
    sampled = columns["head_count"].mean() + columns["tail_count"].mean() if "head_count" in columns else 0.0
    return float(columns["known"].shape[1] + sampled)


def table(rows: list[tuple[Told, list[float], float, float]]) -> str:
    """The rows as markdown; shares only where cross-entropy-only and dense are among them."""
    found = {told.name: losses for told, losses, _, _ in rows}
    plain, dense = found.get("cross-entropy only"), found.get("dense")
    lines = [
        "| told | entries | bytes/token | held-out CE, mean (each seed) | share of the gap |",
        "|---|--:|--:|---|--:|",
    ]
    for told, losses, entries, size in rows:
        each = ", ".join(f"{loss:.4f}" for loss in losses)
        share = "-"
        if plain and dense:
            share = f"{statistics.fmean((c - x) / (c - d) for c, x, d in zip(plain, losses, dense, strict=True)):.1%}"
        own = told.alter is None and told.loss.get("alpha") != 1.0
        lines.append(
            f"| {told.name} | {entries:,.1f} | {f'{size:,.1f}' if own else '-'} "
            f"| {statistics.fmean(losses):.4f} ({each}) | {share} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of every student; each group has its own without it")
    parser.add_argument("--sequences", type=int, default=3200, help="training sequences; the students see each in turn")
    parser.add_argument("--length", type=int, default=256, help="tokens a sequence")
    parser.add_argument("--only", default="", help="run only what has this in its name, and the two ends of the gap")
    parser.add_argument("--work", type=Path, help="where to keep the caches; a temporary folder without it")
    parser.add_argument("--out", type=Path, help="write the tables to this file too")
    arguments = parser.parse_args()
    models.hide_progress_bars()
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        pages = [run(group, arguments, work) for group in (AT_ONE, AT_TWO, AT_TWO_TRAINED)]
    head = (
        f"{arguments.seeds} seeds, {arguments.sequences} training sequences of "
        f"{arguments.length} tokens, {platform.system()} {platform.machine()}, torch {torch.__version__}."
    )
    page = "\n\n".join([head, *(page for page in pages if page)])
    print(page)
    if arguments.out:
        arguments.out.write_text(page + "\n", encoding="utf-8")


def run(group: Group, arguments: argparse.Namespace, work: Path) -> str:
    """Train the students of a group, a seed after the other, and make their table."""
    ends = ("cross-entropy only", "dense", "dense, T = 2", "dense, T = 2, trained before")
    chosen = [told for told in group.told if arguments.only in told.name or told.name in ends]
    if len(chosen) <= len([told for told in chosen if told.name in ends]) and arguments.only:
        return ""
    capture_all(replace(group, told=chosen), arguments, work)
    rows = []
    for told in chosen:
        found = [held_out(told, group, arguments, seed, work) for seed in range(arguments.seeds)]
        rows.append((told, [loss for loss, _, _ in found], *found[0][1:]))
        print(f"{told.name}: {', '.join(f'{loss:.4f}' for loss, _, _ in found)}", file=sys.stderr, flush=True)
    (layers, width), steps = group.student, arguments.steps or group.steps
    before = ", trained before on cross-entropy only" * group.trained
    about = (
        f"Students of {layers} layer{'s' * (layers > 1)} of {width}{before}, {steps} steps of "
        f"{group.batch * arguments.length:,} tokens, learning rate {group.learning_rate:g}."
    )
    return f"{about}\n\n{table(rows)}"


if __name__ == "__main__":
    main()
