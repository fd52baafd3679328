"""Jobs that train on text alone, and a stop in the middle of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.memory.step_bytes import StepMemory
from kd.memory.step_memory import describe_step
from kd.progress import Event, Monitor
from kd.text.batches import PlainText
from kd.text.corpus import Corpus
from kd.text.packing import Document, pack_documents
from kd.tracking.metrics import read_metrics

#: The vocabulary of ``make_source``.
VOCABULARY = 50


def make_text_job(train: dict[str, Any], **sections: Any) -> JobConfig:
    """Return a job on cross-entropy alone, with sequences of 16 tokens.

    The files that it names need not exist: a test passes its own source and student.
    """
    return parse_config(
        {
            "kind": "train",
            "student": {"init": {"layers": 2, "hidden_size": 16, "tokenizer": "."}},
            "data": {"train": "unused.txt", "sequence_length": 16},
            "loss": {"alpha": 1.0},
            "train": train,
            **sections,
        }
    )


def make_source(seed: int = 0) -> PlainText:
    """Return documents of unequal length over a skewed vocabulary.

    Micro-batches differ in tokens.
    """
    rng = np.random.default_rng(seed)
    config = make_text_job({"max_steps": 1}).data

    def documents(count: int) -> list[Document]:
        lengths = rng.integers(2, 30, count)
        return [
            Document((rng.zipf(1.5, length) % VOCABULARY).astype(np.uint32)) for length in lengths
        ]

    return PlainText(
        Corpus(pack_documents(documents(40), config), pack_documents(documents(8), config))
    )


def poison_forward(student: PreTrainedModel, number: int) -> None:
    """Put a NaN into a weight of ``student`` just before its forward pass of that number.

    Only passes that train count, from 1 on.
    """
    calls: list[int] = []

    def poison(norm: nn.Module, inputs: Any) -> None:
        calls.extend([1] * norm.training)
        if len(calls) == number:
            with torch.no_grad():
                norm.weight[0] = torch.nan

    student.model.norm.register_forward_pre_hook(poison)


def stop_after(step: int) -> Monitor:
    """Return a monitor that asks for a stop while ``step`` runs."""
    seen: list[int] = []

    def listen(event: Event) -> None:
        if event.type == "progress":
            seen.append(event.data["done"])

    return Monitor(listen, lambda: bool(seen) and seen[-1] >= step)


def read_history(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without what depends on the clock and the machine.

    The history of a run that was stopped must be that of an undisturbed one.
    """
    measured = ("throughput/", "loader/", "memory/")
    return [
        {name: value for name, value in line.items() if not name.startswith(measured)}
        for line in read_metrics(run_dir / "metrics.jsonl")
    ]


def estimate_memory(*step: Any, **options: Any) -> StepMemory:
    """Estimate the memory of a step that ``describe_step`` describes."""
    return describe_step(*step, **options).estimate()
