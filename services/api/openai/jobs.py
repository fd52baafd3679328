"""Jobs between the two forms: from OpenAI's request to a ``JobConfig``, and from a job back.

OpenAI                                    job
model                                     student.model
training_file, validation_file            data.train, data.validation, data.format
suffix, metadata                          name, labels
seed                                      train.seed
method.distillation.teacher               teacher
method.distillation.hyperparameters       every other field, by section
"""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from kd.client.wire.files import Checkpoint
from kd.client.wire.jobs import Job, Status
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.errors import ConfigError, Problem
from services.api.openai.views import (
    CheckpointMetrics,
    FineTuningCheckpoint,
    FineTuningError,
    FineTuningEvent,
    FineTuningJob,
    FineTuningRequest,
    FineTuningStatus,
    Hyperparameters,
)
from services.store.training_files import TrainingFile, TrainingFiles

KIND = "distill"
METHOD = "distillation"
#: The field ``model`` of a student that ``student.init`` or ``student.from_teacher`` describes.
NEW_MODEL = "new"
#: The id of the file with the metrics of a job is this and the job's id.
RESULTS_PREFIX = "results-"
_SETTINGS = f"/method/{METHOD}/hyperparameters"
#: Fields of a job that another field of the request sets.
_TAKEN = {
    "/kind": "method",
    "/name": "suffix",
    "/labels": "metadata",
    "/teacher": f"method.{METHOD}.teacher",
    "/data/train": "training_file",
    "/data/validation": "validation_file",
    "/data/format": "training_file",
}
#: Pointers into a job -> pointers into the request; all others are hyperparameters.
_POINTERS = {
    "/student/model": "/model",
    "/data/train": "/training_file",
    "/data/validation": "/validation_file",
    "/data/format": "/training_file",
    "/name": "/suffix",
    "/labels": "/metadata",
    "/teacher": f"/method/{METHOD}/teacher",
}
_STATUSES: Mapping[Status, FineTuningStatus] = {
    "waiting": "queued",
    "queued": "queued",
    "running": "running",
    "cancelling": "running",
    "pausing": "running",
    "paused": "paused",
    "succeeded": "succeeded",
    "failed": "failed",
    "cancelled": "cancelled",
}
#: The sections of a job that its method shows.
_SHOWN = ("student", "data", "cache", "loss", "train", "evaluation")


# ---------------------------------------------------------------------- from a request to a job


def build_config(request: FineTuningRequest, files: TrainingFiles, team: str) -> JobConfig:
    """Return the job that the request describes.

    Raises ``ConfigError``, whose pointers lead into the request, with everything that is wrong.
    """
    settings = request.method.distillation.hyperparameters
    problems = [*_find_taken(settings)]
    training = _find_file(files, team, "training_file", request.training_file, problems)
    held_out = request.validation_file
    validation = held_out and _find_file(files, team, "validation_file", held_out, problems)
    if problems or training is None:
        raise ConfigError(problems)
    data: dict[str, Any] = {
        "train": [str(files.locate(team, training.id))],
        "format": training.form,
    }
    if isinstance(validation, TrainingFile):
        _require_same_form(training, validation)
        data["validation"] = [str(files.locate(team, validation.id))]
    try:
        return parse_config(_build_job(request, data))
    except ConfigError as error:
        raise translate_problems(error) from None


def _build_job(request: FineTuningRequest, data: Mapping[str, Any]) -> dict[str, Any]:
    teacher = request.method.distillation.teacher
    settings = request.method.distillation.hyperparameters
    student = {} if request.model == NEW_MODEL else {"model": request.model}
    job: dict[str, Any] = {
        **settings,
        "kind": KIND,
        "teacher": {"model": teacher} if isinstance(teacher, str) else teacher,
        "student": _merge(student, settings.get("student")),
        "data": _merge(data, settings.get("data")),
        "train": _complete_train(settings.get("train"), request.seed),
    }
    if request.suffix is not None:
        job["name"] = request.suffix
    if request.metadata is not None:
        job["labels"] = request.metadata
    return job


def _merge(first: Mapping[str, Any], second: Any) -> Any:
    """The two together. What is no mapping is kept, so that it is refused by its section."""
    return {**first, **second} if isinstance(second, Mapping) else second or dict(first)


def _complete_train(given: Any, seed: int | None) -> Any:
    train = _merge({}, given)
    if not isinstance(train, Mapping):
        return train
    if train.get("epochs") is None and train.get("max_steps") is None:
        train = {**train, "epochs": 1}
    return train if seed is None else {**train, "seed": seed}


def _find_taken(settings: Mapping[str, Any]) -> Iterable[Problem]:
    data = settings.get("data")
    given = {f"/{name}" for name in settings}
    given |= {f"/data/{name}" for name in data} if isinstance(data, Mapping) else set()
    for pointer in sorted(given & _TAKEN.keys()):
        detail = f"it is set by the field {_TAKEN[pointer]} of the request."
        yield Problem(_SETTINGS + pointer, detail, "Leave it out here.")


def _find_file(
    files: TrainingFiles, team: str, field: str, file_id: str, problems: list[Problem]
) -> TrainingFile | None:
    found = files.find(team, file_id)
    if found is None:
        detail = f"there is no file {file_id}."
        problems.append(
            Problem(f"/{field}", detail, "Upload it first; GET /files lists the files.")
        )
    return found


