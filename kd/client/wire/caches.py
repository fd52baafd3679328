"""The caches of a service."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import ConfigDict, Field

from cache.json_object import Json
from kd.client.wire.jobs import Status
from kd.client.wire.view import View
from kd.config.kinds import KindName

EntropyOf = Annotated[str, Field(description='Of "positions", or "sequences": the mean of each.')]


class CacheEntry(View):
    """One cache on the server's disk."""

    model_config = ConfigDict(extra="allow")

    fingerprint: str
    complete: bool
    """Whether the cache is sealed and readable; false during the capture."""
    tokens: int | None = Field(None, description="Tokens with a record.")
    bytes: int | None = Field(None, description="Bytes on disk.")
    bytes_per_token: float | None = None
    teacher: str | None = Field(None, description="Name of the teacher.")
    text: str | None = Field(None, description="What its run read; null where that is not known.")
    made_by: str | None = None
    """The run that captured it; null if it is gone, or is another key's."""


class CacheList(View):
    """Every cache of this server."""

    data: list[CacheEntry]


class Fidelity(View):
    """How close a cache is to its teacher, at one temperature, on sampled positions."""

    temperature: float
    positions: int = Field(description="Number of sampled positions.")
    kept_mass: float = Field(description="Mean probability of the tokens whose value is stored.")
    kept_error: float = Field(description="Mean sum of the differences of their probabilities.")
    kl: float | None = None
    """KL(live || decoded) in nats; null if the tail is a sample."""
    bias_z: float | None = Field(None, description="Largest z of the mean of redrawn samples.")
    stored_z: float | None = Field(None, description="Largest z of the stored samples.")
    gold_error: float = Field(description="Mean relative error of the next token's probability.")
    top1_agreement: float | None = None
    """Share of positions with the same most probable token."""
    entropy_error: float = Field(description="Mean decoded minus live entropy, nats.")


class OverruledVerdict(View):
    """A verdict that the records differ from the teacher, and the field that overruled it."""

    noise: float = Field(description="The teacher's own noise between two batches, nats.")
    problems: list[str] = Field(description="One line for each value that is out of bounds.")
    field: str = Field(description="The job's field, and its value.")


class CacheDetail(CacheEntry):
    """One cache, with its identity and its fidelity."""

    identity: Json | None = None
    """Everything that its bytes depend on; null while incomplete."""
    fidelity: list[Fidelity] = Field(default_factory=list)
    """One row for each temperature; empty if not measured."""
    overruled: OverruledVerdict | None = None
    """Present if the cache was sealed although it differs from its teacher."""


class SampledHistogram(View):
    """Counts of values between edges."""

    edges: list[float] = Field(description="Edges of the bins: one more than there are counts.")
    counts: list[int]
    """Values in each bin; a value beyond the last edge is in the last bin."""
    mean: float | None = Field(None, description="Mean of the values; null without one.")
    unknown: int = Field(0, description="Records whose value is unknown: it was not imported.")


class EntrySummary(View):
    """Entries of a record: the tokens that it names."""

    mean: float
    p50: int = Field(description="The median.")
    p99: int = Field(description="99 % of the records have at most this many.")
    max: int


class CacheStatistics(View):
    """Histograms of a sample of the records of a cache, at temperature 1."""

    fingerprint: str
    profile: str
    seed: int = Field(description="The seed that chose the records.")
    positions: int = Field(description="Records of the cache.")
    records: int = Field(description="Records that were read.")
    sequences: int = Field(description="Sequences of the cache.")
    sequences_read: int = Field(description="Sequences that the records were read from.")
    whole: bool = Field(description="Whether every record was read, so that the counts are exact.")
    entropy_of: EntropyOf = "positions"
    entropy: SampledHistogram = Field(description="The teacher's entropy, nats.")
    kept_mass: SampledHistogram
    """Sum of the probabilities that a record stores."""
    entries: SampledHistogram = Field(description="Tokens that a record names.")
    entry_counts: EntrySummary | None = Field(None, description="Null without a record.")


