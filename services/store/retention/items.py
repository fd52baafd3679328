"""What a rule finds, and what the rules know of the service."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cache.disk import locked, storage_errors
from cache.disk import set_aside as rename_aside
from kd.files import LOCK
from services.settings import Settings
from services.store.jobs.store import JobStore
from services.store.retention.in_use import InUse
from services.store.retention.rules import AgeLimits


class Kept(Exception):
    """Something stays; the text says why."""


@dataclass(frozen=True)
class Item:
    """Something that a rule would remove.

    ``name`` is the id, fingerprint or digest by which others name it, ``age`` is in seconds, and
    ``kept_by`` says who needs it: None = nobody, so that it can be removed.
    """

    kind: str
    name: str
    path: Path | None
    bytes: int
    reason: str
    age: float
    kept_by: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return {
            "kind": self.kind,
            "name": self.name,
            "path": None if self.path is None else str(self.path),
            "bytes": self.bytes,
            "reason": self.reason,
            "age_seconds": round(self.age, 1),
            "kept_by": self.kept_by,
        }

    def describe(self) -> dict[str, Any]:
        """Return what the audit log says of the removal of this item, besides its name."""
        more = {"kind": self.kind, "bytes": self.bytes, "why": self.reason}
        if self.path is not None and self.path.name != self.name:
            more["path"] = self.path.name
        return more


@dataclass(frozen=True)
class Scene:
    """The service as one pass of the rules sees it.

    ``now`` is the time of its beginning in seconds since 1970. With ``force`` what is only named
    can be removed too; what a process holds never can.
    """

    settings: Settings
    store: JobStore
    limits: AgeLimits
    in_use: InUse
    now: float
    force: bool = False

    def is_older(self, time_of: float, limit: float | None) -> bool:
        """Whether something of this time is older than a limit."""
        return limit is not None and self.now - time_of >= limit

    def require_unnamed(self, name: str) -> None:
        """Raise ``Kept`` if an open job names this now: it may be newer than the list."""
        if not self.force and (users := self.store.find_open_users(name)):
            raise Kept(f"the job {users[0]}, which has not ended, names it")


class Rule(Protocol):
    """Finds what one kind of rule removes, and removes it."""

    def find(self, scene: Scene) -> Iterator[Item]:
        """Yield what the limits would remove, also what somebody needs."""

    def remove(self, item: Item, scene: Scene) -> None:
        """Remove an item, whole or not at all. Raises ``Kept`` if it is needed by now."""


def describe_age(seconds: float) -> str:
    """An age for people: 3.5 days."""
    return f"{seconds / 86400:.3g} days"


def set_aside(path: Path) -> Path:
    """Rename ``path`` for its removal. Raises ``Kept`` if it is gone already."""
    try:
        return rename_aside(path)
    except FileNotFoundError:
        raise Kept("it is gone already") from None


@contextmanager
def holding_run(folder: Path) -> Iterator[None]:
    """Hold a run folder, so that no stage begins in it. Raises ``Kept`` if a process holds it."""

    def refuse() -> None:
        raise Kept("a process writes to it")

    if not folder.is_dir():
        raise Kept("it is gone already")
    with storage_errors(folder), locked(folder / LOCK, refuse):
        yield
