"""What the API answers, as types: the OpenAPI document and the job record are both made from them."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Kind = Literal["distill", "precompute", "train", "search", "verify"]
Status = Literal["waiting", "queued", "running", "cancelling", "pausing", "paused", "succeeded", "failed", "cancelled"]
Action = Literal["cancel", "pause", "resume", "retry", "delete"]
TERMINAL: frozenset[str] = frozenset({"succeeded", "failed", "cancelled"})
ACTIVE: frozenset[str] = frozenset({"running", "cancelling", "pausing"})  #: a worker has the job

#: From which statuses a client may ask for what; ``jobs.lua`` says what comes of it.
TRANSITIONS: dict[Action, frozenset[str]] = {
    "cancel": frozenset({"waiting", "queued", "paused", "running", "pausing"}),
    "pause": frozenset({"waiting", "queued", "running"}),
    "resume": frozenset({"paused", "pausing"}),
    "retry": frozenset({"failed", "cancelled"}),
    "delete": TERMINAL,
}


class View(BaseModel):
    """A part of an answer; numbers are finite or null, because JSON has neither NaN nor infinity."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class Progress(View):
    """How far the stage under way has come."""

    done: int | None = Field(None, description="Units done.")
    total: int | None = Field(None, description="Units to do.")
    unit: str | None = Field(None, description="What is counted, for example sequences or steps.")
    fraction: float | None = Field(None, description="Share done, 0 to 1.")
    eta_seconds: float | None = Field(None, description="Seconds left at the present pace.")
    tokens: int | None = Field(None, description="Tokens done by the process under way.")
    tokens_per_second: float | None = Field(None, description="Tokens a second of the process under way.")


class Metrics(View):
    """The newest value of every metric; a run may report more than are named here."""

    model_config = ConfigDict(extra="allow")

    step: int | None = Field(None, description="Optimiser steps done.")
    loss: float | None = Field(None, description="(1 - alpha) kd_loss + alpha ce_loss, nats per token.")
    kd_loss: float | None = Field(None, description="KL divergence from the teacher, nats per token.")
    ce_loss: float | None = Field(None, description="Cross-entropy of the text, nats per token.")
    perplexity: float | None = Field(None, description="exp(ce_loss) on the training text.")
    validation_perplexity: float | None = Field(None, description="Perplexity on the held-out text.")
    temperature: float | None = Field(None, description="Distillation temperature.")
    learning_rate: float | None = Field(None, description="Learning rate of the last step.")
    grad_norm: float | None = Field(None, description="Global norm of the gradient before clipping.")


class JobCache(View):
    """The cache of the teacher that the job captures or reads; while it is captured, only its fingerprint is known."""

    model_config = ConfigDict(extra="allow")

    fingerprint: str | None = Field(None, description="Content address, which is also the folder's name under caches/.")
    bytes_per_token: float | None = Field(None, description="All bytes on disk per token with a record.")


class JobError(View):
    """Why a job failed, and what to do about it."""

    type: str = Field(description="A stable word, for example storage_error or worker_lost.")
    detail: str = Field(description="What happened and where.")
    remedy: str = Field("", description="What to do about it.")


class JobResources(View):
    """What a worker must have to run the job; null = nothing in particular."""

    gpus: int | None = None
    memory: int | None = Field(None, description="Bytes of each GPU, or of the host.")


class JobLinks(View):
    """Where the rest about a job is."""

    self: str
    events: str
    stream: str
    metrics: str
    logs: str
    checkpoints: str
    artifacts: str


def links_of(job_id: str) -> JobLinks:
    """The paths below a job."""
    own, parts = f"/jobs/{job_id}", ("events", "metrics", "logs", "checkpoints", "artifacts")
    below = {part: f"{own}/{part}" for part in parts}
    return JobLinks.model_validate({"self": own, "stream": f"{own}/events/stream", **below})


class Job(View):
    """A job, as it stands."""

    id: str = Field(description="Sorts by time of creation.")
    kind: Kind
    name: str = Field(description="The name that the job was given.")
    owner: str = Field("local", exclude=True)
    parent: str | None = Field(None, description="The search whose trial this job is; null for any other.")
    labels: dict[str, str] = Field(default_factory=dict, description="Words to find it by.")
    status: Status
    reason: str | None = Field(
        None,
        description=(
            "Why it waits or ended, in a word: dependencies, deadline_exceeded. Of a queued job a sentence, where no "
            "worker has the resources that it asks for, idle or busy."
        ),
    )
    stage: str = Field(description="The stage under way, or to come: precompute, train or search.")
    phase: str | None = Field(None, description="What the stage is doing, in a word or two.")
    priority: int = Field(5, description="Of queued jobs the highest goes first, 0 to 9.")
    depends_on: list[str] = Field(default_factory=list, description="Jobs that must succeed before it is queued.")
    waits_for: list[str] = Field(default_factory=list, description="Those of them that have not succeeded yet.")
    resources: JobResources = Field(default_factory=JobResources, description="What a worker must have.")
    queue_position: int | None = Field(None, description="Jobs before it in the queue; null unless queued.")
    estimated_start_at: datetime | None = Field(
        None,
        description=(
            "By the mean duration of earlier jobs; null where there are none, unless queued, or where no worker has "
            "what the job asks for."
        ),
    )
    worker: str | None = Field(None, description="The worker that has it; null unless one has.")
    progress: Progress
    metrics: Metrics
    cache: JobCache | None = Field(None, description="Null until it is known.")
    error: JobError | None = Field(None, description="Null unless the job failed.")
    attempt: int = Field(description="Attempts begun; only one that died is followed by another.")
    max_attempts: int = Field(3, description="Attempts that may die before it fails; a retry begins to count anew.")
    version: int = Field(description="Grows with every change of the record.")
    created_at: datetime
    queued_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    heartbeat_at: datetime | None = Field(None, description="When the worker was last heard of.")
    deadline_at: datetime | None = Field(None, description="When it fails if it has not ended; null = never.")
    request_id: str | None = Field(None, description="The request that made it, as the logs name it.")
    links: JobLinks
    artifacts: dict[str, str] = Field(description="Name to path of what the job has produced: student, report.")
    config: dict[str, Any] = Field(
        description="The job with its defaults filled in; the shape is that of the body of POST /jobs."
    )

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.status in TERMINAL


