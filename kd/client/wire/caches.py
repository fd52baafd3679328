"""The caches of a service."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field

from kd.client.wire.view import View


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
