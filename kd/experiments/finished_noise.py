"""The gradient's noise of a finished student: ``kd noise``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from kd.capture.probe import open_trial
from kd.experiments.landscape import read_run_job
from kd.experiments.noise import advise_on_batch, measure_batch_noise, measure_noise
from kd.models.loading import hide_progress_bars
from kd.models.saving import load_saved_student
from kd.models.vocabulary import choose_run_vocabulary
from kd.pipeline import adopt_cache_layout, load_student_tokenizer, open_source
from kd.progress import SILENT, Monitor
from kd.text.batches import CachedRecords, Source

#: What is said where no gradient was measured.
_UNKNOWN = (
    "The noise of the batch is not known: it needs two sequences, and memory for four gradients."
)


def measure_finished_noise(run_dir: Path, home: Path, monitor: Monitor = SILENT) -> dict[str, Any]:
    """Measure the noise of the student in ``run_dir``, with advice.

    Where the run captured its cache, the teacher reads a few of its sequences twice. A run that
    reads a sealed cache by its fingerprint, or plain text, has the noise of both together. Raises
    ``ModelError`` for a run without a student, and the errors of a capture.
    """
    config = read_run_job(run_dir)
    hide_progress_bars()
    if not config.needs_cache or config.cache.fingerprint is not None:
        _, source = open_source(config, home, run_dir, monitor)
        return _measure(run_dir, source, None)
    with open_trial(config, home, monitor) as trial:
        second = None if trial.second is None else CachedRecords(trial.second)
        return _measure(run_dir, CachedRecords(trial.first), second)


def _measure(run_dir: Path, source: Source, second: CachedRecords | None) -> dict[str, Any]:
    config = adopt_cache_layout(source, read_run_job(run_dir))
    student = load_saved_student(run_dir / "student")
    vocabulary = choose_run_vocabulary(source, load_student_tokenizer(config), student)
    found: dict[str, Any] = {"sequences_per_step": config.require_train().sequences_per_step}
    if second is not None and isinstance(source, CachedRecords):
        noise = measure_noise(config, source, second, student, vocabulary)
        found["noise_of_logits"] = asdict(noise)["now"]
    batch = measure_batch_noise(config, source, second, student, vocabulary)
    return found | {
        "batch_noise": None if batch is None else batch.to_json(),
        "advice": [_UNKNOWN] if batch is None else advise_on_batch(config, batch),
    }
