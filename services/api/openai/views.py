"""The bodies and answers of OpenAI's API for files and fine-tuning, with the method distillation.

The names of fields are OpenAI's. Times are whole seconds since 1970.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kd.client.wire.view import View

FineTuningStatus = Literal["queued", "running", "paused", "succeeded", "failed", "cancelled"]


# ---------------------------------------------------------------------- files


class FileObject(View):
    """A file of the caller's team."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str = Field(description="The name that was sent; a name for people.")
    purpose: Literal["fine-tune", "fine-tune-results"]
    status: Literal["processed"] = Field("processed", description="Its content was checked.")
    rows: int | None = Field(None, description="Lines that hold an example.")
    format: str | None = Field(
        None, description="What its lines hold, as a value of the field data.format of a job."
    )
    path: str | None = Field(
        None, description="Its path on the server: a job of the team may name it in data.train."
    )


class FileList(View):
    """Files of the caller's team."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    has_more: bool
    first_id: str | None = None
    last_id: str | None = Field(None, description="Send it as ?after= to get the next files.")


class FileDeleted(View):
    """A file is deleted."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


# ---------------------------------------------------------------------- requests


class _Request(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Distillation(_Request):
    """The teacher, and the settings of the job."""

    teacher: str | dict[str, Any] = Field(
        description="The teacher's folder or hub id, or the section teacher of a job."
    )
    hyperparameters: dict[str, Any] = Field(
        default_factory=dict,
        description="Fields of a job by section, for example "
        '{"train": {"max_steps": 100}, "loss": {"alpha": 0.2}}. Without epochs or max_steps the '
        "text is read once.",
    )


class DistillationMethod(_Request):
    """The method of a job."""

    type: Literal["distillation"]
    distillation: Distillation


class FineTuningRequest(_Request):
    """A job that distils a teacher into the model."""

    model: str = Field(
        min_length=1,
        description="The student: a folder, a hub id, or `new` if the hyperparameters have "
        "student.init or student.from_teacher.",
    )
    training_file: str = Field(description="The id of a file of the team.")
    method: DistillationMethod
    validation_file: str | None = Field(
        None,
        description="The id of the held-out file; null: a share of the training file is held out.",
    )
    suffix: str | None = Field(None, description="The name of the job.")
    seed: int | None = Field(None, description="The seed, which is train.seed of the job.")
    metadata: dict[str, str] | None = Field(None, description="The labels of the job.")


# ---------------------------------------------------------------------- jobs


class FineTuningError(View):
    """Why a job failed."""

    code: str
    message: str
    param: str | None = None


class Hyperparameters(View):
    """The settings of the training that OpenAI has names for."""

    n_epochs: int | Literal["auto"]
    batch_size: int | Literal["auto"]
    learning_rate_multiplier: Literal["auto"] = "auto"


class FineTuningJob(View):
    """A job of distillation."""

    id: str = Field(description="The same id as in /jobs.")
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    created_at: int
    finished_at: int | None = None
    estimated_finish: int | None = Field(None, description="While it runs, if it is known.")
    status: FineTuningStatus
    model: str = Field(description="The student's model; empty for a student with random weights.")
    fine_tuned_model: str | None = Field(
        None, description="The student's folder on the server; null until the job has succeeded."
    )
    training_file: str = Field(description="The id of the file, or the first text of the job.")
    validation_file: str | None = None
    trained_tokens: int | None = Field(
        None,
        description="Tokens that the last process of the training has learned; null until the job "
        "has succeeded.",
    )
    error: FineTuningError | None = Field(None, description="Null unless the job failed.")
    result_files: list[str] = Field(
        description="Once the job has succeeded, the id of a file with its metrics by step."
    )
    hyperparameters: Hyperparameters
    method: dict[str, Any] = Field(
        description="The type, the teacher, and the sections of the job with their defaults."
    )
    seed: int
    metadata: dict[str, str] = Field(description="The labels of the job.")
    organization_id: str = Field(description="The team.")


class FineTuningJobList(View):
    """A page of jobs, newest first."""

    object: Literal["list"] = "list"
    data: list[FineTuningJob]
    has_more: bool


class FineTuningEvent(View):
    """An event of a job."""

    id: str
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    created_at: int
    level: Literal["info", "warn", "error"]
    message: str
    type: Literal["message", "metrics"]
    data: dict[str, Any] = Field(description="The data of the event, as /jobs/{id}/events has it.")


class FineTuningEventList(View):
    """A page of events, newest first."""

    object: Literal["list"] = "list"
    data: list[FineTuningEvent]
    has_more: bool


class CheckpointMetrics(View):
    """The metrics of a checkpoint."""

    step: int
    full_valid_loss: float | None = Field(
        None, description="Loss on the held-out text at the last evaluation before it."
    )


class FineTuningCheckpoint(View):
    """A checkpoint of a job."""

    id: str
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    created_at: int
    fine_tuned_model_checkpoint: str = Field(description="The path of the API that shows it.")
    fine_tuning_job_id: str
    step_number: int
    metrics: CheckpointMetrics


class FineTuningCheckpointList(View):
    """A page of checkpoints, newest first."""

    object: Literal["list"] = "list"
    data: list[FineTuningCheckpoint]
    has_more: bool
    first_id: str | None = None
    last_id: str | None = None
