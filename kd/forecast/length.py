"""The length of a training before it runs: its optimiser steps, and what each reads."""

from __future__ import annotations

import math
from pathlib import Path

from cache.errors import PotstillError
from cache.store import read_manifest
from kd.capture.estimate.job import measure_capture
from kd.capture.estimate.text import CaptureSize
from kd.config.job import JobConfig
from kd.errors import ConfigError
from kd.files import find_caches


def find_length(
    config: JobConfig, root: Path, home: Path, tokens: int | None = None
) -> tuple[int, float]:
    """Find the optimiser steps of a job, and the tokens with a target that one of them reads.

    The text is a sealed cache below ``home``, or files below ``root``. A training that reads
    ``tokens`` has steps for these, whatever the job says. Raises ``ConfigError`` for a job that
    trains nothing, and where the steps follow from a text that cannot be read here.
    """
    options = config.train
    if options is None or config.student is None:
        detail = f"a job of kind {config.kind} trains no student, so there is nothing to plan."
        remedy = "Give a job of kind distill, train or search."
        raise ConfigError.of_field("/student", detail, remedy)
    text = _find_text(config, root, home)
    targets = config.data.sequence_length - 1.0 if text is None else text.targets
    per_step = options.sequences_per_step * targets
    if tokens is not None:
        return math.ceil(tokens / per_step), per_step
    steps = options.count_steps(None if text is None else text.train_sequences)
    if steps is None:
        detail = "the steps of an epoch are not known, because the text cannot be read here."
        remedy = "Set train.max_steps, or plan where the text is."
        raise ConfigError.of_field("/train/epochs", detail, remedy)
    return steps, per_step


def _find_text(config: JobConfig, root: Path, home: Path) -> CaptureSize | None:
    """Find the size of a job's text; None for text of the hub, or that only the worker can read."""
    try:
        if config.cache.fingerprint is not None:
            caches = find_caches(home, config.cache.store)
            manifest = read_manifest(caches / config.cache.fingerprint)
            data = manifest.identity.data
            counts = (data.train_sequences, data.validation_sequences, data.sequence_length)
            return CaptureSize(*counts, manifest.positions, counted=True)
        # A job of kind train reads records that a capture of the same text makes.
        return measure_capture(config.model_copy(update={"kind": "distill"}), root)[0]
    except PotstillError:
        return None
