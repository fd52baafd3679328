"""Measures a finished model on a job's held-out text, against its teacher: ``kd eval``.

find the model -> read the text -> run teacher, start and baseline where there are any -> report
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from cache.store import Cache
from kd.capture.plan import settle_packing
from kd.config.job import JobConfig
from kd.config.jobfile import read_record
from kd.errors import ConfigError, DataError, ModelError
from kd.evaluation.in_depth import EvaluationContext, evaluate_in_depth
from kd.evaluation.pages import format_closing_sections, format_model_table, format_verdict
from kd.evaluation.report import Report, judge_report
from kd.evaluation.teacher_effect import warn_of_verdict
from kd.evaluation.words import explain_words
from kd.files import find_run, read_json, write_json, write_text
from kd.models.folder import STUDENT_FILES, resolve_model
from kd.models.loading import hide_progress_bars
from kd.models.saving import load_saved_student
from kd.models.tokenizers import KnownTokenizer, load_tokenizer, require_same_tokenizer
from kd.models.vocabulary import choose_folder_vocabulary
from kd.preflight.problems import Machine, require_no_problems
from kd.progress import SILENT, Monitor, replace_nonfinite
from kd.stages.source import adopt_cache_layout, open_source
from kd.text.batches import PlainText, Source
from kd.text.corpus import TEXTS, open_corpus
from kd.tracking.loading_events import reported_loading


@dataclass(frozen=True)
class ExaminedModel:
    """The model to examine: its folder, and the folder of the run that made it, if known."""

    model: Path
    run: Path | None

    @classmethod
    def find(cls, name: str, home: Path) -> ExaminedModel:
        """Find the run or model at ``name``.

        That is a run's folder, a run below ``home``/runs, a model's folder or a model of the hub. A
        run may be named as in ``find_run``; a folder of that name takes precedence. Raises
        ``ModelError`` if there is none.
        """
        for run in (Path(name), home / "runs" / name):
            if _has_student(run):
                return cls(run / "student", run)
        found = None if Path(name).is_dir() else find_run(name, home / "runs")
        if found is None:
            return cls(resolve_model(name), None)
        if not _has_student(found):
            detail = f"the run {found} has no student."
            raise ModelError(detail, "Name a run whose training has finished.")
        return cls(found / "student", found)

    def folder(self, home: Path, job: str) -> Path:
        """The default folder of the results: in the run, or beside the runs."""
        return self.run / "evaluation" if self.run is not None else home / "evaluations" / job


def _has_student(run: Path) -> bool:
    return any((run / "student" / name).is_file() for name in STUDENT_FILES)


def examine(
    config: JobConfig, target: ExaminedModel, home: Path, out: Path, monitor: Monitor = SILENT
) -> Report:
    """Measure the model, write the report into ``out`` and return it.

    The teacher runs wherever the job has one that can run here. The student before training is
    measured if a run made the model. Raises ``ConfigError`` for an impossible evaluation, and
    ``DataError`` if the job holds no text out.
    """
    config = settle_packing(enable_teacher(adopt_run_training(config, target.run)), monitor)
    require_no_problems(config, machine=Machine(trains=False))
    hide_progress_bars()
    monitor.emit("stage", stage="train", phase="loading the model and the text")
    tokenizer = load_tokenizer(target.model)
    size = choose_folder_vocabulary(tokenizer, target.model)
    source, config = open_text(config, tokenizer, size, home, target.run or out, monitor)
    with_start = target.run is not None and config.student is not None and config.train is not None
    context = EvaluationContext(out, tokenizer, monitor, target.run, target.model)
    with reported_loading(monitor):
        student = load_saved_student(target.model)
        found = evaluate_in_depth(config, source, student, context, with_start)
    teacher = config.teacher_name if config.evaluation.teacher else None
    report: Report = replace_nonfinite(
        {"name": config.name, "model": str(target.model), "teacher": teacher, **found}
    )
    report |= judge_report(report)
    warn_of_verdict(report, monitor)
    write_json(out / "report.json", report)
    write_text(out / "report.md", render_examination(report))
    return report


def adopt_run_training(config: JobConfig, run: Path | None) -> JobConfig:
    """``config`` with the sections student and train of ``run``.

    They may differ from those of ``config``: a run may be a trial of a search.
    """
    try:
        made = read_record(read_json(run / "config.json")) if run is not None else None
    except (ConfigError, ValueError):
        # Missing, damaged, or written by another version.
        made = None
    if made is None:
        return config
    return config.model_copy(update={"student": made.student, "train": made.train})


def enable_teacher(config: JobConfig) -> JobConfig:
    """``config`` with the teacher's evaluation switched on, where it can run here.

    A teacher that was told more than the student cannot be compared on the student's sequences.
    """
    local = config.explain_no_local_teacher() is None
    compares = local and config.teacher_context is None
    wanted = config.evaluation.model_copy(update={"teacher": config.evaluation.teacher or compares})
    return config.model_copy(update={"evaluation": wanted})


def open_text(
    config: JobConfig,
    tokenizer: PreTrainedTokenizerBase,
    size: int,
    home: Path,
    run_dir: Path,
    monitor: Monitor,
) -> tuple[Source, JobConfig]:
    """The job's text, and the job with the layout of that text; ``size`` is V of the model.

    Plain text is enough to measure models. A baseline is trained from the cache, as the student
    was, and each of several teachers holds out text of its own.
    """
    from_cache = config.cache.fingerprint is not None or config.evaluation.baseline
    if from_cache or config.teachers:
        own, source = open_source(config, home, run_dir, monitor)
        # The model need not be the job's student, which was compared above.
        if isinstance(source, Cache):
            known = KnownTokenizer.of_cache(source)
            require_same_tokenizer(tokenizer, known, "The model's", note=monitor.note)
        elif source.codec is not None:
            known = KnownTokenizer.of(own, source.codec.vocabulary_size, "that of the student")
            require_same_tokenizer(tokenizer, known, "The model's", note=monitor.note)
        config = adopt_cache_layout(source, config)
    else:
        source = PlainText(open_corpus(config.data, tokenizer, home / TEXTS, monitor, size))
    if not source.validation_count:
        detail = "The job holds no text out: there is nothing to measure on."
        raise DataError(detail, "Give data.validation, or a data.validation_fraction above 0.")
    return source, config


def render_examination(report: Report) -> str:
    """The report as Markdown."""
    found = report["evaluation"]
    text = f"Measured on {found['tokens']:,} held-out tokens, {found['bytes']:,} bytes of text."
    beside = f" The teacher is `{report['teacher']}`." if report["teacher"] else ""
    lines = [
        f"# `{report['model']}`",
        "",
        *format_verdict(report),
        text + beside,
        "",
        *format_model_table(found["models"], found["top_k"]),
    ]
    lines = [*lines[:-1], *format_closing_sections(report)]
    return "\n".join([*lines, *explain_words(lines)]) + "\n"
