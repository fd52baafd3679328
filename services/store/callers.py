"""Who calls the service: the owner of a job and its team."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Caller:
    """The name of an API key, whether it sees the jobs of all other keys, and its team.

    A key that names no team is a team of its own, which has the key's name.
    """

    name: str
    sees_all: bool = False
    named_team: str | None = None
    #: Short id of the key, for the audit log.
    key_id: str = field(default="", compare=False)

    @property
    def team(self) -> str:
        """The team that shares devices and quotas."""
        return self.named_team or self.name


@dataclass(frozen=True)
class Quota:
    """The quotas of a team; None = no limit.

    ``device_seconds`` are of one day in UTC, ``bytes`` of its caches and runs.
    """

    device_seconds: float | None = None
    bytes: int | None = None


#: Every caller of a service that has no keys.
LOCAL_CALLER = Caller("local", sees_all=True)
