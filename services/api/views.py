"""What only the API answers, as types; the job itself and whatever the record holds are in ``services.schemas``."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from services.schemas import JobEstimate, ProblemDocument, Status, View, WorkerState


class ProblemDetails(ProblemDocument):
    """An error, by RFC 9457."""

    request_id: str | None = Field(None, description="The request, as the server's log names it.")
    job_status: Status | None = Field(None, description="Of a refused transition: the status that forbids it.")
    allowed: list[str] | None = Field(None, description="Of a refused transition: what the status allows.")


# ---------------------------------------------------------------------- a job, before it is taken


class MemoryEstimate(View):
    """Bytes that models take on a device, at least: activations and the framework come on top of it."""

    teacher_bytes: int | None = Field(None, description="The teacher's weights; null where none runs or is known.")
    student_parameters: int | None = Field(None, description="Null where the student's shape is not known.")
    student_bytes: int | None = Field(None, description="Weights, gradients and the optimiser's state, in float32.")


class JobPlan(View):
    """What a job would be and need, were it posted."""

    stages: list[str] = Field(description="The stages that it runs, in order.")
    config: dict[str, Any] = Field(description="The job with its defaults filled in.")
    capture: JobEstimate | None = Field(None, description="Null where nothing is captured or the text is not at hand.")
    steps: int | None = Field(None, description="Optimiser steps; null without training, or where not known.")
    tokens: int | None = Field(None, description="Tokens that training reads.")
    memory: MemoryEstimate
    free_bytes: int = Field(description="Bytes left on the disk of the data folder.")
    warnings: list[str] = Field(default_factory=list, description="What is allowed, but will not end well.")


# ---------------------------------------------------------------------- what happens to a job


class JobEvent(View):
    """Something that happened to a job."""

    id: str = Field(description="Its place in the job's stream: milliseconds, a dash, a number.")
    ts: datetime = Field(description="When, by the server's clock.")
    type: str = Field(description="status, stage, progress, metrics, evaluation, checkpoint, artifact, warning, ...")
    data: dict[str, Any]


class JobEvents(View):
    """A page of events, oldest first."""

    data: list[JobEvent]
    has_more: bool = Field(description="Whether there are others after these already.")
    next_after: str = Field(description="Give it as ?after= to get what follows.")


class MetricSeries(View):
    """One metric over the steps; points where it was not known are left out."""

    name: str
    steps: list[int]
    values: list[float]
    points: int = Field(description="Points before they were thinned out.")


class MetricsHistory(View):
    """The history of a job's metrics."""

    series: list[MetricSeries]
    last_step: int | None = Field(None, description="Give it as ?after_step= to get what follows.")
    thinning: Literal["min-max"] = Field(
        "min-max", description="Of each of equally wide spans of steps the lowest and the highest point are kept."
    )


class CheckpointFile(View):
    """One file of a checkpoint."""

    name: str
    bytes: int
    sha256: str | None = Field(None, description="As it was when it was written; null for the state itself.")
    url: str


class Checkpoint(View):
    """A checkpoint of a job's training."""

    step: int
    created_at: datetime
    bytes: int = Field(description="All of its files.")
    sha256: str = Field(description="Of its state, which holds the digests of all other files.")
    metrics: dict[str, float | None] = Field(description="The last evaluation before it.")
    is_best: bool = Field(description="Whether it has the lowest validation loss so far.")
    is_last: bool = Field(description="Whether it is the newest.")
    files: list[CheckpointFile]


class CheckpointList(View):
    """The checkpoints that a job has kept, oldest first."""

    data: list[Checkpoint]


class Artifact(View):
    """A file that a job has produced."""

    name: str = Field(description="As in the job's artifacts; a file of a folder is folder/file.")
    bytes: int
    media_type: str
    modified_at: datetime
    sha256: str | None = Field(None, description="Null until somebody has fetched the file: it is its ETag then.")
    url: str


class ArtifactList(View):
    """The files that a job has produced."""

    data: list[Artifact]


# ---------------------------------------------------------------------- the service


class ModelEntry(View):
    """A model that jobs may name."""

    model: str = Field(description="Hub id or folder.")
    revision: str | None = Field(None, description="The only revision allowed; null = any.")


class Limits(View):
    """What the caller may do at most."""

    open_jobs: int = Field(description="Jobs that have not ended.")
    record_bytes: int = Field(description="Of the records of all jobs, ended ones too.")
    posts_a_minute: int
    gets_a_minute: int
    event_streams: int = Field(description="Open at a time.")
    body_bytes: int = Field(description="Of one request.")


class ModelList(View):
    """The models that jobs may name, and the limits of the caller."""

    restricted: bool = Field(description="Whether only these models are allowed; else any that is found.")
    data: list[ModelEntry]
    limits: Limits


class Worker(WorkerState):
    """A worker, as it was last heard of."""

    busy: bool = Field(description="Whether it has a job; which one is told to who may see that.")
    beat_age_seconds: float | None = Field(None, description="Seconds since it was last heard of.")


class WorkerList(View):
    """The workers heard of within the last half minute."""

    data: list[Worker]


class Version(View):
    """Which version of what answers."""

    name: Literal["potstill"] = "potstill"
    version: str
    api: Literal["v1"] = "v1"
    record_format: int = Field(description="Of the records in the job store.")


class Ready(View):
    """The service takes jobs."""

    status: Literal["ready"] = "ready"
