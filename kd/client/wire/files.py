"""Files: the checkpoints and artifacts of a job, and what a team has uploaded to train on."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from kd.client.wire.view import View


class CheckpointFile(View):
    """One file of a checkpoint."""

    name: str
    bytes: int
    sha256: str | None = None
    """The sha256 at the time of writing; null for the state file itself."""
    url: str


class Checkpoint(View):
    """A checkpoint of a job's training."""

    step: int
    created_at: datetime
    bytes: int = Field(description="The size of all its files.")
    sha256: str
    """The sha256 of its state file, which holds the digests of all other files."""
    metrics: dict[str, float | None]
    """The last evaluation before this checkpoint."""
    is_best: bool = Field(description="Whether it has the lowest validation loss so far.")
    is_last: bool = Field(description="Whether it is the newest.")
    files: list[CheckpointFile]


class CheckpointList(View):
    """The checkpoints of a job that still exist, oldest first."""

    data: list[Checkpoint]


class Artifact(View):
    """A file that a job produced."""

    name: str
    """The name in the job's artifacts; a file inside a folder is folder/file."""
    bytes: int
    media_type: str
    modified_at: datetime
    sha256: str | None = None
    """Null until the file was fetched once; from then on it is the ETag."""
    url: str


class ArtifactList(View):
    """The files that a job produced."""

    data: list[Artifact]


class UploadedFile(View):
    """A file to train on, which the caller's team has uploaded. It never changes."""

    name: str
    id: str = Field(description="It names the file, too, as long as the file exists.")
    bytes: int
    rows: int = Field(description="Lines that hold an example.")
    format: str
    """What its lines hold, as a value of the field data.format of a job."""
    path: str
    """Its path on the server: a job of the team may name it in data.train."""
    created_at: datetime


class UploadedFileList(View):
    """The files of the caller's team, newest first."""

    data: list[UploadedFile]
