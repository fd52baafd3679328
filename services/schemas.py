"""What the API answers, as types: the OpenAPI document and the job record are both made from them."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Kind = Literal["distill", "precompute", "train", "search"]
Status = Literal["queued", "running", "succeeded", "failed", "cancelled"]
TERMINAL: frozenset[str] = frozenset({"succeeded", "failed", "cancelled"})


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
    """The cache of the teacher that the job captured or read."""

    model_config = ConfigDict(extra="allow")

    fingerprint: str | None = Field(None, description="Content address, which is also the folder's name under caches/.")
    bytes_per_token: float | None = Field(None, description="All bytes on disk per token with a record.")


class JobError(View):
    """Why a job failed, and what to do about it."""

    type: str = Field(description="A stable word, for example storage_error or worker_lost.")
    detail: str = Field(description="What happened and where.")
    remedy: str = Field("", description="What to do about it.")


class Job(View):
    """A job, as it stands."""

    id: str = Field(description="Sorts by time of creation.")
    kind: Kind
    name: str = Field(description="The name that the job was given.")
    parent: str | None = Field(None, description="The search whose trial this job is; null for any other.")
    status: Status
    stage: str = Field(description="The stage under way, or to come: precompute, train or search.")
    phase: str | None = Field(None, description="What the stage is doing, in a word or two.")
    cancel_requested: bool = Field(False, description="A cancel was asked for and waits for the run to save its state.")
    progress: Progress
    metrics: Metrics
    cache: JobCache | None = Field(None, description="Null until it is known.")
    error: JobError | None = Field(None, description="Null unless the job failed.")
    attempt: int = Field(description="Attempts begun; only one that died is followed by another.")
    version: int = Field(description="Grows with every change of the record.")
    created_at: datetime
    queued_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    heartbeat_at: datetime | None = Field(None, description="When the worker was last heard of.")
    artifacts: dict[str, str] = Field(description="Name to path of what the job has produced: student, report.")
    config: dict[str, Any] = Field(
        description="The job with its defaults filled in; the shape is that of the body of POST /jobs."
    )

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.status in TERMINAL


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


class Readiness(View):
    """The service can take jobs; with no worker they wait."""

    status: Literal["ready"] = "ready"
    workers: int = Field(description="Workers heard of within the last half minute.")


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
