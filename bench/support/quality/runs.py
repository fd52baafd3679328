"""Train the students of a study one after the other, and keep the figures of each.

    work/caches/FINGERPRINT/                    caches, as everywhere
    work/runs/ROW, seed S, DIGEST/              one student
        found.json                              its figures; written last
        job.json                                its settings, as kd run reads them
        losses.npy                              its losses on the held-out targets, in nats (N,)
        metrics.jsonl                           the curve of its training
        checkpoints/                            until it is finished
        error.txt                               why the last attempt failed, if it did

The digest is of all that shapes the student: a run with other settings has another folder.

Shapes: N held-out targets, D hidden width.
"""

from __future__ import annotations

import hashlib
import io
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from bench.support.quality.closeness import measure_closeness
from bench.support.quality.methods import count_entries
from bench.support.quality.rows import FULL, Row, Told
from bench.support.quality.study import Study
from bench.support.quality.wrapped import WrappedSource
from cache.disk import locked, make_folder, remove_path, write_file
from kd.config.job import JobConfig
from kd.errors import Interrupted
from kd.files import read_json, write_json, write_text
from kd.loss.targets import Targets
from kd.memory.auto_batch import release_memory
from kd.models.lm_head import find_student_head
from kd.models.loading import build_student
from kd.models.precision import Precision, compute_target_hidden_states, pick_device
from kd.progress import Monitor
from kd.text.batches import PlainText, Source
from kd.text.corpus import Corpus
from kd.text.steps.reading import read_validation_batches
from kd.training.evaluate import score_positions
from kd.training.loop import train
from kd.training.resume.identity import compute_resume_identity

#: A run that another process holds is waited for.
OTHER_RUN = "another process's training of the same student"


@dataclass(frozen=True)
class Figures:
    """The figures of one finished student.

    ``loss`` is its held-out cross-entropy in nats a token; ``seconds`` those of its steps. A row
    without a teacher has no ``entries`` and ``bytes_per_token``; ``measured`` tells bytes on the
    disk from bytes that a format's description gives. ``kl`` (teacher to student, in nats),
    ``calibration`` (ECE) and ``acceptance`` (of speculative decoding) are None if the study has no
    row of all of p.
    """

    row: str
    seed: int
    loss: float
    targets: int
    steps: int
    seconds: float
    entries: float | None
    bytes_per_token: float | None
    measured: bool
    kl: float | None = None
    calibration: float | None = None
    acceptance: float | None = None


@dataclass(frozen=True)
class Finished:
    """A finished student: its figures, and its losses on the held-out targets in nats, (N,)."""

    figures: Figures
    losses_N: NDArray[np.float64]


class TrainingOnly(WrappedSource):
    """A source without its held-out sequences, which are measured once, after the training."""

    validation_count = 0


def run_study(
    study: Study, make_monitor: Callable[[str], Monitor]
) -> Iterator[tuple[Row, int, Finished | None]]:
    """Train every student, one seed after the other; yields each as it is finished, None if failed.

    The next student is trained after one that failed. ``make_monitor`` makes the monitor of a run
    from its name. Raises ``Interrupted`` where the monitor asks for it, after a checkpoint.
    """
    for seed in study.seeds:
        for row in study.rows:
            yield row, seed, try_run(study, row, seed, make_monitor(f"{row.name}, seed {seed}"))


def try_run(study: Study, row: Row, seed: int, monitor: Monitor) -> Finished | None:
    """Train and measure one student; an error is written to its folder, and None returned.

    Raises ``Interrupted`` where the monitor asks for it, after a checkpoint.
    """
    folder: Path | None = None
    try:
        told = Told(PlainText(study.text.corpus)) if row.plain else row.open(study.open_caches(row))
        folder = locate_run(study, row, seed, told.source)
        return run_one(study, row, seed, told, folder, monitor)
    except Interrupted:
        raise
    except Exception as error:
        print(f"{row.name}, seed {seed}: {type(error).__name__}: {error}", file=sys.stderr)
        if folder is not None:
            write_text(folder / "error.txt", traceback.format_exc())
        return None
    finally:
        release_memory()


