"""The accounts of teams: what they use of the devices and the disk, and their quotas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from services.store.callers import Quota
from services.store.jobs.script import BATCH, ScriptedStore

#: The time for which the events of an ended job stay in Redis, where no other is set.
HISTORY_SECONDS = 30 * 86400.0


@dataclass(frozen=True)
class TeamBytes:
    """Bytes on the disk of a team's caches, of the folders of its runs, and of its files."""

    caches: int = 0
    runs: int = 0
    files: int = 0


@dataclass(frozen=True)
class Account:
    """The use of devices and quotas by a team.

    ``recent`` and ``today`` are device-seconds: those of the past, each counted half as much after
    a half-life, and those of this day in UTC. ``measured_ms`` is the time of the measurement of
    ``bytes``, in milliseconds. ``reason`` says why the team's jobs wait; None if they do not.
    """

    team: str
    devices: int
    recent: float
    today: float
    bytes: int
    measured_ms: int | None
    quota: Quota
    queued: int
    reason: str | None
    disk: TeamBytes = TeamBytes()


class Teams(ScriptedStore):
    """Reads the accounts of teams, and keeps the rules that the script applies to them."""

    def read_accounts(self, *teams: str) -> list[Account]:
        """The accounts of ``teams``, or of all teams that have ever had a job, by name."""
        flat: list[str] = self._transition("accounts", *teams)
        rows = zip(*[iter(flat)] * 13, strict=True)
        return sorted(map(_parse_account, rows), key=lambda account: account.team)

    def write_policy(
        self,
        half_life_seconds: float,
        quotas: Mapping[str, Quota],
        history_seconds: float = HISTORY_SECONDS,
    ) -> bool:
        """Write the rules of the operator; the name "" stands for every other team.

        ``history_seconds`` is the time for which the events of an ended job stay; 0 = for ever.
        Returns whether the rules differ from those before.
        """
        rules: dict[Any, Any] = {
            "half_life_ms": repr(half_life_seconds * 1000),
            "history_seconds": repr(history_seconds),
        }
        for team, quota in quotas.items():
            tail = f":{team}" if team else ""
            if quota.device_seconds is not None:
                rules[f"device_seconds{tail}"] = repr(quota.device_seconds)
            if quota.bytes is not None:
                rules[f"bytes{tail}"] = str(quota.bytes)
        if self.redis.hgetall("kd:policy") == rules:
            return False
        pipeline = self.redis.pipeline(transaction=True)
        pipeline.delete("kd:policy")
        pipeline.hset("kd:policy", mapping=rules)
        pipeline.execute()
        return True

    def write_bytes(self, sizes: Mapping[str, TeamBytes]) -> None:
        """Write the bytes on the disk of some teams, as measured now."""
        rows = [(team, use.caches, use.runs, use.files) for team, use in sizes.items()]
        # In parts, because a script takes some thousand arguments at most.
        for start in range(0, len(rows), BATCH):
            some = rows[start : start + BATCH]
            self._transition("measured", *(value for row in some for value in row))

    def find_teams(self, job_ids: Sequence[str]) -> dict[str, str]:
        """The ids of jobs that have a record -> their teams."""
        found = self._ask_each(
            job_ids, lambda pipeline, job_id: pipeline.hmget(f"kd:job:{job_id}", "team", "owner")
        )
        return {job_id: team or owner for job_id, (team, owner) in found if team or owner}

    def name_owners(self) -> list[str]:
        """Make each owner without a team a team of its own; returns these owners.

        They are those whose jobs were all made by a version without teams. It may be repeated.
        """
        known = set(cast(list[str], self.redis.hkeys("kd:owners")))
        # Of an index the end is a status, and "*" is all owners.
        names = [
            *(key.rpartition(":")[0] for key in self._scan("kd:index:*")),
            *self._scan("kd:caches:*"),
        ]
        found = sorted({*names} - {"*", ""} - known)
        for owner in found:
            pipeline = self.redis.pipeline(transaction=True)
            pipeline.sadd("kd:teams", owner)
            pipeline.hsetnx("kd:owners", owner, owner)
            pipeline.execute()
        return found

    def _scan(self, pattern: str) -> Iterator[str]:
        """Yield what stands for the star at the end of ``pattern`` in each key that matches it."""
        for key in self.redis.scan_iter(pattern, count=1000):
            yield str(key)[len(pattern) - 1 :]

    def list_team_caches(self) -> dict[str, set[str]]:
        """Each team -> the fingerprints of the caches that its jobs made or read."""
        owners = cast(dict[str, str], self.redis.hgetall("kd:owners"))
        found = {team: set[str]() for team in cast(set[str], self.redis.smembers("kd:teams"))}
        lists = self._ask_each([*owners], lambda line, owner: line.smembers(f"kd:caches:{owner}"))
        for owner, fingerprints in lists:
            found.setdefault(owners[owner], set()).update(fingerprints)
        return found


def _parse_account(row: tuple[str, ...]) -> Account:
    team, devices, recent, today, size, measured, seconds, limit, queued, reason, *disk = row
    return Account(
        team=team,
        devices=int(devices),
        recent=float(recent),
        today=float(today),
        bytes=int(size),
        measured_ms=int(measured) if measured else None,
        quota=Quota(float(seconds) if seconds else None, int(limit) if limit else None),
        queued=int(queued),
        reason=reason or None,
        disk=TeamBytes(*map(int, disk)),
    )
