"""A study: one teacher, one text, one shape of student, and the job of each row and seed."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from bench.support.quality.rows import Row, parse_rows
from cache.store import Cache, open_cache
from kd.capture.plan import CapturePlan, make_capture_plan
from kd.config.job import JobConfig
from kd.config.jobfile import apply_overrides, parse_config
from kd.errors import ConfigError, DataError, Problem
from kd.models.loading import require_trainable_student
from kd.models.precision import pick_device
from kd.models.teacher_files import TeacherFiles
from kd.models.tokenizers import load_tokenizer
from kd.models.vocabulary import choose_source_vocabulary
from kd.preflight.problems import Folders, Machine, find_problems
from kd.text.corpus import Corpus, load_corpus

#: Sequences of a shard: a capture that is stopped loses at most this many.
SHARD_SEQUENCES = 64


@dataclass(frozen=True)
class StudyText:
    """The text of a study, tokenised for its teacher, and the teacher's files and vocabulary."""

    teacher: TeacherFiles
    tokenizer: PreTrainedTokenizerBase
    corpus: Corpus
    vocabulary: int


@dataclass(frozen=True)
class Study:
    """The rows and the settings that all of their students share.

    ``section`` is a job without ``cache`` and ``loss``; ``overrides`` are applied to it as ``kd
    run --set`` does. ``untied``: students get an LM head of their own.
    """

    rows: tuple[Row, ...]
    seeds: range
    section: dict[str, Any]
    overrides: tuple[str, ...]
    untied: bool
    work: Path

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Study:
        """Make the study that the flags describe, and check all that can be checked without models.

        Raises ``ConfigError`` or ``DataError``.
        """
        for flag in ("text", "held_out"):
            for file in getattr(arguments, flag):
                if not file.is_file():
                    raise DataError(
                        f"--{flag.replace('_', '-')}: there is no file {file}.",
                        f"Relative paths are taken from {Path.cwd()}.",
                    )
        if not arguments.teacher.is_dir():
            raise DataError(
                f"--teacher: there is no folder {arguments.teacher}.",
                f"Relative paths are taken from {Path.cwd()}.",
            )
        first = arguments.first_seed
        study = cls(
            rows=tuple(parse_rows(arguments.rows)),
            seeds=range(first, first + arguments.seeds),
            section=_make_section(arguments),
            overrides=tuple(arguments.set),
            untied=arguments.untied,
            work=arguments.work,
        )
        machine = Machine(device=pick_device())
        problems: list[Problem] = []
        for row in study.rows:
            for cache in row.caches or ({},):
                job = study.make_job(row, first, cache)
                problems += find_problems(job, Folders(Path(), study.work), machine)
        if problems:
            raise ConfigError(list(dict.fromkeys(problems)))
        return study

    def make_job(self, row: Row, seed: int, cache: dict[str, Any] | None = None) -> JobConfig:
        """Make the job of a row's student; ``cache`` is the section of another of its caches."""
        job = apply_overrides(self.section, self.overrides)
        loss = {"alpha": 0.0} | job.get("loss", {})
        if row.plain:
            return parse_config(
                job
                | {"kind": "train", "loss": loss | {"alpha": 1.0}}
                | {"train": job["train"] | {"seed": seed}}
            )
        section = {"shard_sequences": SHARD_SEQUENCES} | job.get("cache", {})
        section |= row.caches[0] if cache is None else cache
        return parse_config(
            job | {"loss": loss, "cache": section, "train": job["train"] | {"seed": seed}}
        )

    @cached_property
    def text(self) -> StudyText:
        """The tokenised text, read once. Raises ``DataError`` where it is too short."""
        job = self.make_job(self.rows[0], 0)
        assert job.teacher is not None
        teacher = TeacherFiles.resolve(job.teacher)
        source = teacher.section.files
        tokenizer = load_tokenizer(teacher.folder, source.gguf_file)
        vocabulary = choose_source_vocabulary(tokenizer, source, teacher.folder)
        corpus = load_corpus(job.data, tokenizer, size=vocabulary)
        _require_sequences("text", "--sequences", len(corpus.train), job.data.max_train_samples)
        _require_sequences(
            "held-out text",
            "--held-out-sequences",
            len(corpus.validation),
            job.data.max_eval_samples,
        )
        assert job.student is not None
        # Raises where no student of this shape can be built.
        require_trainable_student(job.student, tokenizer, job.data.sequence_length, source)
        return StudyText(teacher, tokenizer, corpus, vocabulary)

    def plan_captures(self) -> list[CapturePlan]:
        """Plan the captures of all caches that the rows need, each once."""
        plans = [self.plan_capture(row, cache) for row in self.rows for cache in row.caches]
        return list({plan.identity: plan for plan in plans}.values())

    def plan_capture(self, row: Row, cache: dict[str, Any]) -> CapturePlan:
        """Plan the capture of one cache of a row."""
        text = self.text
        job = self.make_job(row, self.seeds.start, cache)
        if row.entropies:
            # A job that weighs positions keeps their entropies; the students' jobs do not weigh.
            loss = job.loss.model_copy(update={"entropy_weighting": 1.0})
            job = job.model_copy(update={"loss": loss})
        # Each plan hashes the teacher's files and all tokens of its tokenizer.
        key = (job.cache.model_dump_json(), row.entropies)
        if key not in self._plans:
            self._plans[key] = make_capture_plan(job, text.teacher, text.tokenizer, text.corpus)
        return self._plans[key]

    @cached_property
    def _plans(self) -> dict[tuple[str, bool], CapturePlan]:
        return {}

    def open_caches(self, row: Row) -> list[Cache]:
        """Open the sealed caches of a row."""
        identities = [self.plan_capture(row, cache).identity for cache in row.caches]
        return [open_cache(self.caches / identity.fingerprint, identity) for identity in identities]

    @property
    def caches(self) -> Path:
        """The folder of the caches."""
        return self.work / "caches"


