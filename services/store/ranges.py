"""Ranges of shards that several workers capture together; ``ranges.lua`` has every state.

The worker that holds the job's lease opens the table of ranges. It and its helpers are members of
the table: each renews its own lease by beats, takes ranges, and tells when their shards are sealed.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal, cast

from pydantic import TypeAdapter

from kd.client.wire.jobs import Capture, CaptureWorker
from kd.progress import SharedCapture
from services.store.jobs.leases import Capacity, Claim
from services.store.jobs.script import ScriptedStore, to_ms

#: Why a member gets no range: ``wait`` a while, all are ``done``, the job captures no more, or a
#: queued job waits for this helper, which must ``leave``.
NoRange = Literal["wait", "done", "stop", "leave"]
#: Ranges that each worker takes in a capture, about: the last ones decide how evenly it ends.
RANGES_PER_WORKER = 64
#: Workers that are reckoned with where any number may come.
ANY_WORKERS = 64
#: Shards of a range at most, so that a worker that dies loses little.
LARGEST_RANGE = 64


def choose_range_size(shards: int, workers: int | None) -> int:
    """Return the number of shards of a range; ``workers`` None is any number of them."""
    return min(max(shards // (RANGES_PER_WORKER * (workers or ANY_WORKERS)), 1), LARGEST_RANGE)


@dataclass(frozen=True)
class Membership:
    """The right of a worker to take ranges of a job, as long as beats renew its lease."""

    id: str
    token: int


@dataclass(frozen=True)
class SharedTerms:
    """What all workers of one stage must share, of whatever host.

    ``version`` is that of the program, and ``place`` the name of the folder or the store that all
    of them see. ``capture`` is for a capture by several workers.
    """

    version: str
    place: str
    capture: SharedCapture | None = None


@dataclass(frozen=True)
class HelpOrder:
    """A membership of a worker that does not hold the job, and what it must know of the job.

    ``claim`` is that of another worker, without its fence.
    """

    member: Membership
    claim: Claim
    terms: SharedTerms


@dataclass(frozen=True)
class TakenRange:
    """A range: its number, its first shard, and the shard after its last."""

    number: int
    first: int
    stop: int


@dataclass(frozen=True)
class ReportedProgress:
    """The progress of a member: sequences, those a second, tokens, and those a second.

    Sequences of shards that were sealed before count as done, but not for the pace.
    """

    done: int = 0
    pace: float = 0.0
    tokens: int = 0
    rate: float = 0.0


@dataclass(frozen=True)
class BeatAnswer:
    """The answer to a beat: go on or stop, and which of its ranges others have finished."""

    reply: Literal["go", "stop", "fenced"]
    finished: frozenset[int] = frozenset()


@dataclass(frozen=True)
class RangeView:
    """The ranges of a job and their workers, as a job shows them.

    ``sequences`` are those of the ranges that are done, and ``unfinished`` those that are done in
    other ranges. ``tokens`` are those that the present workers have told, ``pace`` and ``rate`` the
    sequences and tokens a second of them all.
    """

    capture: Capture
    sequences: int
    unfinished: int
    tokens: int
    pace: float
    rate: float


class RangeTable(ScriptedStore):
    """Hands out the ranges of jobs. Methods raise ``RedisError``."""

    def open(
        self,
        claim: Claim,
        worker: str,
        lease_seconds: float,
        terms: SharedTerms,
        shards: int,
        workers: int | None,
    ) -> Membership | None:
        """Cut ``shards`` into ranges for ``workers`` (None: any number); None if fenced."""
        size = choose_range_size(shards, workers)
        head = (claim.id, claim.fence, worker, to_ms(lease_seconds), json.dumps(asdict(terms)))
        outcome, *token = self._transition("ranges_open", *head, shards, size, workers or "")
        return Membership(claim.id, int(token[0])) if outcome == "opened" else None

    def help(
        self, worker: str, lease_seconds: float, capacity: Capacity, stages: list[str]
    ) -> HelpOrder | None:
        """Become a member of a job that wants more workers; None if there is none.

        A helper leaves its capture for a queued job of ``stages`` that fits.
        """
        gpus, memory, _ = capacity.to_arguments()
        found = self._transition(
            "ranges_help", worker, to_ms(lease_seconds), gpus, memory, " ".join(stages)
        )
        if not found:
            return None
        job_id, token, attempt, terms, config, owner, request_id, stage = found
        claim = Claim(job_id, 0, int(attempt), json.loads(config), owner, request_id, stage)
        shared = TypeAdapter(SharedTerms).validate_json(terms)
        return HelpOrder(Membership(job_id, int(token)), claim, shared)

    def take(self, member: Membership) -> TakenRange | NoRange:
        """Take a range that nobody has, or that of a slow worker if nothing else is left."""
        outcome, *rest = self._transition("ranges_take", member.id, member.token)
        return TakenRange(*map(int, rest)) if outcome == "range" else cast(NoRange, outcome)

    def beat(
        self,
        member: Membership,
        lease_seconds: float,
        reported: ReportedProgress,
        warnings: list[str],
    ) -> BeatAnswer:
        """Renew the lease, report the progress, and add ``warnings`` to the job's events."""
        numbers = (reported.done, reported.pace, reported.tokens, reported.rate)
        head = (member.id, member.token, to_ms(lease_seconds), *numbers)
        reply, *finished = self._transition("ranges_beat", *head, *warnings)
        return BeatAnswer(reply, frozenset(map(int, finished)))

    def finish(self, member: Membership, number: int, sequences: int) -> str:
        """Tell that all shards of a range are sealed, which hold ``sequences``.

        Returns "go"; "done" if another member told it before; or "fenced".
        """
        head = (member.id, member.token, number, sequences)
        return cast(str, self._transition("ranges_finish", *head))

    def leave(self, member: Membership, warning: str = "") -> str:
        """End a membership, so that others take its ranges at once. Returns "go" or "fenced".

        With a ``warning``, which the job's events show, this worker is not asked again.
        """
        return cast(str, self._transition("ranges_leave", member.id, member.token, warning))

    def view(self, job_id: str) -> RangeView | None:
        """Return the ranges of a job and its workers; None if no capture shares its shards."""
        return parse_range_view(self._transition("ranges_view", job_id))


def parse_range_view(flat: list[str]) -> RangeView | None:
    """Parse the answer of ``ranges_view``; None if it is empty."""
    if not flat:
        return None
    count, done, sequences, untaken = map(int, flat[:4])
    capture = Capture(ranges=count, ranges_done=done, ranges_untaken=untaken, workers=[])
    unfinished = tokens = 0
    all_pace = all_rate = 0.0
    for worker, held, *numbers in zip(*[iter(flat[4:])] * 8, strict=True):
        told, finished, pace, seen, rate, ms = map(float, numbers)
        unfinished += max(int(told - finished), 0)
        tokens += int(seen)
        all_pace += pace
        all_rate += rate
        capture.workers.append(
            CaptureWorker(
                worker=worker,
                ranges=int(held),
                sequences=int(told),
                sequences_per_second=round(pace, 3),
                tokens_per_second=round(rate, 1),
                seconds=round(ms / 1000, 1),
            )
        )
    return RangeView(capture, sequences, unfinished, tokens, all_pace, all_rate)
