"""A training that a bench steps by hand, on the records of a small random teacher."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from bench.speed import BenchmarkSizes, seal_cache
from cache.records import Sequences
from kd.config.jobfile import parse_config
from kd.models.attention.isolation import isolate_documents
from kd.progress import SILENT
from kd.text.batches import Batch
from kd.training.prepare import prepare
from kd.training.run import Run
from kd.training.steps import begin_step, forward_backward, measure_gradients, take_step

#: An id that every record keeps, as jobs on chats do.
KEPT = (3,)


def prepare_run(
    sizes: BenchmarkSizes,
    sequences: Sequences,
    student: PreTrainedModel,
    folder: Path,
    **train: Any,
) -> Run:
    """Prepare a training of ``student`` on ``sequences``, with ``train`` as the section train."""
    sizes = replace(sizes, length=sequences.length, batch=len(sequences))
    store = seal_cache(sizes, folder, sequences, "threshold", always_keep=KEPT)
    isolate_documents(student)
    config = student.config
    shape = {"layers": config.num_hidden_layers, "hidden_size": config.hidden_size}
    job = parse_config({
        "kind": "train",
        "student": {"init": {**shape, "tokenizer": "the teacher's"}},
        "data": {"sequence_length": sequences.length},
        "cache": {"fingerprint": store.identity.fingerprint},
        "train": {"max_steps": 100, "logging_steps": 50, **train},
    })  # fmt: skip
    return prepare(job, store, student, sizes.vocabulary, folder / "run", SILENT)


def step_by_hand(run: Run, micro_batches: list[Batch]) -> None:
    """Take one optimiser step, without reports, evaluations and checkpoints."""
    step = begin_step(run, micro_batches, 0.0)
    forward_backward(run, step)
    measure_gradients(run, step)
    take_step(run, step)
