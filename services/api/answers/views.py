"""The types of answers that only the API makes.

The types of the job record are in ``services.store.schemas``. Their docstrings and descriptions
are the text of docs/api.md.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import ConfigDict, Field

from services.store.schemas import (
    Cost,
    JobEstimate,
    ProblemDocument,
    Status,
    TeamAccount,
    View,
    WorkerState,
)


class QuotaProblem(View):
    """The quota that a request would exceed."""

    what: Literal["open_jobs", "record_bytes", "bytes"] = Field(
        description="open_jobs and record_bytes are quotas of a key, bytes of a team."
    )
    limit: float
    used: float
    frees_up: str = Field(description="By what the quota frees up.")


class OpenAIError(View):
    """An error in the form of OpenAI's API."""

    message: str = Field(description="What is wrong, and what to do about it.")
    type: str = Field(
        description="invalid_request_error, authentication_error, permission_error, "
        "rate_limit_error, insufficient_quota or server_error."
    )
    param: str | None = Field(description="The first wrong field; null if no field is wrong.")
    code: str = Field(description="The end of the problem's type, with underscores.")


class ProblemDetails(ProblemDocument):
    """An error, by RFC 9457."""

    request_id: str | None = Field(None, description="The id of the request in the server's log.")
    job_status: Status | None = Field(
        None, description="For a refused action: the job's status, which forbids it."
    )
    allowed: list[str] | None = Field(
        None, description="For a refused action: the actions that the status allows."
    )
    quota: QuotaProblem | None = Field(
        None, description="For a job above a quota: which, how much is used, what frees it up."
    )
    error: OpenAIError | None = Field(
        None, description="Below /files and /fine_tuning: the same for OpenAI's clients."
    )


# ---------------------------------------------------------------------- plans of jobs


class MemoryEstimate(View):
    """The least bytes that the models take on a device; activations and the framework need more."""

    teacher_bytes: int | None = Field(
        None, description="The teacher's weights; null if none runs, or if its size is unknown."
    )
    student_parameters: int | None = Field(
        None, description="Null if the student's shape is unknown."
    )
    student_bytes: int | None = Field(
        None, description="Weights, gradients and optimiser state in float32."
    )


class JobPlan(View):
    """A job would do and need this if it were created."""

    stages: list[str] = Field(description="The stages of the job, in order.")
    config: dict[str, Any] = Field(description="The job with its defaults filled in.")
    capture: JobEstimate | None = Field(
        None, description="Null if nothing is captured, or if the server cannot read the text."
    )
    steps: int | None = Field(
        None, description="Optimiser steps; null without training, or if unknown."
    )
    tokens: int | None = Field(None, description="Tokens that training will read.")
    memory: MemoryEstimate
    training: dict[str, Any] | None = Field(
        None,
        description="Settings that train the student on the devices, the best first, with memory "
        "by part, time and cost, or by how much none fits and what to change: as `kd plan --json` "
        "prints it. What autograd keeps is told by the shapes of the student's tensors, and not "
        "measured. Null without a training or a device to plan for, and where only a loaded model "
        "tells the student's shape.",
    )
    free_bytes: int = Field(description="Bytes left on the disk of the data folder.")
    cost: Cost | None = Field(
        None, description="Estimated cost; null without a price, or if no time is known."
    )
    account: TeamAccount | None = Field(
        None, description="What the caller's team uses, and its quotas."
    )
    warnings: list[str] = Field(
        default_factory=list, description="Valid settings that are probably mistakes."
    )


# ---------------------------------------------------------------------- history and files


class JobEvent(View):
    """An event of a job."""

    id: str = Field(description="Its place in the job's stream: milliseconds, a dash and a number.")
    ts: datetime = Field(description="The time, by the server's clock.")
    type: str = Field(
        description="status, stage, progress, metrics, evaluation, checkpoint, artifact, warning, "
        "..."
    )
    data: dict[str, Any]


class JobEvents(View):
    """A page of events, oldest first."""

    data: list[JobEvent]
    has_more: bool = Field(description="Whether there are newer events already.")
    next_after: str = Field(description="Send it as ?after= to get the next events.")


class MetricSeries(View):
    """One metric over the steps; steps without a value are left out."""

    name: str
    steps: list[int]
    values: list[float]
    points: int = Field(description="Points before the thinning.")


class MetricsHistory(View):
    """The history of a job's metrics."""

    series: list[MetricSeries]
    last_step: int | None = Field(
        None, description="Send it as ?after_step= to get the next points."
    )
    thinning: Literal["min-max"] = Field(
        "min-max",
        description="The steps are cut into equal spans; each keeps its lowest and highest point.",
    )


