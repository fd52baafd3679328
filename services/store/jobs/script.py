"""The script that changes job records, as the parts of ``JobStore`` call it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import ResponseError

from cache.errors import PotstillError
from kd.config.kinds import CAPTURE, KINDS, list_stage_names

#: The parts of the script, in order: records, captures by several workers, stages on several hosts,
#: and the call itself.
PARTS = ("jobs.lua", "ranges.lua", "gangs.lua", "call.lua")
#: Questions that one call of Redis answers.
BATCH = 500


def describe_stages() -> str:
    """Return the table of kinds as the script reads it.

    STAGES      the names of all queues
    UNMANNED    the stages that need no worker, and no device
    CAPTURE     the stage that makes a cache
    CAPTURE_OF  "kind stage turn" -> the turn of the capture that made the cache of that stage
    """
    captures = {
        f"{kind.name} {stage.name} {turn}": before[1]
        for kind in KINDS.values()
        for stage, turn in kind.list_turns()
        if (before := kind.find_capture(stage.name, turn)) is not None
    }
    stages = ", ".join(f"'{name}'" for name in list_stage_names())
    unmanned = ", ".join(f"['{name}'] = true" for name in list_stage_names("reconciler"))
    turns = ", ".join(f"['{place}'] = {turn}" for place, turn in captures.items())
    return (
        f"local STAGES = {{{stages}}}\n"
        f"local UNMANNED = {{{unmanned}}}\n"
        f"local CAPTURE = '{CAPTURE.name}'\n"
        f"local CAPTURE_OF = {{{turns}}}"
    )


_FILES = [(Path(__file__).parents[1] / name).read_text(encoding="utf-8") for name in PARTS]
SCRIPT = "\n".join([describe_stages(), *_FILES])


class OtherFormat(ResponseError):
    """The records are of another format than the script; its text names both, and what to do."""

    def describe(self) -> PotstillError:
        """Return the error for people, with the remedy apart."""
        _, _, text = str(self).partition(" ")
        detail, _, remedy = text.partition(": ")
        remedy = f"{remedy[:1].upper()}{remedy[1:]}; or restore a backup of this version."
        return OtherVersion(f"{detail[:1].upper()}{detail[1:]}.", remedy)


class OtherVersion(PotstillError):
    """Data were written by another version, which this one does not read."""

    type = "other_version"


def is_own_mistake(error: Exception) -> bool:
    """Return whether the server is well and refused our command, for instance at a damaged record.

    A full server refuses to write with two errors of the same class.
    """
    return type(error) is ResponseError and not str(error).startswith(("MISCONF", "OOM"))


class ScriptedStore:
    """A client of Redis with the script loaded. Every part of ``JobStore`` inherits from it."""

    def __init__(self, client: Redis, max_attempts: int = 3, home: Path | None = None) -> None:
        """``max_attempts`` is for jobs that do not set their own number.

        ``home`` is the data folder as it is now, which may not be where it was when a job ran.
        """
        self.redis = client
        self.home = home
        self._max_attempts = max_attempts
        self._script = client.register_script(SCRIPT)

    def _transition(self, name: str, *arguments: str | int | float) -> Any:
        """Call one function of the script. Raises ``RedisError``."""
        try:
            return self._script(args=[name, *arguments])
        except ResponseError as error:
            if str(error).startswith(("NEWERFORMAT", "OLDERFORMAT")):
                raise OtherFormat(str(error)) from None
            raise

    def _ask_each(
        self, names: Sequence[str], ask: Callable[[Any, str], object]
    ) -> Iterator[tuple[str, Any]]:
        """Yield each name with the answer to what ``ask`` puts into a pipeline for it."""
        for start in range(0, len(names), BATCH):
            some = names[start : start + BATCH]
            pipeline = self.redis.pipeline(transaction=False)
            for name in some:
                ask(pipeline, name)
            yield from zip(some, pipeline.execute(), strict=True)

    def require_known_format(self) -> None:
        """Raise ``OtherVersion`` if the records are of another format. They are not changed."""
        try:
            self._transition("format")
        except OtherFormat as error:
            raise error.describe() from None


def flatten_fields(fields: Mapping[str, str]) -> Iterable[str]:
    """Names and values in turn, as the script takes them."""
    return (text for pair in fields.items() for text in pair)


def to_ms(seconds: float) -> int:
    """Whole milliseconds, the script's unit of time."""
    return int(seconds * 1000)
