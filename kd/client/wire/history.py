"""The events and the metrics of a job."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from kd.client.wire.view import View


class JobEvent(View):
    """An event of a job."""

    id: str = Field(description="Its place in the job's stream: milliseconds, a dash and a number.")
    ts: datetime = Field(description="The time, by the server's clock.")
    type: str = Field(
        description="status, stage, progress, metrics, evaluation, checkpoint, artifact, warning, "
        "..."
    )
    step: int | None = Field(
        None,
        description="The optimiser step of the run at the time; null before the first one, and in "
        "a stream of events.",
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


class JobCurve(View):
    """A few points of a job's loss, for a picture as small as a word."""

    job: str
    steps: list[int]
    values: list[float] = Field(description="Loss in nats per token.")


class JobCurves(View):
    """The curves of several jobs; those that are unknown or have no loss yet are left out."""

    data: list[JobCurve]