class Device(View):
    """What a worker computes on."""

    kind: Literal["cpu", "cuda"] = "cpu"
    name: str = ""
    index: str = Field("", description="Numbers of its GPUs, for example 0 or 0,1; empty for cpu.")
    count: int = Field(0, description="GPUs.")
    memory_bytes: int = Field(0, description="Of each GPU, or of the host.")

    def covers(self, gpus: int | None, memory: int | None) -> bool:
        """Whether it has what a job asks for; None = nothing in particular. Memory that is not known is enough."""
        return (gpus or 0) <= self.count and (memory or 0) <= (self.memory_bytes or 1 << 62)


class WorkerState(View):
    """A worker's own sign of life."""

    id: str
    host: str = ""
    pid: int = 0
    stages: list[str] = Field(default_factory=list, description="The queues that it serves.")
    device: Device = Field(default_factory=Device)
    job: str | None = Field(None, description="What it works on; null while idle.")
    attempt: int | None = None
    stopping: bool = False
    version: str = ""
    started_at: datetime | None = None
    beat_at: datetime | None = Field(None, description="When it was last heard of.")


class JobList(View):
    """A page of jobs, newest first."""

    data: list[Job]
    has_more: bool
    next_cursor: str | None = Field(None, description="Give it as ?cursor= to get the next page.")


class JobEstimate(View):
    """What a job's capture will need, by a sample of its text and a table of bytes a token."""

    method: Literal["table", "trial"] = Field(description="table: no teacher was run; trial: a few batches were read.")
    tokens: int = Field(description="Tokens of all sequences.")
    tokens_counted: bool = Field(description="Whether all of the text was read; otherwise a sample of it.")
    train_sequences: int
    validation_sequences: int
    positions: int = Field(description="Tokens with a record.")
    shards: int
    bytes_per_token: float = Field(description="All bytes on disk per token with a record.")
    bytes: int = Field(description="Bytes of the whole cache.")
    free_bytes: int = Field(description="Bytes left on the disk of the caches.")
    fits: bool = Field(description="Whether the disk holds the cache, with a margin.")
    seconds: float | None = Field(None, description="Of the capture on the present device; null without a trial.")
    hours: float | None = None
    device: str | None = Field(None, description="What the trial ran on.")


class CacheEntry(View):
    """One cache on the server's disk."""

    model_config = ConfigDict(extra="allow")

    fingerprint: str
    complete: bool = Field(description="Sealed and readable; false while it is being captured.")
    tokens: int | None = Field(None, description="Tokens with a record.")
    bytes: int | None = Field(None, description="All bytes on disk.")
    bytes_per_token: float | None = None
    teacher: str | None = Field(None, description="The teacher's name.")


class CacheList(View):
    """Every cache of this server."""

    data: list[CacheEntry]


class Fidelity(View):
    """How close a cache's records are to the live teacher, at one temperature, on sampled positions."""

    temperature: float
    positions: int = Field(description="Positions that were sampled.")
    kept_mass: float = Field(description="Mean probability of the tokens whose value is stored.")
    kept_error: float = Field(description="Mean sum of what their probabilities differ in.")
    kl: float | None = Field(None, description="KL(live || decoded) in nats; null where a sample stands for the tail.")
    bias_z: float | None = Field(None, description="Largest z of the mean of redrawn samples.")
    stored_z: float | None = Field(None, description="Largest z of the stored samples.")
    gold_error: float = Field(description="Mean relative error of the next token's probability.")
    top1_agreement: float | None = Field(None, description="Share of positions with the same most probable token.")
    entropy_error: float = Field(description="Mean decoded minus live entropy, nats.")


class CacheDetail(CacheEntry):
    """One cache, what it was made from, and how close it is to its teacher."""

    identity: dict[str, Any] | None = Field(None, description="All that its bytes depend on; null while incomplete.")
    fidelity: list[Fidelity] = Field(default_factory=list, description="A row a temperature; empty where unmeasured.")


class Health(View):
    """A sign of life."""

    status: Literal["ok"] = "ok"


class FieldProblem(View):
    """One wrong field of a request."""

    pointer: str = Field(description="JSON pointer into the body; empty where the problem is elsewhere.")
    detail: str
    remedy: str = ""


class ProblemDocument(View):
    """An error, by RFC 9457."""

    type: str
    title: str
    status: int
    detail: str
    remedy: str = ""
    instance: str
    errors: list[FieldProblem] = Field(default_factory=list)
