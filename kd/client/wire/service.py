"""The service itself: its workers, models, limits and version."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import Field

from kd.client.wire.view import View


class Device(View):
    """The device of a worker."""

    kind: Literal["cpu", "cuda"] = "cpu"
    name: str = ""
    index: str = Field("", description="Numbers of the GPUs, for example 0 or 0,1; empty for cpu.")
    count: int = Field(0, description="Number of GPUs.")
    memory_bytes: int = Field(0, description="Memory of each GPU, or of the host.")
    price: float | None = None
    """Price of an hour of one device; null if the operator has set none."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all GPUs, or of the host; 0 if they are unknown."""
        return self.memory_bytes * max(self.count, 1)

    def covers(self, gpus: int | None, memory: int | None) -> bool:
        """Whether it has the resources of a job; None = any. Unknown memory counts as enough."""
        return (gpus or 0) <= self.count and (memory or 0) <= (self.memory_bytes or 1 << 62)


class WorkerState(View):
    """A worker, as its own heartbeat describes it."""

    id: str
    host: str = ""
    pid: int = 0
    stages: list[str] = Field(default_factory=list, description="Queues that the worker serves.")
    device: Device = Field(default_factory=Device)
    job: str | None = Field(None, description="The worker's present job; null while idle.")
    attempt: int | None = None
    helping: bool = False
    """Whether it helps with the capture of a job that another worker holds."""
    stopping: bool = False
    version: str = ""
    started_at: datetime | None = None
    beat_at: datetime | None = Field(None, description="Time of the last heartbeat.")


class Worker(WorkerState):
    """A worker, by its last heartbeat."""

    busy: bool
    """Whether it has a job. Only a caller who may see the job gets its id."""
    beat_age_seconds: float | None = Field(None, description="Seconds since its last heartbeat.")


class WorkerList(View):
    """The workers with a heartbeat in the last 30 seconds."""

    data: list[Worker]


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
    validations_a_minute: int
    """Validations and dry runs a minute; each is also a changing request."""
    event_streams: int = Field(description="Event streams open at one time.")
    body_bytes: int = Field(description="Bytes of the body of one request.")


class ModelList(View):
    """The models that jobs may name, and the limits of the caller."""

    restricted: bool = Field(description="Whether only these are allowed; otherwise any model is.")
    data: list[ModelEntry]
    limits: Limits


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


class Health(View):
    """The service answers."""

    status: Literal["ok"] = "ok"


class Ready(View):
    """The service accepts jobs."""

    status: Literal["ready"] = "ready"
    warnings: list[str] = Field([], description="What an operator should look at.")
