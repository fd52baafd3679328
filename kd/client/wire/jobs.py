"""A job as the API shows it, and a page of jobs."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal, get_args

from pydantic import ConfigDict, Field, computed_field

from cache.errors import locate_help
from cache.json_object import Json
from kd.client.wire.view import View
from kd.config.kinds import KindName

#: The statuses of a job that a worker has, of one that has ended, and of any job.
Active = Literal["running", "cancelling", "pausing"]
Terminal = Literal["succeeded", "failed", "cancelled"]
Status = Literal["waiting", "queued", Active, "paused", Terminal]

Action = Literal["cancel", "pause", "resume", "retry", "delete"]

TERMINAL_STATUSES: frozenset[str] = frozenset(get_args(Terminal))
ACTIVE_STATUSES: frozenset[str] = frozenset(get_args(Active))


class Progress(View):
    """The progress of the present stage."""

    done: int | None = Field(None, description="Units done.")
    total: int | None = Field(None, description="Units to do.")
    unit: str | None = Field(None, description="What is counted, for example sequences or steps.")
    fraction: float | None = Field(None, description="Share done, 0 to 1.")
    eta_seconds: float | None = Field(None, description="Seconds left at the present pace.")
    per_second: float | None = Field(None, description="Units a second at the present pace.")
    tokens: int | None = Field(None, description="Tokens done by the processes under way.")
    tokens_per_second: float | None = None
    """Tokens a second of the processes under way."""


class Metrics(View):
    """The newest value of each metric. A run may report more than these."""

    model_config = ConfigDict(extra="allow")

    step: int | None = Field(None, description="Optimiser steps done.")
    loss: float | None = None
    """(1 - alpha) kd_loss + alpha ce_loss, nats per token."""
    kd_loss: float | None = Field(None, description="Divergence from the teacher, nats per token.")
    ce_loss: float | None = Field(None, description="Cross-entropy of the text, nats per token.")
    train_perplexity: float | None = Field(None, description="exp(ce_loss) of the training text.")
    validation_perplexity: float | None = None
    """Perplexity on the held-out text, of the newest evaluation."""
    student_perplexity: float | None = Field(
        None,
        description="Perplexity of the finished student on the held-out text. Compare it only with "
        "perplexities of the same text and vocabulary.",
    )
    student_bits_per_byte: float | None = None
    """Bits that the finished student needs for a byte of the held-out text."""
    teacher_perplexity: float | None = None
    """Perplexity of the teacher on the held-out text."""
    teacher_bits_per_byte: float | None = None
    """Bits that the teacher needs for a byte of the held-out text."""
    held_out_tokens: int | None = Field(None, description="Tokens of the held-out text.")
    held_out_bytes: int | None = Field(None, description="Bytes of the held-out text, in UTF-8.")
    temperature: float | None = Field(None, description="Distillation temperature.")
    learning_rate: float | None = Field(None, description="Learning rate of the last step.")
    grad_norm: float | None = None
    """Global norm of the gradient before clipping."""


class JobCache(View):
    """The cache that the job captures or reads. During a capture only its fingerprint is known."""

    model_config = ConfigDict(extra="allow")

    fingerprint: str | None = None
    """Content address, which is also the folder's name under caches/."""
    fingerprints: list[str] = Field([], description="Of several teachers: those of all caches.")
    bytes_per_token: float | None = None
    """All bytes on disk per token with a record."""

    @property
    def names(self) -> list[str]:
        """The fingerprints of all caches, each once."""
        own = [] if self.fingerprint is None else [self.fingerprint]
        return list(dict.fromkeys([*own, *self.fingerprints]))


class CaptureWorker(View):
    """A worker that captures a cache together with others."""

    worker: str
    ranges: int = Field(description="Ranges of shards that it has now.")
    sequences: int = Field(description="Sequences that it has done.")
    sequences_per_second: float
    tokens_per_second: float
    seconds: float = Field(description="Seconds since it came.")


class Capture(View):
    """A capture by several workers. The job's progress is that of all of them."""

    ranges: int = Field(description="Ranges of shards in all.")
    ranges_done: int = Field(description="Ranges of which every shard is sealed.")
    ranges_untaken: int = Field(description="Ranges that no worker has taken yet.")
    workers: list[CaptureWorker]


class JobError(View):
    """Why a job failed, and what to do about it."""

    type: str = Field(description="A stable word, for example storage_error or worker_lost.")
    detail: str = Field(description="What happened and where.")
    remedy: str = Field("", description="What to do about it.")

    @computed_field(description="The entry of this error in the documentation.")  # type: ignore[prop-decorator]
    @property
    def help(self) -> str:
        """The place of this error's entry."""
        return locate_help(self.type)


