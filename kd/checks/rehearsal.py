"""The overfit check of a whole job: a handful of its sequences, read by its teacher, learnt by its student."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from cache.disk import make_folder, storage_errors
from kd import models
from kd.checks.overfit import SEQUENCES, overfit
from kd.checks.verdict import Verdict
from kd.config.job import JobConfig
from kd.errors import ConfigError, Problem
from kd.pipeline import cut_as, open_source, precompute
from kd.progress import SILENT, Monitor
from kd.validate import check_inputs


def rehearse(config: JobConfig, home: Path, monitor: Monitor = SILENT) -> Verdict:
    """Overfit the student of a job on a few sequences of its own; nothing of it stays below ``home``.

    A sealed cache that the job names is read there; else the teacher reads those sequences, and no more. Raises
    ``ConfigError`` where the job trains nothing, and what its stages would raise.
    """
    if config.train is None or config.student is None:
        raise ConfigError([Problem("/kind", f"kind {config.kind} trains no student.", "Check a job that does.")])
    if problems := check_inputs(config, Path(), home):
        raise ConfigError(problems)
    models.hide_progress_bars()
    with storage_errors(home):
        make_folder(home)
    with TemporaryDirectory(prefix=".check-", dir=home) as name:
        return _rehearse(_short(config), home, Path(name), monitor)


def _short(config: JobConfig) -> JobConfig:
    """The job with no more text than the check takes; of a cache that it names, all is there already."""
    data = {"max_train_samples": SEQUENCES, "max_eval_samples": 1}
    return config.model_copy(update={"data": config.data.model_copy(update=data)})


def _rehearse(config: JobConfig, home: Path, folder: Path, monitor: Monitor) -> Verdict:
    if config.cache.fingerprint is None:
        home = folder
        if config.needs_cache:
            monitor.emit("stage", phase="reading a few sequences with the teacher")
            (folder / "run").mkdir()
            precompute(config, folder, folder / "run", monitor)
    tokenizer, source = open_source(config, home, folder / "run", monitor)
    config = cut_as(source, config)
    assert config.train is not None, "a job without it was refused"
    torch.manual_seed(config.train.seed)
    student = models.build_student(config.student, tokenizer, config.data.sequence_length, config.teacher)
    monitor.emit("stage", phase="learning them by heart")
    return overfit(config, source, student, models.vocabulary_size(tokenizer), folder, monitor)
