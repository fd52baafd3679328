"""A finished model against a job's held-out text and its running teacher: what ``kd eval`` does.

find the model -> read the text -> teacher, start and baseline where there are any -> report.md, report.json, PNG
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from kd import models
from kd.batches import PlainText, Source
from kd.config.job import JobConfig
from kd.data import load_corpus
from kd.errors import ConfigError, DataError, ModelError
from kd.evaluation.closer import Run, look_closer, require_possible
from kd.evaluation.pages import closing_sections, table_of_models
from kd.files import read_json, write_json, write_text
from kd.jobfile import parse_config
from kd.pipeline import cut_as, open_source
from kd.progress import SILENT, Monitor, finite
from kd.student import load_saved

Report = dict[str, Any]
#: What one of them tells a saved student by: a whole model, or adapters alone.
_STUDENT = ("config.json", "adapter/adapter_config.json")


@dataclass(frozen=True)
class Target:
    """What is to be examined: the folder of a model, and that of the run which made it, where one did."""

    model: Path
    run: Path | None

    @classmethod
    def find(cls, name: str, home: Path) -> Target:
        """The run or model at ``name``: a run's folder, a run below ``home``/runs, a model's folder or a hub id.

        A run may be named as in ``named_run``; a folder goes before it. Raises ``ModelError`` where there is none.
        """
        for run in (Path(name), home / "runs" / name):
            if _has_student(run):
                return cls(run / "student", run)
        found = None if Path(name).is_dir() else named_run(name, home / "runs")
        if found is None:
            return cls(models.resolve(name), None)
        if not _has_student(found):
            raise ModelError(f"the run {found} has no student.", "Name a run that has trained one to its end.")
        return cls(found / "student", found)

    def folder(self, home: Path, job: str) -> Path:
        """Where the findings go if nobody says: into the run, or beside the runs."""
        return self.run / "evaluation" if self.run is not None else home / "evaluations" / job


def named_run(name: str, runs: Path) -> Path | None:
    """The run below ``runs`` with that name, or the only one that begins so; ``last`` = the one that began last.

    The job_ of a job's id need not be given. None where none is named so; raises ``ModelError`` where several are.
    """
    folders = sorted(folder for folder in runs.glob("[!.]*") if folder.is_dir())
    if name == "last":
        if not folders:
            raise ModelError(f"there is no run under {runs}.", "Run a job first, or name a model.")
        return max(folders, key=_began)
    exact = [folder for folder in folders if folder.name == name]
    found = exact or [folder for folder in folders if name and folder.name.startswith((name, f"job_{name}"))]
    if len(found) > 1:
        names = ", ".join(folder.name for folder in found[:5])
        remedy = "Give more of the name; of a hub's model that has it too, the owner."
        raise ModelError(f"{name!r} names {len(found)} runs under {runs}: {names}.", remedy)
    return found[0] if found else None


def _began(run: Path) -> float:
    """When it began, by its job, which is written then; the folder's own time is later, after an evaluation say."""
    job = run / "config.json"
    return (job if job.is_file() else run).stat().st_mtime


def _has_student(run: Path) -> bool:
    return any((run / "student" / name).is_file() for name in _STUDENT)


def examine(config: JobConfig, target: Target, home: Path, out: Path, monitor: Monitor = SILENT) -> Report:
    """Measure the model, write the report into ``out`` and return it.

    The teacher is run wherever the job has one that can; the student before training is that of a run's job. Raises
    ``ConfigError`` for an evaluation that is impossible, ``DataError`` where the job holds nothing out.
    """
    config = with_teacher(as_trained(config, target.run))
    require_possible(config)
    models.hide_progress_bars()
    monitor.emit("stage", stage="train", phase="loading the model and the text")
    tokenizer = models.load_tokenizer(target.model)
    source, config = open_text(config, tokenizer, home, target.run or out, monitor)
    student = load_saved(target.model)
    with_start = target.run is not None and config.student is not None and config.train is not None
    found = look_closer(config, source, student, Run(out, tokenizer, monitor, target.run), with_start)
    teacher = config.teacher.model if config.evaluation.teacher and config.teacher is not None else None
    report: Report = finite({"name": config.name, "model": str(target.model), "teacher": teacher, **found})
    write_json(out / "report.json", report)
    write_text(out / "report.md", render(report))
    return report


def as_trained(config: JobConfig, run: Path | None) -> JobConfig:
    """``config`` with the student and the training of ``run``, whose job may be another: a trial of a search is."""
    try:
        made = parse_config(read_json(run / "config.json")) if run is not None else None
    except (ConfigError, ValueError):  # missing, damaged, or of another version
        made = None
    return config if made is None else config.model_copy(update={"student": made.student, "train": made.train})


def with_teacher(config: JobConfig) -> JobConfig:
    """``config`` with the teacher's pass switched on, where there is a teacher that runs here."""
    local = config.teacher is not None and config.teacher.backend == "local"
    wanted = config.evaluation.model_copy(update={"teacher": config.evaluation.teacher or local})
    return config.model_copy(update={"evaluation": wanted})


def open_text(
    config: JobConfig, tokenizer: PreTrainedTokenizerBase, home: Path, run_dir: Path, monitor: Monitor
) -> tuple[Source, JobConfig]:
    """The job's text, and the job as that text is cut.

    The text itself is enough to measure models; a baseline is trained from the cache, as the student was.
    """
    if config.cache.fingerprint is not None or config.evaluation.baseline:
        _, source = open_source(config, home, run_dir, monitor)
        config = cut_as(source, config)
    else:
        source = PlainText(load_corpus(config.data, tokenizer, monitor))
    if not source.validation_count:
        raise DataError(
            "The job holds no text out, so that there is nothing to measure on.",
            "Give data.validation, or a data.validation_fraction above 0.",
        )
    return source, config


def render(report: Report) -> str:
    """The findings as Markdown."""
    found = report["evaluation"]
    text = f"Measured on {found['tokens']:,} held-out tokens, {found['bytes']:,} bytes of text."
    beside = f" The teacher is `{report['teacher']}`." if report["teacher"] else ""
    lines = [f"# `{report['model']}`", "", text + beside, "", *table_of_models(found["models"], found["top_k"])]
    return "\n".join([*lines[:-1], *closing_sections(report)]) + "\n"
