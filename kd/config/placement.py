"""What a job asks of the service that runs it: when, where, and who is told. ``kd run`` has no use for it."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator, Field

from kd.config.section import Section

JOB_ID = r"^job_[0-9a-z]{26}$"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)

Label = Annotated[str, Field(max_length=63, pattern=r"^[A-Za-z0-9]([A-Za-z0-9_./-]*[A-Za-z0-9])?$")]


def _bytes(value: object) -> object:
    """``"16GiB"`` as a number of bytes; what is no such text is for the field to judge."""
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        return value
    number, prefix, binary = match.groups()
    return round(float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix.upper() or " "))


class Resources(Section):
    """What a worker must have to run the job."""

    gpus: int | None = Field(None, ge=0, le=64, description="GPUs; null = whatever the worker has, 0 = none needed.")
    memory: Annotated[int, Field(ge=1, le=1 << 50), BeforeValidator(_bytes)] | None = Field(
        None, description='Bytes of each GPU, or of the host where there is none; a number, or text as "16GiB".'
    )


class Placement(Section):
    """The fields of a job that the service reads and the run does not."""

    labels: dict[Label, Label] = Field(
        default_factory=dict, max_length=16, description="Words to find jobs by, as name: value."
    )
    priority: int = Field(5, ge=0, le=9, description="Of queued jobs the highest goes first, then the oldest.")
    depends_on: tuple[Annotated[str, Field(pattern=JOB_ID)], ...] = Field(
        (), max_length=32, description="Ids of jobs that must have succeeded before this one is queued."
    )
    deadline_seconds: int | None = Field(
        None,
        ge=1,
        le=31_622_400,
        description="Seconds from acceptance in which the job must end; it fails then. A retry or resume begins anew.",
    )
    max_attempts: int | None = Field(
        None, ge=1, le=1000, description="Attempts that may die before the job fails; null = the operator's number."
    )
    resources: Resources = Field(default_factory=Resources, description="What a worker must have to run the job.")
    webhook: str | None = Field(
        None,
        max_length=2048,
        pattern=r"^https?://[^\s]+$",
        description="URL that is told of every change of status, where the operator allows its host.",
    )


PLACEMENT = frozenset(Placement.model_fields)
