"""The answers of the API as types. The OpenAPI document is made from them."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, computed_field

from cache.errors import locate_help

Kind = Literal["distill", "precompute", "train", "search", "verify"]
Status = Literal[
    "waiting",
    "queued",
    "running",
    "cancelling",
    "pausing",
    "paused",
    "succeeded",
    "failed",
    "cancelled",
]
Action = Literal["cancel", "pause", "resume", "retry", "delete"]
TERMINAL_STATUSES: frozenset[str] = frozenset({"succeeded", "failed", "cancelled"})
#: A worker has the job.
ACTIVE_STATUSES: frozenset[str] = frozenset({"running", "cancelling", "pausing"})


class View(BaseModel):
    """A part of an answer. Numbers are finite or null: JSON has neither NaN nor infinity."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class Progress(View):
    """How far the stage under way has come."""

    done: int | None = Field(None, description="Units done.")
    total: int | None = Field(None, description="Units to do.")
    unit: str | None = Field(None, description="What is counted, for example sequences or steps.")
    fraction: float | None = Field(None, description="Share done, 0 to 1.")
    eta_seconds: float | None = Field(None, description="Seconds left at the present pace.")
    tokens: int | None = Field(None, description="Tokens done by the process under way.")
    tokens_per_second: float | None = Field(
        None, description="Tokens a second of the process under way."
    )


class Metrics(View):
    """The newest value of each metric. A run may report more than these."""

    model_config = ConfigDict(extra="allow")

    step: int | None = Field(None, description="Optimiser steps done.")
    loss: float | None = Field(
        None, description="(1 - alpha) kd_loss + alpha ce_loss, nats per token."
    )
    kd_loss: float | None = Field(
        None, description="KL divergence from the teacher, nats per token."
    )
    ce_loss: float | None = Field(None, description="Cross-entropy of the text, nats per token.")
    perplexity: float | None = Field(None, description="exp(ce_loss) on the training text.")
    validation_perplexity: float | None = Field(
        None, description="Perplexity on the held-out text."
    )
    temperature: float | None = Field(None, description="Distillation temperature.")
    learning_rate: float | None = Field(None, description="Learning rate of the last step.")
    grad_norm: float | None = Field(
        None, description="Global norm of the gradient before clipping."
    )


class JobCache(View):
    """The cache that the job captures or reads. During a capture only its fingerprint is known."""

    model_config = ConfigDict(extra="allow")

    fingerprint: str | None = Field(
        None, description="Content address, which is also the folder's name under caches/."
    )
    bytes_per_token: float | None = Field(
        None, description="All bytes on disk per token with a record."
    )


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

    amount: float = Field(
        description="Cost of the device time so far, at the price of each device when it was used."
    )
    final: bool = Field(description="Whether the job has ended, so that only a retry costs more.")
    estimated: float | None = Field(
        None, description="Estimated cost of the whole job; null if it has ended, or if unknown."
    )
    basis: Literal["plan", "pace", "earlier_jobs"] | None = Field(
        None,
        description="plan: the training alone, by the plan's best settings; pace: from the job's "
        "own pace; earlier_jobs: from the mean of the jobs of its kind that have succeeded.",
    )


class JobResources(View):
    """A worker must have these to run the job; null = nothing in particular."""

    gpus: int | None = None
    memory: int | None = Field(None, description="Bytes of each GPU, or of the host.")


class JobLinks(View):
    """The paths below a job."""

    self: str
    events: str
    stream: str
    metrics: str
    logs: str
    checkpoints: str
    artifacts: str


def build_links(job_id: str) -> JobLinks:
    """Build the paths below a job."""
    own = f"/jobs/{job_id}"
    parts = ("events", "metrics", "logs", "checkpoints", "artifacts")
    below = {part: f"{own}/{part}" for part in parts}
    return JobLinks.model_validate({"self": own, "stream": f"{own}/events/stream", **below})


