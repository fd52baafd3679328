"""The lease of a worker on one stage of a job, from the claim to the end."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from cache.json_object import Json
from kd.config.jobfile import fill_record
from kd.progress import Event
from services.store.jobs.records import extract_fields
from services.store.jobs.script import ScriptedStore, flatten_fields, to_ms

#: Time between two beats at most, in seconds.
BEAT_SECONDS = 1.0
#: Beats in the time of a lease at least.
BEATS_PER_LEASE = 5

BeatReply = Literal["go", "cancel", "pause", "fenced"]
JobOutcome = Literal["succeeded", "failed"]


@dataclass(frozen=True)
class Capacity:
    """The resources of a worker: GPUs, and bytes of each (of the host, if there are none).

    ``price`` is that of an hour of one of its devices; None if the operator has set none.
    """

    gpus: int = 0
    memory: int = 1 << 62
    price: float | None = None

    def to_arguments(self) -> tuple[int, int, str]:
        """The resources as the script takes them."""
        return self.gpus, self.memory, "" if self.price is None else repr(self.price)


#: Enough for every job.
ANY_CAPACITY = Capacity(gpus=64)


@dataclass(frozen=True)
class Claim:
    """The right to run one stage of a job, as long as beats renew the lease.

    ``turn`` is that of the stage (``kd.config.kinds``).
    """

    id: str
    fence: int
    attempt: int
    config: Json
    owner: str = "local"
    request_id: str = ""
    stage: str = ""
    turn: int = 0


@dataclass(frozen=True)
class EventBatch:
    """Events to deliver. ``number`` grows, so that a batch that is sent twice counts once."""

    number: int
    events: tuple[Event, ...]


class Leases(ScriptedStore):
    """Claims jobs for a worker, renews its leases, and ends them."""

    def claim(
        self,
        job_id: str,
        stage: str,
        worker: str,
        lease_seconds: float,
        capacity: Capacity = ANY_CAPACITY,
    ) -> Claim | None:
        """Claim a queued stage of a job.

        Returns None if it is not queued (the hint came twice, or too late), or needs more than
        ``capacity``.
        """
        tail = (stage, worker, to_ms(lease_seconds), *capacity.to_arguments())
        return _parse_claim(self._transition("claim", job_id, *tail))

    def claim_next(
        self,
        stage: str,
        worker: str,
        lease_seconds: float,
        capacity: Capacity = ANY_CAPACITY,
        others: Iterable[str] = (),
    ) -> Claim | None:
        """Claim the next job that fits, of ``stage`` or of the ``others``.

        It is of the team that holds the fewest devices, then of the one that used the least
        recently. Of a team's jobs those of ``stage`` go first; then priority decides, then age.
        """
        stages = " ".join((stage, *others))
        tail = (stages, worker, to_ms(lease_seconds), *capacity.to_arguments())
        return _parse_claim(self._transition("claim_next", *tail))

    def beat(self, claim: Claim, lease_seconds: float, batch: EventBatch) -> BeatReply:
        """Renew the lease and deliver events. The reply says whether to go on."""
        # The fields of the record that the events set: a later event overrides an earlier one.
        fields = {
            name: value for event in batch.events for name, value in extract_fields(event).items()
        }
        events = [
            text
            for event in batch.events
            for text in (event.type, json.dumps(event.data, allow_nan=False))
        ]
        head = (claim.id, claim.fence, to_ms(lease_seconds), batch.number, len(fields))
        return cast(BeatReply, self._transition("beat", *head, *flatten_fields(fields), *events))

    def idle(self, claim: Claim) -> str:
        """Stop charging for devices while the job waits for another process.

        Returns "go" or "fenced".
        """
        return cast(str, self._transition("idle", claim.id, claim.fence))

    def advance(self, claim: Claim, stage: str, turn: int = 0) -> str:
        """Queue the stage of this name and turn. Returns the status after it, or "fenced"."""
        return cast(str, self._transition("advance", claim.id, claim.fence, stage, turn))

    def finish(
        self, claim: Claim, outcome: JobOutcome, error: Mapping[str, str] | None = None
    ) -> str:
        """End the job. Returns the status after it, or "fenced"."""
        failure = json.dumps(error)
        return cast(str, self._transition("finish", claim.id, claim.fence, outcome, failure))

    def release(self, claim: Claim) -> str:
        """Give up a run that stopped cleanly, which costs no attempt.

        Returns the status after it: queued again, paused, cancelled, or failed at its deadline;
        or "fenced".
        """
        return cast(str, self._transition("release", claim.id, claim.fence))

    def fail_attempt(self, claim: Claim, error: Mapping[str, str]) -> str:
        """Queue the stage again because its process died.

        The job fails with ``error`` if this was its last attempt. Returns the status after it, or
        "fenced".
        """
        return cast(str, self._transition("fail_attempt", claim.id, claim.fence, json.dumps(error)))


def _parse_claim(reply: list[Any] | None) -> Claim | None:
    if not reply:
        return None
    # The reply has the order of the fields of a claim.
    job_id, fence, attempt, config, owner, request_id, stage, turn = reply
    record = fill_record(json.loads(config))
    return Claim(job_id, int(fence), int(attempt), record, owner, request_id, stage, int(turn))
