"""The events and the metrics of a job, and the list of what runs have measured."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import Field

from cache.json_object import Json
from kd.client.wire.view import View


class JobEvent(View):
    """An event of a job."""

    id: str = Field(description="Its place in the job's stream: milliseconds, a dash and a number.")
    ts: datetime = Field(description="The time, by the server's clock.")
    type: str
    """status, stage, progress, metrics, evaluation, checkpoint, artifact, warning, ..."""
    step: int | None = Field(
        None,
        description="The optimiser step of the run at the time; null before the first one, and in "
        "a stream of events.",
    )
    data: Json


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
    last_step: int | None = None
    """Send it as ?after_step= to get the next points."""
    thinning: Literal["min-max"] = "min-max"
    """The steps are cut into equal spans; each keeps its lowest and highest point."""


class JobCurve(View):
    """A few points of a job's loss, for a picture as small as a word."""

    job: str
    steps: list[int]
    values: list[float] = Field(description="Loss in nats per token.")


class JobCurves(View):
    """The curves of several jobs; those that are unknown or have no loss yet are left out."""

    data: list[JobCurve]


class RunEntry(View):
    """A run on the server's disk, and what it has measured. Null = not known.

    Bits per byte compare only runs with the same held-out text.
    """

    name: str = Field(description="The folder: the id of its job, or the name of `kd run`.")
    kind: str | None
    state: str = Field(description="running, finished or stopped.")
    teacher: str | None
    student: str | None = Field(description="The model that it began from; new = random weights.")
    parameters: int | None = Field(description="Parameters of the student.")
    bits_per_byte: float | None
    kl: float | None = Field(description="KL(teacher || student), nats per held-out token.")
    seconds: float | None = Field(description="Seconds of the training.")
    bytes: int = Field(description="Bytes of the folder.")
    began: datetime


class RunList(View):
    """The runs whose folders are on the server's disk, the newest first."""

    data: list[RunEntry]
