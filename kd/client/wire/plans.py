"""What a job would do and need."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from cache.json_object import Json
from kd.client.wire.accounts import TeamAccount
from kd.client.wire.jobs import Cost
from kd.client.wire.view import View


class JobEstimate(View):
    """The estimated size and time of a job's capture."""

    method: Literal["table", "trial"]
    """table: from a table of bytes per token; trial: the teacher read a few batches."""
    tokens: int = Field(description="Tokens of all sequences.")
    tokens_counted: bool = Field(description="Whether all of the text was read, or only a sample.")
    train_sequences: int
    validation_sequences: int
    positions: int = Field(description="Tokens with a record.")
    shards: int
    bytes_per_token: float = Field(description="All bytes on disk per token with a record.")
    bytes: int = Field(description="Bytes of the whole cache.")
    local_bytes: int | None = None
    """Bytes of it on the disk of the caches: all, or what the disk keeps of a cache in a bucket."""
    free_bytes: int = Field(description="Free bytes on the disk of the caches.")
    fits: bool = Field(description="Whether the disk has space for these, with a margin.")
    seconds: float | None = None
    """Time of the capture on the present device; null without a trial."""
    hours: float | None = None
    device: str | None = Field(None, description="Device of the trial.")
    held_out: str = Field("", description="Which sequences are held out, and why this many.")
    bucket: str = Field("", description="What is not known of the bucket of the cache.")
    cost: Cost | None = None
    """Estimated cost of the job; null without a price or an earlier job."""
    account: TeamAccount | None = None
    """What the caller's team uses, and its quotas; null outside of a service."""


class MemoryEstimate(View):
    """The least bytes that the models take on a device; activations and the framework need more."""

    teacher_bytes: int | None = None
    """The teacher's weights; null if none runs, or if its size is unknown."""
    student_parameters: int | None = None
    """Null if the student's shape is unknown."""
    student_bytes: int | None = None
    """Weights, gradients and optimiser state in float32."""


class LearnedPiece(View):
    """A piece of a text."""

    text: str
    learned: bool = Field(description="Whether its tokens are learned; others are context.")


class LearnedText(View):
    """A text that is made of a row, as the student reads it."""

    where: str = Field(description="The row.")
    pieces: list[LearnedPiece]


class JobPlan(View):
    """A job would do and need this if it were created."""

    stages: list[str] = Field(description="The stages of the job, in order.")
    config: Json = Field(description="The job with its defaults filled in.")
    capture: JobEstimate | None = None
    """Null if nothing is captured, or if the server cannot read the text."""
    steps: int | None = None
    """Optimiser steps; null without training, or if unknown."""
    tokens: int | None = Field(None, description="Tokens that training will read.")
    memory: MemoryEstimate
    free_bytes: int = Field(description="Bytes left on the disk of the data folder.")
    cost: Cost | None = None
    """Estimated cost; null without a price, or if no time is known."""
    account: TeamAccount | None = Field(None, description="What the team uses, and its quotas.")
    warnings: list[str] = Field(default_factory=list)
    """Valid settings that are probably mistakes."""
    learned: list[LearnedText] = Field(default_factory=list)
    """What is learned of the first rows of chats, or of prompts and completions."""


class Template(View):
    """A template of a job file."""

    name: str
    title: str = Field(description="What its job does, in one sentence.")
    text: str = Field(description="YAML with comments; the user fills in models and texts.")


class TemplateList(View):
    """The job files to begin with, by name."""

    data: list[Template]
