"""A closer look at a finished student: whatever of teacher, baseline, samples, tasks and pictures the job asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kd import models
from kd.batches import Source
from kd.config.job import JobConfig
from kd.config.teacher import TeacherConfig
from kd.errors import ConfigError, Problem, TokenizerMismatch
from kd.evaluation.baseline import starting_student, train_baseline
from kd.evaluation.comparison import TEACHER, Reader, compare, facts
from kd.evaluation.plots import draw
from kd.evaluation.samples import write_samples
from kd.evaluation.tasks import require_harness, run_tasks
from kd.evaluation.text import held_out_bytes
from kd.metrics import read_metrics
from kd.precision import pick_device
from kd.progress import SILENT, Monitor

BEFORE, STUDENT, BASELINE = "student before training", "student", "cross-entropy only"
DEFAULT_BATCH = 8


@dataclass(frozen=True)
class Run:
    """Where pictures go, the student's tokenizer, who listens, and where the training's files lie if elsewhere."""

    folder: Path
    tokenizer: PreTrainedTokenizerBase
    monitor: Monitor = SILENT
    trained_in: Path | None = None

    @property
    def training(self) -> Path:
        """The folder with metrics.jsonl, and with the baseline's checkpoints."""
        return self.trained_in or self.folder


def require_possible(config: JobConfig) -> None:
    """Raise ``ConfigError`` naming what ``config.evaluation`` asks for and cannot have; before a run is the time."""
    wanted, problems = config.evaluation, []
    if wanted.teacher and (config.teacher is None or config.teacher.backend != "local"):
        problems.append(
            Problem(
                "/evaluation/teacher",
                "a teacher that runs here is needed, but "
                + ("there is no teacher." if config.teacher is None else "teacher.backend is http."),
                "Name its folder in teacher.model, or set evaluation.teacher to false.",
            )
        )
    if wanted.baseline and (config.student is None or config.train is None):
        detail = "a baseline is trained, but the job has no student or no train section."
        problems.append(Problem("/evaluation/baseline", detail, "Give both, or set evaluation.baseline to false."))
    if problems:
        raise ConfigError(problems)
    if wanted.tasks:
        require_harness()


def look_closer(
    config: JobConfig, source: Source, student: PreTrainedModel, run: Run, with_start: bool
) -> dict[str, Any]:
    """What a report has under ``evaluation``, and the names of the pictures, drawn into the run's folder.

    ``with_start``: measure the student as it was before training too. Raises ``ConfigError`` for what is impossible.
    """
    require_possible(config)
    students = _students(config, source, student, run, with_start)
    teacher = _teacher(config.teacher, run) if config.evaluation.teacher else None
    run.monitor.emit("stage", stage="train", phase="measuring on the held-out text")
    found = measure_models(config, source, students, teacher, run.tokenizer)
    found |= _shown(config, student, teacher, run)
    return {"evaluation": found, "plots": _pictures(config, found["models"], run)}


def _students(
    config: JobConfig, source: Source, student: PreTrainedModel, run: Run, with_start: bool
) -> dict[str, PreTrainedModel]:
    """The student, and what it is compared with besides the teacher, in the order in which they came to be."""
    students = {STUDENT: student}
    if with_start:
        students = {BEFORE: starting_student(config, run.tokenizer), **students}
    if config.evaluation.baseline:
        students[BASELINE] = train_baseline(config, source, run.tokenizer, run.training, run.monitor)
    return students


def _shown(config: JobConfig, student: PreTrainedModel, teacher: PreTrainedModel | None, run: Run) -> dict[str, Any]:
    """Samples of student and teacher, and what the student makes of the tasks, where they are asked for."""
    options, found = config.evaluation, dict[str, Any]()
    if options.prompts:
        speakers = {STUDENT: student, **({TEACHER: teacher} if teacher is not None else {})}
        found["samples"] = {name: write_samples(model, run.tokenizer, options) for name, model in speakers.items()}
    if options.tasks:
        run.monitor.emit("stage", stage="train", phase="running lm-eval")
        found["tasks"] = run_tasks(student, run.tokenizer, options.tasks, _batch_size(config))
    return found


def _pictures(config: JobConfig, measured: Mapping[str, Mapping[str, Any]], run: Run) -> list[str]:
    if not config.evaluation.plots:
        return []
    return draw(run.folder, measured, read_metrics(run.training / "metrics.jsonl"))


def measure_models(
    config: JobConfig,
    source: Source,
    students: Mapping[str, PreTrainedModel],
    teacher: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:
    """Tokens and bytes of the held-out text, and what every model makes of it; no models where nothing is held out."""
    device, vocabulary = pick_device(), models.vocabulary_size(tokenizer)
    readers = {name: Reader.of(model, vocabulary, device) for name, model in students.items()}
    listener = Reader.of(teacher, vocabulary, device) if teacher is not None else None
    for reader in (*readers.values(), *([listener] if listener is not None else [])):
        reader.require_fit(config.data.sequence_length, config.data.packing)
    sums = compare(readers, listener, source, _batch_size(config), config.evaluation)
    size = held_out_bytes(source, tokenizer)
    return {
        "tokens": int(next(iter(sums.values())).count_C.sum()) if sums else 0,
        "bytes": size,
        "top_k": config.evaluation.top_k,
        "models": {name: facts(each, size, teacher is not None and name != TEACHER) for name, each in sums.items()},
    }


def _batch_size(config: JobConfig) -> int:
    return config.train.batch_size if config.train is not None else DEFAULT_BATCH


def _teacher(config: TeacherConfig | None, run: Run) -> PreTrainedModel:
    """The teacher, running, if it shares the student's tokenizer."""
    assert config is not None, "require_possible refuses an evaluation with no teacher"
    run.monitor.emit("stage", stage="train", phase="loading the teacher")
    folder = models.resolve(config.model, config.revision, config.gguf_file or "*.safetensors")
    own = models.load_tokenizer(folder, config.gguf_file, models.allowed_remote_code(config))
    if models.probe(own, models.PROBES) != models.probe(run.tokenizer, models.PROBES):
        raise TokenizerMismatch(
            f"{config.model} and the student do not encode text alike, so that their probabilities cannot be compared.",
            "Give the teacher that the student was distilled from, or one with its tokenizer.",
        )
    return models.load_teacher(config, folder, pick_device())
