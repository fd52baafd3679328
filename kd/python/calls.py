"""The public functions: each makes a job of its arguments and runs it in this process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cache.shards.names import FINGERPRINT
from kd.buckets.inputs import begin_downloads
from kd.config.job import JobConfig
from kd.errors import ConfigError, Problem
from kd.files import find_caches
from kd.python.inputs import ModelSaver, Section, describe_data, describe_text, find_home
from kd.python.jobs import Named, make_job
from kd.python.results import CacheResult, DistillationResult, EvaluationResult, StudentResult
from kd.python.running import run_in_process

if TYPE_CHECKING:
    from kd.evaluation.report import Report
    from kd.progress import Monitor, StageResult


def distill(
    teacher: Any,
    student: Any,
    data: Any,
    *,
    validation: Any = None,
    tokenizer: Any = None,
    out: Named | None = None,
    home: Named | None = None,
    progress: bool = True,
    **settings: Any,
) -> DistillationResult:
    """Capture the teacher's predictions of a text, and train a student from them.

    ``teacher`` and ``student`` are names of models, folders, loaded models of transformers (with
    their ``tokenizer``, or as pairs of both), or mappings with the keys of their section:
    ``student={"init": {"layers": 2, "hidden_size": 128}}`` is a new model. ``data`` and
    ``validation`` are paths, globs, lists of texts, lists of rows such as ``{"messages": [...]}``,
    or a ``datasets.Dataset``; without ``validation`` a share of ``data`` is held out. A mapping is
    the section itself: ``data={"train": texts, "sequence_length": 256}``.

    ``settings`` are sections of the job, ``train={"max_steps": 400}``, ``cache={...}``,
    ``loss={...}``, or dotted names, ``set={"train.max_steps": 400}``. Without a length, training
    takes one epoch. ``home`` is the data folder (default KD_HOME, or ./potstill-data). ``out`` is
    the folder of the run, by default one below ``home`` that belongs to this job alone. The same
    call again uses the sealed cache and continues from the newest checkpoint. Ctrl-C,
    SIGTERM and the end of the terminal save and stop. ``progress=False`` prints nothing.

    Raises ``ConfigError`` with everything that is wrong with the job, and the errors of
    ``kd.errors`` and ``cache.errors``.
    """
    place = find_home(home)
    models = ModelSaver(place, tokenizer)
    job = {
        "kind": "distill",
        "teacher": models.describe(teacher, "teacher"),
        "student": models.describe(student, "student"),
        "data": describe_data(data, validation, place),
    }
    result = run_job(make_job(job, settings), out=out, home=place, progress=progress)
    assert isinstance(result, DistillationResult), "a job of kind distill has both stages"
    return result


def build_cache(
    teacher: Any,
    data: Any,
    *,
    validation: Any = None,
    tokenizer: Any = None,
    out: Named | None = None,
    home: Named | None = None,
    progress: bool = True,
    **settings: Any,
) -> CacheResult:
    """Let the teacher read a text once, and keep its predictions in a sealed cache.

    The arguments are those of ``kd.distill``. A cache of the same teacher, text and settings is
    captured once; it is reused afterwards.
    """
    place = find_home(home)
    job = {
        "kind": "precompute",
        "teacher": ModelSaver(place, tokenizer).describe(teacher, "teacher"),
        "data": describe_data(data, validation, place),
    }
    result = run_job(make_job(job, settings), out=out, home=place, progress=progress)
    assert isinstance(result, CacheResult), "a job of kind precompute makes a cache"
    return result


def train_student(
    sealed_cache: CacheResult | Named,
    student: Any,
    *,
    teacher: Any = None,
    tokenizer: Any = None,
    out: Named | None = None,
    home: Named | None = None,
    progress: bool = True,
    **settings: Any,
) -> StudentResult:
    """Train a student from a sealed cache, which also holds its text; no teacher runs.

    ``sealed_cache`` is the result of ``kd.build_cache``, the folder of a cache, or its fingerprint.
    The other arguments are those of ``kd.distill``. ``teacher`` is needed only if the student
    takes its layers or its tokenizer; the result of ``kd.build_cache`` knows it.
    """
    place, fingerprint = _find_cache(sealed_cache, home)
    models = ModelSaver(place, tokenizer)
    job: Section = {
        "kind": "train",
        "student": models.describe(student, "student"),
        "cache": {"fingerprint": fingerprint},
    }
    if teacher is not None:
        job["teacher"] = models.describe(teacher, "teacher")
    elif isinstance(sealed_cache, CacheResult):
        job |= sealed_cache.job.model_dump(mode="json", include={"teacher"}, exclude_unset=True)
    result = run_job(make_job(job, settings), out=out, home=place, progress=progress)
    assert isinstance(result, StudentResult), "a job of kind train makes a student"
    return result


def evaluate(
    model: Any,
    text: Any,
    *,
    teacher: Any = None,
    tokenizer: Any = None,
    out: Named | None = None,
    home: Named | None = None,
    progress: bool = True,
    **settings: Any,
) -> EvaluationResult:
    """Measure a model on a text, and compare it with its teacher if one is given.

    ``model`` is a folder, the name of a model or of a run, a loaded model, or the result of a
    training. ``text`` has the forms of ``data`` of ``kd.distill``, and all of it is measured.
    ``settings`` are those sections of a job that matter here: ``data={"sequence_length": 256}``,
    ``evaluation={...}``. ``out`` is the folder of the report, by default one below ``home``.
    """
    place = find_home(home)
    models = ModelSaver(place, tokenizer)
    found = describe_text(text, "/text", place)
    name = models.name(model, "model")
    job: Section = {
        "kind": "train",
        "student": {"model": name},
        "data": {"train": found.sources, "validation": found.sources},
        "loss": {"alpha": 1},
        "train": {"max_steps": 1},
    }
    if found.format is not None:
        job["data"]["format"] = found.format
    if teacher is not None:
        job["teacher"] = models.describe(teacher, "teacher")
    return _examine(make_job(job, settings, prefix="evaluation"), name, out, place, progress)


def _examine(
    config: JobConfig, name: str, out: Named | None, home: Path, progress: bool
) -> EvaluationResult:
    """Measure the model ``name`` on the validation text of ``config``."""
    # All of the text is held out: nothing is trained, and no n-gram is counted.
    held_out = config.data.model_copy(update={"train": ()})
    config = config.model_copy(update={"data": held_out})
    folder = _find_folder(out, home / "evaluations" / config.name)

    def run(monitor: Monitor) -> tuple[Path, Report]:
        from kd.examine import ExaminedModel, examine

        target = ExaminedModel.find(name, home)
        return target.model, examine(config, target, home, folder, monitor)

    (model, report), warnings = run_in_process(run, folder, progress)
    measured = report["evaluation"]["models"]
    student = measured["student"]
    return EvaluationResult(
        model=model,
        out=folder,
        tokens=report["evaluation"]["tokens"],
        perplexity=student["perplexity"],
        teacher_perplexity=measured.get("teacher", {}).get("perplexity"),
        bits_per_byte=student["bits_per_byte"],
        kl=student.get("kl"),
        agreement=student.get("agreement"),
        report=report,
        warnings=warnings,
    )


def run_job(
    job: JobConfig, *, out: Named | None = None, home: Named | None = None, progress: bool = True
) -> CacheResult | StudentResult:
    """Run a job in this process, as ``kd run`` does; ``kd.load_job`` reads one.

    Returns a ``DistillationResult`` for kind distill, a ``StudentResult`` for kind train and a
    ``CacheResult`` for kind precompute. Other kinds are refused with ``ConfigError``: the command
    line runs them.
    """
    if job.own_kind.stages[-1].makes in ("students", "verdict"):
        detail = f"kind {job.kind} has no result in Python yet."
        remedy = "Use `kd run`, or a job of kind distill, precompute or train."
        raise ConfigError([Problem("/kind", detail, remedy)])
    base = find_home(home)
    run_dir = _find_folder(out, base / "runs" / job.name)

    def run(monitor: Monitor) -> StageResult:
        from kd.pipeline import run_stages
        from kd.preflight.problems import Folders, Machine, require_no_problems

        begin_downloads(base)
        require_no_problems(job, Folders(Path(), base, opened=True), Machine())
        return run_stages(job, base, run_dir, monitor)

    found, warnings = run_in_process(run, run_dir, progress)
    if not (report := found.report):
        return _make_cache_result(found.cache, base, job, warnings)
    student = StudentResult(
        run=run_dir,
        perplexity=report.get("student_perplexity"),
        perplexity_before=report.get("student_perplexity_before"),
        teacher_perplexity=report.get("teacher_perplexity"),
        bits_per_byte=report.get("student_bits_per_byte"),
        kl=report.get("validation_kl"),
        agreement=report.get("validation_agreement"),
        job=job,
        report=report,
        warnings=warnings,
    )
    if not found.cache:
        return student
    cached = _make_cache_result(found.cache, base, job, warnings)
    return DistillationResult(**vars(student), cached=cached)


def _make_cache_result(
    summary: Mapping[str, Any], home: Path, job: JobConfig, warnings: tuple[str, ...]
) -> CacheResult:
    keys = ("fingerprint", "bytes_per_token", "entries_per_token", "tokens", "reused")
    return CacheResult(
        folder=find_caches(home, None) / summary["fingerprint"],
        job=job,
        report=summary,
        warnings=warnings,
        **{key: summary[key] for key in keys},
    )


def _find_folder(out: Named | None, default: Path) -> Path:
    return default if out is None else Path(out).expanduser().resolve()


def _find_cache(sealed: CacheResult | Named, home: Named | None) -> tuple[Path, str]:
    """Return the data folder and the fingerprint of a sealed cache; a folder names both."""
    name = os.fspath(sealed)
    if FINGERPRINT.fullmatch(name):
        return find_home(home), name
    folder = Path(name).expanduser().resolve()
    if folder.parent.name == "caches" and FINGERPRINT.fullmatch(folder.name):
        return find_home(home if home is not None else folder.parent.parent), folder.name
    detail = f"{name!r} is neither a fingerprint nor the folder of a cache."
    remedy = "Give the result of kd.build_cache, or the 32 digits that `kd cache ls` shows."
    raise ConfigError([Problem("/cache/fingerprint", detail, remedy)])
