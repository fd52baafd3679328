"""What teams use, and what callers did."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import ConfigDict, Field

from kd.client.wire.view import View


class QuotaUse(View):
    """What a team has used of a quota."""

    limit: float | None = Field(description="Null = no limit.")
    used: float
    left: float | None = Field(description="Null = no limit.")
    frees_up: str = Field(description="When or how the quota is freed.")
    resets_at: datetime | None = None
    """Time at which nothing is used any more; null if no time frees it up."""
    measured_at: datetime | None = None
    """Time of the measurement; null if it is exact, or not measured yet."""


class DiskUse(View):
    """Bytes on the disk of a team; together they are what its quota of bytes limits."""

    caches: int = Field(0, description="Caches that its jobs made or read.")
    runs: int = Field(0, description="Run folders of its jobs: checkpoints, students, logs.")
    files: int = Field(0, description="Files that it uploaded.")


class TeamAccount(View):
    """What a team uses of the devices and the disk, and its quotas."""

    team: str
    devices: int = Field(description="Devices that its jobs hold now.")
    queued_jobs: int
    recent_device_seconds: float = Field(
        description="Device-seconds of the past; each counts half as much after "
        "KD_FAIR_SHARE_HALF_LIFE_SECONDS. A free device goes to the team that holds the fewest "
        "devices, then to the one with the least of this."
    )
    device_seconds: QuotaUse = Field(description="Device-seconds of this day, in UTC.")
    bytes: QuotaUse = Field(description="Bytes of its caches, runs and files on the disk.")
    disk: DiskUse = Field(default_factory=DiskUse, description="What these bytes are.")
    reason: str | None = Field(None, description="Why its queued jobs wait; null if they do not.")


class TeamList(View):
    """The account of the caller's team; for an admin those of all teams."""

    data: list[TeamAccount]


class AuditEntry(View):
    """What somebody did, or a request that was refused. Some actions have more members."""

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
        "backup.restore, run.remove, retention.remove, auth.failed, auth.forbidden."
    )
    target: str = Field("", description="The job, cache, key or path.")
    outcome: Literal["done", "refused"] = "done"
    team: str | None = None
    key: str | None = Field(None, description="The id of the key, as `kd keys ls` shows it.")
    request_id: str | None = None
    address: str | None = Field(None, description="Address of a refused client.")
    why: str | None = Field(None, description="Why a request was refused.")
    left_out: int | None = None
    """Refused requests before this one that were not written, because there were too many."""


class AuditList(View):
    """A page of the audit log, newest first."""

    data: list[AuditEntry]
    has_more: bool
    next_cursor: str | None = Field(None, description="Value of ?cursor= for the next page.")
