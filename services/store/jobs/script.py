"""The script that changes job records, as the parts of ``JobStore`` call it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import ResponseError

#: The parts of the script, in order: records, captures by several workers, and the call itself.
PARTS = ("jobs.lua", "ranges.lua", "call.lua")
#: Questions that one call of Redis answers.
BATCH = 500
SCRIPT = "\n".join((Path(__file__).parents[1] / name).read_text(encoding="utf-8") for name in PARTS)


class OtherFormat(ResponseError):
    """The records are of another format than the script; its text names both, and what to do."""


def is_own_mistake(error: Exception) -> bool:
    """Whether the server is well and refused our command, for instance at a damaged record.

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
        """Raise ``OtherFormat`` if the records are of another format. They are not changed."""
        self._transition("format")


def flatten_fields(fields: Mapping[str, str]) -> Iterable[str]:
    """Names and values in turn, as the script takes them."""
    return (text for pair in fields.items() for text in pair)


def to_ms(seconds: float) -> int:
    """Whole milliseconds, the script's unit of time."""
    return int(seconds * 1000)
