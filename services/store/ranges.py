"""Ranges of shards that several workers capture together; ``ranges.lua`` has every state.

The worker that holds the job's lease owns the board of ranges. Every worker, the owner too, takes
a range, renews its lease by beats, and says when all its shards are on the disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from redis import Redis

from services.store.jobs.leases import Claim
from services.store.jobs.script import to_ms

RANGES_SCRIPT = Path(__file__).with_name("ranges.lua").read_text(encoding="utf-8")

#: Why a worker gets no range: ``wait`` a while, all are ``done``, or the job captures no more.
NoRange = Literal["wait", "done", "stop"]
RangeReply = Literal["go", "done", "stop", "fenced"]


@dataclass(frozen=True)
class Party:
    """What all workers of one board must share: the program's version, and the data folder.

    ``home`` is a name that only this data folder has.
    """

    version: str
    home: str


@dataclass(frozen=True)
class RangeLease:
    """The right to capture the shards from ``first`` to ``stop``, as long as beats renew it."""

    job_id: str
    number: int
    token: int
    first: int
    stop: int


@dataclass(frozen=True)
class RangeRefusal:
    """Why a worker may not help with a job, and what to do."""

    message: str


@dataclass(frozen=True)
class RangeWorker:
    """A worker with a range: seconds since it took it, and the sequences that it has read."""

    worker: str
    number: int
    seconds: float
    sequences: int

    @property
    def rate(self) -> float | None:
        """Sequences a second; None before the first."""
        return self.sequences / self.seconds if self.sequences and self.seconds else None


@dataclass(frozen=True)
class RangeView:
    """The ranges of a job: all, those done, those that no worker has, and the workers."""

    count: int
    done: int
    waiting: int
    mean_seconds: float | None
    workers: tuple[RangeWorker, ...]

    @property
    def eta_seconds(self) -> float | None:
        """Seconds until all ranges are done if each takes the mean; None before the first."""
        if self.done == self.count:
            return 0.0
        if self.mean_seconds is None or not self.workers:
            return None
        return (self.count - self.done) * self.mean_seconds / len(self.workers)


class RangeBoard:
    """Hands out the ranges of jobs. Methods raise ``RedisError``."""

    def __init__(self, client: Redis) -> None:
        self._script = client.register_script(RANGES_SCRIPT)

    def open(self, claim: Claim, fingerprint: str, shards: int, size: int, party: Party) -> str:
        """Cut ``shards`` into ranges of ``size``; the board of an owner before is kept.

        Returns "opened", "kept" or "fenced".
        """
        if shards < 1 or size < 1:
            raise ValueError(f"got {shards} shards and ranges of {size}; both must be at least 1")
        tail = (claim.fence, fingerprint, shards, size, party.version, party.home)
        return cast(str, self._script(args=["open", claim.id, *tail]))

    def close(self, claim: Claim) -> str:
        """Remove the board. Returns "closed" or "fenced"."""
        return cast(str, self._script(args=["close", claim.id, claim.fence]))

    def take(
        self, job_id: str, worker: str, party: Party, lease_seconds: float
    ) -> RangeLease | RangeRefusal | NoRange:
        """Take a range that nobody has, or that of a slow worker if nothing else is left.

        A worker of another version, or of another data folder, is refused.
        """
        tail = (worker, party.version, party.home, to_ms(lease_seconds))
        outcome, *rest = self._script(args=["take", job_id, *tail])
        if outcome == "range":
            return RangeLease(job_id, *map(int, rest))
        if outcome == "version":
            return RangeRefusal(
                f"Worker {worker} runs Potstill {party.version}, and workers of version {rest[0]} "
                f"capture for job {job_id}. Install the same version on all workers."
            )
        if outcome == "home":
            return RangeRefusal(
                f"Worker {worker} has data folder {party.home}, and the capture for job {job_id} "
                f"is in data folder {rest[0]}. Give all workers the same KD_HOME, on a disk that "
                "they share."
            )
        return cast(NoRange, outcome)

    def beat(self, lease: RangeLease, lease_seconds: float, sequences: int) -> RangeReply:
        """Renew the lease and tell how many sequences of the range were read.

        The reply is "go"; "done" if another worker was faster; "stop" if the job captures no more;
        "fenced" if the lease has ended.
        """
        tail = (lease.token, to_ms(lease_seconds), sequences)
        return cast(RangeReply, self._script(args=["beat", lease.job_id, *tail]))

    def finish(self, lease: RangeLease) -> RangeReply:
        """Tell that all shards of the range are on the disk.

        Returns "go"; "done" if another worker told it before; or "fenced".
        """
        return cast(RangeReply, self._script(args=["finish", lease.job_id, lease.token]))

    def give_back(self, lease: RangeLease) -> RangeReply:
        """End the lease, so that another worker takes the range at once. "go" or "fenced"."""
        return cast(RangeReply, self._script(args=["give_back", lease.job_id, lease.token]))

    def view(self, job_id: str) -> RangeView | None:
        """Return the ranges of a job, and who has them; None where no board is open."""
        flat: list[str] = self._script(args=["view", job_id])
        if not flat:
            return None
        count, done, spent_ms = map(int, flat[:3])
        workers = tuple(
            RangeWorker(worker, int(number), int(ms) / 1000, int(sequences))
            for number, worker, ms, sequences in zip(*[iter(flat[3:])] * 4, strict=True)
        )
        held = len({worker.number for worker in workers})
        mean = spent_ms / 1000 / done if done else None
        return RangeView(count, done, count - done - held, mean, workers)