def locate_run(study: Study, row: Row, seed: int, source: Source) -> Path:
    """Return the folder of a run, which is named after all that shapes its student."""
    job = study.make_job(row, seed)
    shaping = [
        compute_resume_identity(job, source.fingerprint),
        PlainText(study.text.corpus).fingerprint,
        str(study.untied),
        str(job.loss.tail_control),
    ]
    digest = hashlib.sha256("\n".join(shaping).encode()).hexdigest()[:12]
    return study.work / "runs" / f"{row.name}, seed {seed}, {digest}"


def read_finished(folder: Path) -> Finished | None:
    """Read a finished run; None where it is not finished."""
    found = read_json(folder / "found.json")
    return found and Finished(Figures(**found), np.load(folder / "losses.npy"))


def run_one(
    study: Study, row: Row, seed: int, told: Told, folder: Path, monitor: Monitor
) -> Finished:
    """Train one student and measure it, from its newest checkpoint on; or read its figures."""
    make_folder(folder)
    with locked(folder.with_name(f"{folder.name}.lock"), partial(monitor.check, OTHER_RUN)):
        if (finished := read_finished(folder)) is not None:
            return finished
        job = study.make_job(row, seed)
        write_json(folder / "job.json", job.model_dump(mode="json"))
        student = make_student(study, job, seed)
        vocabulary = study.text.vocabulary
        progress = train(job, TrainingOnly(told.source), student, vocabulary, folder, monitor)
        losses_N = measure_losses(student, study.text.corpus, vocabulary, job)
        figures = Figures(
            row.name,
            seed,
            float(losses_N.mean()),
            len(losses_N),
            progress.step,
            progress.seconds,
            *measure_records(study, row, told),
            *measure_distance(study, student, job),
        )
        stored = io.BytesIO()
        np.save(stored, losses_N)
        write_file(folder / "losses.npy", stored.getvalue())
        write_json(folder / "found.json", asdict(figures))
        remove_path(folder / "checkpoints")
        remove_path(folder / "error.txt")
        return Finished(figures, losses_N)


def make_student(study: Study, job: JobConfig, seed: int) -> PreTrainedModel:
    """Make the student that every row of ``seed`` begins with."""
    torch.manual_seed(seed)
    text = study.text
    student = build_student(
        job.student, text.tokenizer, job.data.sequence_length, job.teacher_files
    )
    if study.untied:
        untie(student)
    return student


def untie(student: PreTrainedModel) -> None:
    """Give ``student`` an LM head of its own, with the weights of its embedding to begin with."""
    head = student.get_output_embeddings()
    if head.weight is student.get_input_embeddings().weight:
        head.weight = nn.Parameter(head.weight.detach().clone())
    student.config.tie_word_embeddings = False


def measure_distance(
    study: Study, student: PreTrainedModel, job: JobConfig
) -> tuple[float, float | None, float] | tuple[()]:
    """Measure KL, calibration and acceptance by the records of the row of all of p, if any."""
    full = next((row for row in study.rows if row.name == FULL), None)
    if full is None:
        return ()
    (records,) = study.open_caches(full)
    found = measure_closeness(student, records, study.text.vocabulary, job)
    return found.kl, found.calibration_error, found.acceptance


@torch.no_grad()
def measure_losses(
    student: PreTrainedModel, corpus: Corpus, vocabulary: int, job: JobConfig
) -> NDArray[np.float64]:
    """Compute the cross-entropy of ``student`` on each held-out target, in nats, (N,)."""
    options = job.require_train()
    device = pick_device()
    precision = Precision.choose(options.precision, device)
    lm_head = find_student_head(student, vocabulary)
    student.eval()
    parts = []
    for batch in read_validation_batches(PlainText(corpus), options.batch_size):
        batch = batch.to(device)
        hidden_ND = compute_target_hidden_states(student, batch, precision)
        parts.append(score_positions(hidden_ND, lm_head, Targets(batch.gold_N)).ce_N)
    return np.concatenate(parts)


def measure_records(study: Study, row: Row, told: Told) -> tuple[float | None, float | None, bool]:
    """Return entries and bytes of a token of a row, and whether the bytes are those on the disk."""
    if row.plain:
        return None, None, False
    entries = count_entries(told.source)
    if told.bytes_per_token is not None:
        return entries, told.bytes_per_token, False
    return entries, study.open_caches(row)[0].bytes_per_token, True