class Job(View):
    """A job."""

    id: str = Field(description="Sorts by time of creation.")
    kind: Kind
    name: str = Field(description="The name that the job was given.")
    owner: str = Field("local", exclude=True)
    team: str = Field("local", description="The team whose share of the devices the job uses.")
    parent: str | None = Field(
        None, description="The search whose trial this job is; null for any other."
    )
    labels: dict[str, str] = Field(
        default_factory=dict, description="Names and values to find the job by."
    )
    status: Status
    actions: list[Action] = Field(
        default_factory=list, description="The actions that the job allows now."
    )
    reason: str | None = Field(
        None,
        description=(
            "Why the job waits or ended, in a word: dependencies, deadline_exceeded. A sentence if "
            "the job is queued and a quota of its team is used up, or no worker, idle or busy, has "
            "the resources or the memory that it needs."
        ),
    )
    stage: str = Field(description="The present or next stage: precompute, train or search.")
    phase: str | None = Field(None, description="The present part of the stage, in a word or two.")
    priority: int = Field(
        5,
        description="0 to 9. Of a team's queued jobs the one with the highest priority goes first.",
    )
    depends_on: list[str] = Field(
        default_factory=list, description="Jobs that must succeed before this job is queued."
    )
    waits_for: list[str] = Field(
        default_factory=list, description="Jobs of depends_on that have not succeeded yet."
    )
    resources: JobResources = Field(
        default_factory=JobResources, description="Resources that a worker must have."
    )
    least_memory: int | None = Field(
        None,
        description=(
            "Bytes that the job's models need at least: weights, gradients and optimiser. Null if "
            "that is unknown."
        ),
    )
    queue_position: int | None = Field(
        None,
        description="Jobs before this job in the queue, if teams take turns; null unless queued.",
    )
    estimated_start_at: datetime | None = Field(
        None,
        description=(
            "Estimate from the mean duration of earlier jobs. Null if there are none, if the job "
            "is not queued, if a quota makes it wait, or if no worker has the resources that it "
            "needs."
        ),
    )
    worker: str | None = Field(None, description="The worker that has the job; null if none has.")
    device_seconds: float = Field(
        0.0,
        description="Time that the job held devices, times their number. Trials count for "
        "themselves, and not for their search.",
    )
    cost: Cost | None = Field(
        None, description="Null if the operator has set no price (KD_DEVICE_PRICES)."
    )
    progress: Progress
    metrics: Metrics
    cache: JobCache | None = Field(None, description="Null until it is known.")
    error: JobError | None = Field(None, description="Null unless the job failed.")
    attempt: int = Field(description="Attempts begun. Another attempt follows only if one died.")
    max_attempts: int = Field(
        3, description="Attempts that may die before the job fails. A retry starts the count again."
    )
    version: int = Field(description="Grows with every change of the record.")
    created_at: datetime
    queued_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    heartbeat_at: datetime | None = Field(None, description="Time of the worker's last heartbeat.")
    deadline_at: datetime | None = Field(
        None, description="Time at which the job fails if it has not ended; null = never."
    )
    request_id: str | None = Field(
        None, description="The request that created the job, as the logs name it."
    )
    links: JobLinks
    artifacts: dict[str, str] = Field(
        description="Names and paths of the job's products: student, report."
    )
    config: dict[str, Any] = Field(
        description="The body of POST /jobs with its defaults filled in."
    )

    @property
    def ended(self) -> bool:
        """Whether the job has ended."""
        return self.status in TERMINAL_STATUSES


class Device(View):
    """The device of a worker."""

    kind: Literal["cpu", "cuda"] = "cpu"
    name: str = ""
    index: str = Field("", description="Numbers of the GPUs, for example 0 or 0,1; empty for cpu.")
    count: int = Field(0, description="Number of GPUs.")
    memory_bytes: int = Field(0, description="Memory of each GPU, or of the host.")
    price: float | None = Field(
        None, description="Price of an hour of one device; null if the operator has set none."
    )

    @property
    def total_bytes(self) -> int:
        """Bytes of all GPUs, or of the host; 0 if they are unknown."""
        return self.memory_bytes * max(self.count, 1)

    def covers(self, gpus: int | None, memory: int | None) -> bool:
        """Whether it has the resources of a job; None = any. Unknown memory counts as enough."""
        return (gpus or 0) <= self.count and (memory or 0) <= (self.memory_bytes or 1 << 62)


class WorkerState(View):
    """A worker, as its own sign of life describes it."""

    id: str
    host: str = ""
    pid: int = 0
    stages: list[str] = Field(default_factory=list, description="Queues that the worker serves.")
    device: Device = Field(default_factory=Device)
    job: str | None = Field(None, description="The worker's present job; null while idle.")
    attempt: int | None = None
    stopping: bool = False
    version: str = ""
    started_at: datetime | None = None
    beat_at: datetime | None = Field(None, description="Time of the last sign of life.")


class JobList(View):
    """A page of jobs, newest first."""

    data: list[Job]
    has_more: bool
    next_cursor: str | None = Field(None, description="Value of ?cursor= for the next page.")


