"""Errors of the API, as problem documents."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kd.client.wire.jobs import Status
from kd.client.wire.view import View


class FieldProblem(View):
    """One wrong field of a request."""

    pointer: str
    """JSON pointer into the body; empty if the problem is elsewhere."""
    detail: str
    remedy: str = ""


class QuotaProblem(View):
    """The quota that a request would exceed."""

    what: Literal["open_jobs", "record_bytes", "bytes"]
    """open_jobs and record_bytes are quotas of a key, bytes of a team."""
    limit: float
    used: float
    frees_up: str = Field(description="What frees the quota.")


class ProblemDetails(View):
    """An error, by RFC 9457."""

    type: str
    title: str
    status: int
    detail: str
    remedy: str = ""
    instance: str
    errors: list[FieldProblem] = Field(default_factory=list)
    help: str = Field(description="The entry of this error in the documentation.")
    request_id: str | None = Field(None, description="The id of the request in the server's log.")
    job_status: Status | None = None
    """For a refused action: the job's status, which forbids it."""
    allowed: list[str] | None = None
    """For a refused action: the actions that the status allows."""
    quota: QuotaProblem | None = None
    """For a job above a quota: which quota, how much of it is used, and what frees it."""