class Cost(View):
    """What a job costs, in the currency of the operator's prices."""

    amount: float
    """Cost of the device time so far, at the price of each device when it was used."""
    final: bool = Field(description="Whether the job has ended, so that only a retry costs more.")
    estimated: float | None = None
    """Estimated cost of the whole job; null if it has ended, or if unknown."""
    basis: Literal["pace", "earlier_jobs"] | None = Field(
        None,
        description="pace: from the job's own pace; earlier_jobs: from the mean of the jobs of "
        "its kind that have succeeded.",
    )


class JobResources(View):
    """A worker must have these to run the job; null = nothing in particular."""

    gpus: int | None = None
    memory: int | None = Field(None, description="Bytes of each GPU, or of the host.")
    hosts: int = Field(1, description="Hosts that train the student together; the least.")


class JobLinks(View):
    """The paths below a job."""

    self: str
    events: str
    stream: str
    metrics: str
    logs: str
    checkpoints: str
    artifacts: str


class Job(View):
    """A job."""

    id: str = Field(description="Sorts by time of creation.")
    kind: KindName
    name: str = Field(description="The name that the job was given.")
    team: str = Field("local", description="The team whose share of the devices the job uses.")
    parent: str | None = None
    """The search whose trial this job is; null for any other."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Names and values to find the job by."""
    status: Status
    actions: list[Action] = Field(default_factory=list)
    """The actions that the job allows now."""
    reason: str | None = Field(
        None,
        description=(
            "Why the job waits or ended, in a word: dependencies, deadline_exceeded. A sentence if "
            "the job is queued and a quota of its team is used up, or no worker, idle or busy, has "
            "the resources or the memory that it needs."
        ),
    )
    stage: str = Field(description="The present or next stage: precompute, train or search.")
    phase: str | None = Field(None, description="The present phase of the stage, in a word or two.")
    priority: int = 5
    """0 to 9. Of a team's queued jobs the one with the highest priority goes first."""
    depends_on: list[str] = Field(default_factory=list)
    """Jobs that must succeed before this job is queued."""
    waits_for: list[str] = Field(default_factory=list)
    """Jobs of depends_on that have not succeeded yet."""
    resources: JobResources = Field(default_factory=JobResources)
    """Resources that a worker must have."""
    least_memory: int | None = Field(
        None,
        description=(
            "Bytes that the job's models need at least: weights, gradients and optimiser. Null if "
            "that is unknown."
        ),
    )
    queue_position: int | None = None
    """Jobs before this job in the queue, if teams take turns; null unless queued."""
    estimated_start_at: datetime | None = Field(
        None,
        description=(
            "Estimate from the mean time for which workers had earlier jobs. Null if there are "
            "none, if the job is not queued, if a quota makes it wait, or if no worker has the "
            "resources that it needs."
        ),
    )
    worker: str | None = Field(None, description="The worker that has the job; null if none has.")
    device_seconds: float = Field(
        0.0,
        description="Time that the job held devices, times their number. Trials count for "
        "themselves, and not for their search.",
    )
    cost: Cost | None = Field(None, description="Null without a price (KD_DEVICE_PRICES).")
    progress: Progress
    metrics: Metrics
    cache: JobCache | None = Field(None, description="Null until it is known.")
    capture: Capture | None = None
    """Null unless several workers capture the cache now; not in a list."""
    error: JobError | None = Field(None, description="Null unless the job failed.")
    attempt: int = Field(description="Attempts that have started; more follow only if one died.")
    max_attempts: int = 3
    """Attempts that may die before the job fails. A retry starts the count again."""
    version: int = Field(description="Grows with every change of the record.")
    created_at: datetime
    queued_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    heartbeat_at: datetime | None = Field(None, description="Time of the worker's last heartbeat.")
    deadline_at: datetime | None = None
    """Time at which the job fails if it has not ended; null = never."""
    request_id: str | None = None
    """The request that created the job, as the logs name it."""
    links: JobLinks
    artifacts: dict[str, str]
    """Names and paths of the job's products: student, report."""
    config: Json
    """The body of POST /jobs with its defaults filled in."""

    @property
    def ended(self) -> bool:
        """Whether the job has ended."""
        return self.status in TERMINAL_STATUSES


class JobList(View):
    """A page of jobs, newest first."""

    data: list[Job]
    has_more: bool
    next_cursor: str | None = Field(None, description="Value of ?cursor= for the next page.")


class Setting(View):
    """A setting of a job that is not the default."""

    name: str = Field(description="Its dotted name, such as train.max_steps.")
    value: Any
    default: Any = Field(None, description="Null also for a section that is off by default.")
    required: bool = Field(False, description="Whether there is no default.")


class JobSettings(View):
    """The settings of a job that are not the defaults; ``config`` of the job has all."""

    data: list[Setting]