class QuotaUse(View):
    """What a team has used of a quota."""

    limit: float | None = Field(description="Null = no limit.")
    used: float
    left: float | None = Field(description="Null = no limit.")
    frees_up: str = Field(description="When or by what the quota frees up.")
    resets_at: datetime | None = Field(
        None, description="Time at which nothing is used any more; null if no time frees it up."
    )
    measured_at: datetime | None = Field(
        None, description="Time of the measurement; null if it is exact, or not measured yet."
    )


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
    bytes: QuotaUse = Field(description="Bytes of its caches and runs on the disk.")
    reason: str | None = Field(None, description="Why its queued jobs wait; null if they do not.")


class TeamList(View):
    """The account of the caller's team; for an admin those of all teams."""

    data: list[TeamAccount]


class JobEstimate(View):
    """The estimated size and time of a job's capture."""

    method: Literal["table", "trial"] = Field(
        description="table: from a table of bytes per token; trial: the teacher read a few batches."
    )
    tokens: int = Field(description="Tokens of all sequences.")
    tokens_counted: bool = Field(description="Whether all of the text was read, or only a sample.")
    train_sequences: int
    validation_sequences: int
    positions: int = Field(description="Tokens with a record.")
    shards: int
    bytes_per_token: float = Field(description="All bytes on disk per token with a record.")
    bytes: int = Field(description="Bytes of the whole cache.")
    free_bytes: int = Field(description="Free bytes on the disk of the caches.")
    fits: bool = Field(description="Whether the disk has space for the cache, with a margin.")
    seconds: float | None = Field(
        None, description="Time of the capture on the present device; null without a trial."
    )
    hours: float | None = None
    device: str | None = Field(None, description="Device of the trial.")
    held_out: str = Field("", description="Which sequences are held out, and why so many.")
    cost: Cost | None = Field(
        None, description="Estimated cost of the job; null without a price or an earlier job."
    )
    account: TeamAccount | None = Field(
        None, description="What the caller's team uses, and its quotas; null outside of a service."
    )


class CacheEntry(View):
    """One cache on the server's disk."""

    model_config = ConfigDict(extra="allow")

    fingerprint: str
    complete: bool = Field(
        description="Whether the cache is sealed and readable; false during the capture."
    )
    tokens: int | None = Field(None, description="Tokens with a record.")
    bytes: int | None = Field(None, description="Bytes on disk.")
    bytes_per_token: float | None = None
    teacher: str | None = Field(None, description="Name of the teacher.")


class CacheList(View):
    """Every cache of this server."""

    data: list[CacheEntry]


class Fidelity(View):
    """How close a cache is to its teacher, at one temperature, on sampled positions."""

    temperature: float
    positions: int = Field(description="Number of sampled positions.")
    kept_mass: float = Field(description="Mean probability of the tokens whose value is stored.")
    kept_error: float = Field(description="Mean sum of the differences of their probabilities.")
    kl: float | None = Field(
        None, description="KL(live || decoded) in nats; null if the tail is a sample."
    )
    bias_z: float | None = Field(None, description="Largest z of the mean of redrawn samples.")
    stored_z: float | None = Field(None, description="Largest z of the stored samples.")
    gold_error: float = Field(description="Mean relative error of the next token's probability.")
    top1_agreement: float | None = Field(
        None, description="Share of positions with the same most probable token."
    )
    entropy_error: float = Field(description="Mean decoded minus live entropy, nats.")


class OverruledVerdict(View):
    """A verdict that the records differ from the teacher, and the field that overruled it."""

    noise: float = Field(description="The teacher's own noise between two batches, nats.")
    problems: list[str] = Field(description="One line for each value that is out of bounds.")
    field: str = Field(description="The job's field, and its value.")


class CacheDetail(CacheEntry):
    """One cache, with its identity and its fidelity."""

    identity: dict[str, Any] | None = Field(
        None, description="Everything that its bytes depend on; null while incomplete."
    )
    fidelity: list[Fidelity] = Field(
        default_factory=list, description="One row for each temperature; empty if not measured."
    )
    overruled: OverruledVerdict | None = Field(
        None,
        description="Present if the cache was sealed although it differs from its teacher.",
    )


class Health(View):
    """A sign of life."""

    status: Literal["ok"] = "ok"


class FieldProblem(View):
    """One wrong field of a request."""

    pointer: str = Field(
        description="JSON pointer into the body; empty if the problem is elsewhere."
    )
    detail: str
    remedy: str = ""


class ProblemDocument(View):
    """An error, in the form of RFC 9457."""

    type: str
    title: str
    status: int
    detail: str
    remedy: str = ""
    instance: str
    errors: list[FieldProblem] = Field(default_factory=list)
