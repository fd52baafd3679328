"""The text of a job before it is read: sequences, and targets of one. Imports no torch.

It is estimated from a sample of the files, or read from the manifest of a sealed cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cache.errors import PotstillError
from cache.store import read_manifest
from kd.capture.estimate.job import measure_capture
from kd.config.job import JobConfig
from kd.errors import ConfigError, Problem
from kd.files import find_caches


@dataclass(frozen=True)
class TextSize:
    """The training sequences, and the positions with a target of one sequence.

    ``train`` is None where the text cannot be read here.
    """

    train: int | None
    targets: float


def find_text_size(config: JobConfig, root: Path, home: Path) -> TextSize:
    """Find the size of the job's text: of its sealed cache, or of its files below ``root``."""
    length = config.data.sequence_length
    try:
        if config.cache.fingerprint is not None:
            folder = find_caches(home, config.cache.store) / config.cache.fingerprint
            data = read_manifest(folder).identity.data
            return TextSize(data.train_sequences, float(data.sequence_length - 1))
        # A job of kind train reads records that a capture of the same text makes.
        work, _ = measure_capture(config.model_copy(update={"kind": "distill"}), root)
    except PotstillError:  # text of the hub, or that only the worker can read
        return TextSize(None, float(length - 1))
    return TextSize(work.train_sequences, work.positions / max(work.sequences, 1))


def require_training(config: JobConfig) -> None:
    """Raise ``ConfigError`` for a job that trains no student."""
    if config.train is None or config.student is None:
        raise ConfigError([
            Problem(
                "/student",
                f"a job of kind {config.kind} trains no student, so there is nothing to plan.",
                "Give a job of kind distill, train or search.",
            )
        ])  # fmt: skip


def require_steps(config: JobConfig, text: TextSize) -> int:
    """The optimiser steps of a job; ``ConfigError`` where they depend on an unknown text."""
    steps = config.require_train().count_steps(text.train)
    if steps is None:
        raise ConfigError([
            Problem(
                "/train/epochs",
                "the steps of an epoch are not known, because the text cannot be read here.",
                "Set train.max_steps, or plan where the text is.",
            )
        ])  # fmt: skip
    return steps