class ShardStates(View):
    """The state of each shard of a cache, in cells of consecutive shards."""

    complete: bool = Field(description="Whether the cache is sealed.")
    captured: bool = Field(description="Whether a process of this host captures it now.")
    shards: int = Field(description="Shards; while the cache is captured, those known so far.")
    shard_sequences: int | None = None
    """Sequences of a shard; null while the cache is not sealed."""
    cell_shards: int = Field(description="Consecutive shards that one cell stands for.")
    cells: str
    """A digit for each cell, for its worst shard: 0 sealed, 1 missing, 2 in work, 3 corrupt."""
    counts: dict[str, int]
    """Shards by state: sealed, missing, in_work, corrupt."""
    corrupt: list[int] = Field(description="The first corrupt shards, 100 at most.")
    in_work: list[int] = Field(description="The first shards in work, 100 at most.")
    measured: bool = Field(
        description="Whether the sizes of all files were compared with the seals. Only a job of "
        "kind verify reads every byte."
    )
    verified_at: datetime | None = None
    """Time at which the last job of kind verify ended; the states show what it found."""


class RecordEntry(View):
    """A token that a record stores by itself."""

    id: int
    text: str = Field(description="Empty if the cache has no text of its tokens.")
    probability: float = Field(description="Profile threshold counts it in units.")


class CacheRecord(View):
    """What the teacher expected after one token of a sequence; null = unknown."""

    position: int = Field(description="Place of the token in the sequence, from 0.")
    token: str = Field(description="The token at this position.")
    said: str = Field(description="The next token of the text.")
    said_id: int
    said_probability: float | None = Field(None, description="The teacher's probability of it.")
    entropy: float | None = Field(None, description="The teacher's entropy, nats.")
    entries: int | None = Field(None, description="Probabilities that the record stores.")
    head: list[RecordEntry] = Field(description="The most probable of them, 32 at most.")
    tail: float | None = Field(None, description="Mass outside the stored probabilities.")
    tail_count: int | None = Field(None, description="Tokens that were drawn from that mass.")
    tail_tokens: list[str] = Field(description="Some of these tokens, 32 at most.")


class CacheRecords(View):
    """Some records of one sequence of a cache."""

    sequence: int
    sequences: int = Field(description="Sequences of the cache.")
    split: str = Field(description="train or validation.")
    profile: str
    entropy_of: EntropyOf = "positions"
    texts_known: bool = Field(description="Whether the cache has the text of its tokens.")
    start: int = Field(description="Number of the first record, within the sequence.")
    count: int = Field(description="Records of the sequence.")
    text_start: int = Field(description="Position of the first token of `text`.")
    text: list[str] = Field(description="The tokens around the records.")
    document_starts: list[int] = Field(description="Positions of them at which a document begins.")
    records: list[CacheRecord]


class CacheUser(View):
    """A job that made, read or checked a cache."""

    id: str
    name: str
    kind: KindName
    status: Status
    created_at: datetime
    finished_at: datetime | None = None
    student: bool = Field(description="Whether the job has a student, which names the cache.")


class CacheCheck(View):
    """The last check of one kind of a cache."""

    job: str
    status: Status
    at: datetime = Field(description="When the job ended, or was created if it has not ended.")
    problems: list[str] = Field(description="What was found, 20 lines at most; empty if sound.")
    outdated: bool = Field(False, description="Whether the cache was sealed again since then.")


class CacheUsage(View):
    """Who uses a cache, and when it was checked."""

    jobs: list[CacheUser]
    """Jobs that the caller sees, newest first, 100 at most; without trials."""
    trials: int = Field(description="Trials of searches among its newest 1,000 jobs.")
    kept_by: list[str] = Field(
        description="Why `kd gc` keeps the cache, whatever its age: unfinished jobs, students that "
        "name it, processes that read or capture it. Empty if nothing holds it."
    )
    last_used: datetime | None = None
    """When a run last began to read it; null = never."""
    verify: CacheCheck | None = Field(None, description="The last check of all bytes.")
    fidelity: CacheCheck | None = None
    """The last comparison with the live teacher after the capture."""