def _make_section(arguments: argparse.Namespace) -> dict[str, Any]:
    """Make the sections of a job that all rows share."""
    batch = arguments.batch
    micro = arguments.micro_batch or min(batch, 8)
    if batch % micro:
        raise DataError(
            f"--batch {batch} is not a multiple of --micro-batch {micro}.",
            "Each step takes whole micro-batches: give a --micro-batch that divides it.",
        )
    steps = arguments.steps
    wanted = arguments.sequences or steps * batch
    return {
        "teacher": {"model": str(arguments.teacher), "gguf_file": arguments.gguf_file},
        "student": _make_student_section(arguments),
        "data": {
            "train": [str(file) for file in arguments.text],
            "validation": [str(file) for file in arguments.held_out],
            "sequence_length": arguments.length,
            "max_train_samples": wanted,
            "max_eval_samples": arguments.held_out_sequences,
        },
        "train": {
            "max_steps": steps,
            "batch_size": micro,
            "gradient_accumulation_steps": batch // micro,
            "learning_rate": arguments.learning_rate,
            "warmup_steps": arguments.warmup,
            "lr_scheduler_type": "cosine",
            "eval_steps": steps,
            "save_steps": arguments.save_steps,
            "save_total_limit": 1,
        },
    }


def _make_student_section(arguments: argparse.Namespace) -> dict[str, Any]:
    layers = arguments.layers
    width = arguments.width
    cut_out = arguments.from_teacher is not None
    fresh = layers is not None and width is not None
    if cut_out == fresh or (cut_out and (layers or width)):
        raise DataError(
            "The student's shape is not given, or is given twice.",
            "Give either --from-teacher LAYERS (layers cut out of the teacher), or --layers and "
            "--width (a fresh Llama).",
        )
    if cut_out:
        return {"from_teacher": {"layers": arguments.from_teacher}}
    tied = not arguments.untied
    return {"init": {"layers": layers, "hidden_size": width, "tie_word_embeddings": tied}}


def _require_sequences(what: str, flag: str, found: int, wanted: int | None) -> None:
    if wanted is not None and found < wanted:
        raise DataError(
            f"{wanted:,} sequences of the {what} are asked for, but it has {found:,}.",
            f"Give more text, fewer steps, or {flag} {found} (with fewer sequences than the steps "
            "take, each is seen several times).",
        )
    if found == 0:
        raise DataError(f"The {what} has no sequence.", "Give more text.")