def _require_same_form(training: TrainingFile, validation: TrainingFile) -> None:
    if training.form != validation.form:
        detail = f"its lines have the form {validation.form}, those of training_file have"
        remedy = "Upload it in the form of training_file."
        raise ConfigError([Problem("/validation_file", f"{detail} {training.form}.", remedy)])


def translate_problems(error: ConfigError) -> ConfigError:
    """Return the error with pointers into the request in place of pointers into the job."""
    return ConfigError(
        [
            Problem(_translate_pointer(each.pointer), each.detail, each.remedy)
            for each in error.problems
        ]
    )


def _translate_pointer(pointer: str) -> str:
    for job, request in _POINTERS.items():
        if pointer == job or pointer.startswith(f"{job}/"):
            rest = pointer.removeprefix(job)
            # The request names one file where the job has a list.
            return request if request.endswith("_file") else request + rest
    return _SETTINGS + pointer if pointer else ""


# ---------------------------------------------------------------------- from a job to an answer


def describe_job(job: Job, files: TrainingFiles) -> FineTuningJob:
    """Return the job in OpenAI's form."""
    # The record of a job that cannot be read has no configuration.
    config = job.config
    train = config.get("train") or {}
    student = config.get("student") or {}
    data = config.get("data") or {}
    done = job.status == "succeeded"
    epochs = train.get("epochs")
    teacher = (config.get("teacher") or {}).get("model")
    return FineTuningJob(
        id=job.id,
        created_at=_to_seconds(job.created_at),
        finished_at=None if job.finished_at is None else _to_seconds(job.finished_at),
        estimated_finish=_estimate_finish(job),
        status=_STATUSES[job.status],
        model=student.get("model") or NEW_MODEL,
        fine_tuned_model=job.artifacts.get("student") if done else None,
        training_file=_name_text(data.get("train"), files) or "",
        validation_file=_name_text(data.get("validation"), files),
        trained_tokens=_count_tokens(job) if done else None,
        error=_describe_failure(job),
        result_files=[RESULTS_PREFIX + job.id] if done else [],
        hyperparameters=Hyperparameters(
            n_epochs=int(epochs) if epochs and epochs == int(epochs) else "auto",
            batch_size=train.get("batch_size") or "auto",
        ),
        method={
            "type": METHOD,
            METHOD: {
                "teacher": teacher,
                "hyperparameters": {name: config[name] for name in _SHOWN if name in config},
            },
        },
        seed=train.get("seed") or 0,
        metadata=job.labels,
        organization_id=job.team,
    )


def _to_seconds(moment: datetime) -> int:
    return int(moment.timestamp())


def _estimate_finish(job: Job) -> int | None:
    left = job.progress.eta_seconds
    return int(time.time() + left) if job.status == "running" and left is not None else None


def _name_text(sources: Sequence[Any] | None, files: TrainingFiles) -> str | None:
    """The id of the first text, or its name if it is no uploaded file; None without a text."""
    if not sources:
        return None
    first = sources[0]
    name = first if isinstance(first, str) else str(first.get("path", ""))
    return files.identify(name) or name


def _count_tokens(job: Job) -> int | None:
    tokens = (job.metrics.model_extra or {}).get("tokens", job.progress.tokens)
    return None if tokens is None else int(tokens)


def _describe_failure(job: Job) -> FineTuningError | None:
    if job.error is None:
        return None
    message = f"{job.error.detail} {job.error.remedy}".strip()
    return FineTuningError(code=job.error.type, message=message)


#: Types of events that hold numbers.
_METRICS = ("metrics", "evaluation", "temperature", "scalars")


def describe_event(place: str, kind: str, data: Mapping[str, Any]) -> FineTuningEvent:
    """Return an event in OpenAI's form; ``place`` is its id in the job's stream."""
    failed = kind == "status" and data.get("status") == "failed"
    return FineTuningEvent(
        id=place,
        created_at=int(place.partition("-")[0]) // 1000,
        level="error" if failed else "warn" if kind in ("warning", "alarm") else "info",
        message=_write_message(kind, data),
        type="metrics" if kind in _METRICS else "message",
        data=dict(data),
    )


def _write_message(kind: str, data: Mapping[str, Any]) -> str:
    if isinstance(said := data.get("message"), str):
        return said
    if kind == "status":
        return f"The job is {data.get('status')}."
    plain = [
        f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in data.items()
        if isinstance(value, str | int | float)
    ]
    return f"{kind}: {', '.join(plain)}" if plain else kind


def describe_checkpoint(job: Job, checkpoint: Checkpoint) -> FineTuningCheckpoint:
    """Return a checkpoint in OpenAI's form."""
    return FineTuningCheckpoint(
        id=f"{job.id}-{checkpoint.step}",
        created_at=_to_seconds(checkpoint.created_at),
        fine_tuned_model_checkpoint=f"{job.links.checkpoints}/{checkpoint.step}",
        fine_tuning_job_id=job.id,
        step_number=checkpoint.step,
        metrics=CheckpointMetrics(
            step=checkpoint.step, full_valid_loss=checkpoint.metrics.get("validation_loss")
        ),
    )


def write_metrics(points: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the metrics by step as CSV; a step without a value has an empty cell."""
    numbers = {
        name
        for point in points
        for name, value in point.items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }
    text = io.StringIO()
    table = csv.DictWriter(text, ["step", *sorted(numbers)], extrasaction="ignore")
    table.writeheader()
    table.writerows(points)
    return text.getvalue().encode()
