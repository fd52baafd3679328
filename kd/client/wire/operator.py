"""What the operator of a service sees: its keys, its storage, and its health."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from kd.client.wire.view import View


class KeyEntry(View):
    """An API key that is not revoked. Neither the key nor its digest is ever shown."""

    id: str = Field(description="A short id, by which the key can be revoked.")
    name: str = Field(description="Its owner.")
    team: str
    scopes: list[str]
    created_at: datetime | None = Field(None, description="Null if the key file does not say.")
    last_used_at: datetime | None = None
    """To the minute; null if it was not used since this has been recorded."""
    expires_at: datetime | None = Field(None, description="Null = never.")
    expired: bool = False


class KeyEntries(View):
    """The keys of the service, oldest first."""

    required: bool = Field(description="Whether requests need a key (KD_API_KEYS_FILE is set).")
    data: list[KeyEntry]


class DiskSpace(View):
    """A disk of the service."""

    total_bytes: int
    free_bytes: int
    free_files: int | None = None
    """How many more files the disk takes (inodes); null = any number."""
    floor_bytes: int = Field(description="Free bytes below which no job is accepted.")


class StoredItem(View):
    """A thing on the disk."""

    kind: str = Field(description="caches, texts, runs, files, checkpoints, ...")
    name: str = Field(description="Its fingerprint, its digest, or the id of its job or file.")
    bytes: int
    reason: str | None = Field(None, description="Why the retention rules name it.")
    age_seconds: float | None = Field(None, description="What the rule compares with its limit.")
    kept_by: str | None = Field(None, description="What needs it; null = nothing.")


class StoredKind(View):
    """All things of a kind."""

    kind: str
    items: int
    bytes: int
    largest: list[StoredItem] = Field(description="The largest ones, the largest first.")


class RetentionRule(View):
    """What the retention rules remove of a kind."""

    kind: str
    after_days: float | None = Field(None, description="Null = never.")
    keep: int | None = Field(None, description="Checkpoints that an ended job keeps; null = all.")


class StorageReport(View):
    """What is on the disk, and what `kd gc` would remove now."""

    disk: DiskSpace = Field(description="The disk of the data folder.")
    caches_disk: DiskSpace | None = None
    """The disk of the caches, where KD_STORE names a folder."""
    kinds: list[StoredKind]
    rules: list[RetentionRule] = Field(description="The rules that are set.")
    nightly_hour: int | None = None
    """Hour in UTC in which the service applies them; null = it does not."""
    removable: list[StoredItem] = Field(description="What `kd gc` would remove, the largest first.")
    removable_items: int
    removable_bytes: int
    protected: list[StoredItem]
    """What the rules name, but something needs; the largest first."""
    protected_items: int


class RedisHealth(View):
    """The job store."""

    version: str
    answer_seconds: float = Field(description="Time of one question and its answer.")
    clock_ahead_seconds: float = Field(description="How far its clock is ahead of the server's.")
    uptime_seconds: int
    clients: int
    memory_bytes: int
    memory_limit_bytes: int = Field(description="0 = no limit.")
    persistent: bool = Field(description="Whether each write goes to an append-only file.")


class QueueHealth(View):
    """The jobs that wait for a stage, and the workers that serve it."""

    stage: str
    waiting: int
    workers: int


class ServiceHealth(View):
    """The state of the service and of what it needs."""

    problems: list[str] = Field(description="What is wrong, in sentences; empty = nothing.")
    version: str
    python: str
    record_format: int
    host: str
    redis: RedisHealth
    reconciler_age_seconds: float | None = None
    """Seconds since the reconciler's last round; null = it never ran."""
    disk: DiskSpace = Field(description="The disk of the data folder.")
    caches_disk: DiskSpace | None = None
    """The disk of the caches, where KD_STORE names a folder."""
    queues: list[QueueHealth]
    jobs: dict[str, int] = Field(description="Jobs by status.")
    worker_versions: dict[str, int] = Field(description="Workers by their version.")
