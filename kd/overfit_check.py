"""The overfit check of a whole job: its student learns a few of its sequences by heart."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from cache.disk import make_folder, storage_errors
from kd.capture.plan import settle_packing
from kd.checks.verdict import Verdict
from kd.config.job import JobConfig
from kd.errors import ConfigError
from kd.evaluation.overfit import SEQUENCES, check_overfit
from kd.models.loading import build_student, hide_progress_bars
from kd.models.tokenizing.aligned_cache import AlignedCache
from kd.models.vocabulary import choose_run_vocabulary
from kd.preflight.problems import Folders, require_no_problems
from kd.progress import SILENT, Monitor
from kd.stages.capture import run_precompute
from kd.stages.source import adopt_cache_layout, open_source


def check_overfitting(config: JobConfig, home: Path, monitor: Monitor = SILENT) -> Verdict:
    """Overfit the student of a job on a few of its sequences; no files stay below ``home``.

    A sealed cache that the job names is read from ``home``; without one the teacher reads those
    sequences and no others. Raises ``ConfigError`` if the job trains no student, and the errors
    of its stages.
    """
    if config.train is None or config.student is None:
        what = f"kind {config.kind} trains no student."
        raise ConfigError.of_field("/kind", what, "Check a job that does.")
    if config.teachers:
        what = "a check is of one teacher, but the job has several."
        remedy = "Check a job with each teacher and its sources alone."
        raise ConfigError.of_field("/teachers", what, remedy)
    require_no_problems(config, Folders(Path(), home))
    hide_progress_bars()
    with storage_errors(home):
        make_folder(home)
    with TemporaryDirectory(prefix=".check-", dir=home) as name:
        # Only as much text as the check reads; a sealed cache holds all its sequences already.
        few = {"max_train_samples": SEQUENCES, "max_eval_samples": 1}
        short = config.model_copy(update={"data": config.data.model_copy(update=few)})
        return _run_check(short, home, Path(name), monitor)


def _run_check(config: JobConfig, home: Path, folder: Path, monitor: Monitor) -> Verdict:
    config = settle_packing(config, monitor)
    if config.cache.fingerprint is None:
        home = folder
        if config.needs_cache:
            monitor.emit("stage", phase="reading a few sequences with the teacher")
            (folder / "run").mkdir()
            run_precompute(config, folder, folder / "run", monitor)
    tokenizer, source = open_source(config, home, folder / "run", monitor)
    if isinstance(source, AlignedCache) and source.by_chunks:
        detail = "the least loss of chunks is not known, so that nothing tells what is learnt."
        remedy = "Check the job with projected, or with loss.alpha 1."
        raise ConfigError.of_field("/loss/tokenizers", detail, remedy)
    config = adopt_cache_layout(source, config)
    # The same first weights as in the job's own training.
    torch.manual_seed(config.require_train().seed)
    length = config.data.sequence_length
    student = build_student(config.student, tokenizer, length, config.teacher_files)
    monitor.emit("stage", phase="learning them by heart")
    vocabulary = choose_run_vocabulary(source, tokenizer, student)
    return check_overfit(config, source, student, vocabulary, folder, monitor)