class CheckpointFile(View):
    """One file of a checkpoint."""

    name: str
    bytes: int
    sha256: str | None = Field(
        None, description="The sha256 at the time of writing; null for the state file itself."
    )
    url: str


class Checkpoint(View):
    """A checkpoint of a job's training."""

    step: int
    created_at: datetime
    bytes: int = Field(description="The size of all its files.")
    sha256: str = Field(
        description="The sha256 of its state file, which holds the digests of all other files."
    )
    metrics: dict[str, float | None] = Field(
        description="The last evaluation before this checkpoint."
    )
    is_best: bool = Field(description="Whether it has the lowest validation loss so far.")
    is_last: bool = Field(description="Whether it is the newest.")
    files: list[CheckpointFile]


class CheckpointList(View):
    """The checkpoints of a job that still exist, oldest first."""

    data: list[Checkpoint]


class Artifact(View):
    """A file that a job produced."""

    name: str = Field(
        description="The name in the job's artifacts; a file inside a folder is folder/file."
    )
    bytes: int
    media_type: str
    modified_at: datetime
    sha256: str | None = Field(
        None, description="Null until the file was fetched once; from then on it is the ETag."
    )
    url: str


class ArtifactList(View):
    """The files that a job produced."""

    data: list[Artifact]


# ---------------------------------------------------------------------- the service


class ModelEntry(View):
    """A model that jobs may name."""

    model: str = Field(description="Hub id or folder.")
    revision: str | None = Field(None, description="The only revision that is allowed; null = any.")


class Limits(View):
    """The limits of the caller."""

    open_jobs: int = Field(description="Jobs of the key that have not ended.")
    record_bytes: int = Field(description="Bytes of the records of all jobs, including ended ones.")
    posts_a_minute: int = Field(description="Requests a minute that change something.")
    gets_a_minute: int = Field(description="Requests a minute that only read.")
    validations_a_minute: int = Field(
        description="Validations and dry runs a minute; each is also a changing request."
    )
    event_streams: int = Field(description="Event streams open at one time.")
    body_bytes: int = Field(description="Bytes of the body of one request.")


class ModelList(View):
    """The models that jobs may name, and the limits of the caller."""

    restricted: bool = Field(
        description="Whether only these models are allowed; otherwise any model is."
    )
    data: list[ModelEntry]
    limits: Limits


class AuditEntry(View):
    """What somebody did, or was refused. Some actions have further members."""

    model_config = ConfigDict(extra="allow")

    id: int = Field(description="Grows with every entry; microseconds.")
    time: datetime
    actor: str = Field(
        description="Owner of the key; os: and a user for a command on the server; unknown for a "
        "request with an unknown key."
    )
    action: str = Field(
        description="job.create, job.cancel, job.pause, job.resume, job.retry, job.delete, "
        "job.adopt, cache.delete, cache.export, student.download, checkpoint.download, "
        "file.create, file.delete, key.create, key.revoke, key.quota, backup.create, "
        "backup.restore, auth.failed, auth.forbidden."
    )
    target: str = Field("", description="The job, cache, key or path.")
    outcome: Literal["done", "refused"] = "done"
    team: str | None = None
    key: str | None = Field(None, description="The id of the key, as `kd keys ls` shows it.")
    request_id: str | None = None
    address: str | None = Field(None, description="Address of a refused client.")
    why: str | None = Field(None, description="Why a request was refused.")
    left_out: int | None = Field(
        None, description="Refused requests before this one that were too many to be written."
    )


class AuditList(View):
    """A page of the audit log, newest first."""

    data: list[AuditEntry]
    has_more: bool
    next_cursor: str | None = Field(None, description="Value of ?cursor= for the next page.")


class Worker(WorkerState):
    """A worker, by its last heartbeat."""

    busy: bool = Field(
        description="Whether it has a job. Only a caller who may see the job gets its id."
    )
    beat_age_seconds: float | None = Field(None, description="Seconds since its last heartbeat.")


class WorkerList(View):
    """The workers with a heartbeat in the last 30 seconds."""

    data: list[Worker]


class Version(View):
    """The version of the server."""

    name: Literal["potstill"] = "potstill"
    version: str
    api: Literal["v1"] = "v1"
    record_format: int = Field(description="The format of the records in the job store.")
    file_view: str = Field(
        description=(
            "A digest of the machine and its mounts. For a client with the same digest, a path "
            "means the same file."
        )
    )


class Ready(View):
    """The service accepts jobs."""

    status: Literal["ready"] = "ready"
