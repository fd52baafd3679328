"""Gangs: workers that run one stage of a job together; ``gangs.lua`` has every state.

The worker that holds the job's lease leads. The others are members of its table, as helpers of a
capture are (``services.store.ranges``).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal, cast

from services.store.jobs.leases import Capacity, Claim
from services.store.jobs.script import to_ms
from services.store.ranges import Membership, RangeTable, SharedTerms


@dataclass(frozen=True)
class GangBeat:
    """The answer to a beat of a member.

    wait    members are missing
    grow    the leader is to stop: a worker idles that would make a gang with too few hosts larger
    go      the gang works: ``number`` is that of this host among ``count``, and ``detail`` has
            where the leader is, and the key of the gang
    lost    ``detail`` says which member is lost, and why
    fenced  the attempt has ended, or this membership
    """

    reply: Literal["wait", "go", "grow", "lost", "fenced"]
    number: int = 0
    detail: str = ""
    count: int = 0


class GangTable(RangeTable):
    """Gathers the hosts of jobs. Methods raise ``RedisError``."""

    def open_gang(
        self, claim: Claim, worker: str, lease_seconds: float, terms: SharedTerms, hosts: int
    ) -> Membership | None:
        """Call for workers until there are ``hosts``, the leader included; None if fenced."""
        head = (claim.id, claim.fence, worker, to_ms(lease_seconds), json.dumps(asdict(terms)))
        outcome, *token = self._transition("gang_open", *head, hosts)
        return Membership(claim.id, int(token[0])) if outcome == "opened" else None

    def begin(
        self, member: Membership, lease: float, capacity: Capacity, key: str, enough: int
    ) -> int | Literal["wait", "yield", "fenced"]:
        """Renew the lease of the leader, and begin with this ``key`` if ``enough`` hosts are there.

        Returns how many they are, the leader included. "yield" tells that an older job gathers, and
        wants this worker.
        """
        gpus, memory, _ = capacity.to_arguments()
        head = (member.id, member.token, to_ms(lease), gpus, memory)
        found = self._transition("gang_begin", *head, key, enough)
        return cast(int | Literal["wait", "yield", "fenced"], found)

    def beat_gang(self, member: Membership, lease_seconds: float) -> GangBeat:
        """Renew the lease of a member."""
        reply, *rest = self._transition("gang_beat", member.id, member.token, to_ms(lease_seconds))
        if reply == "go":
            return GangBeat("go", int(rest[0]), rest[1], int(rest[2]))
        return GangBeat(reply, detail="".join(rest))

    def give_up(self, claim: Claim) -> str:
        """Let a job rest whose gang does not fill. Returns the status after it, or "fenced"."""
        return cast(str, self._transition("gang_end", claim.id, claim.fence))
