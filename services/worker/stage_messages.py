"""What a supervisor and the process of a stage tell each other, apart from the stage's events.

What a worker sends to the job store is bounded, whatever its run says.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from cache.json_object import Json
from kd.progress import Event, HostPlace, SharedCapture

#: Bytes of one event at most, as JSON.
LONGEST_EVENT = 1 << 16
#: Characters that each text of a longer event keeps.
LONGEST_TEXT = 1 << 12


@dataclass(frozen=True)
class Order:
    """The work of a child. ``confinement`` limits what its job may name (``kd.preflight``).

    ``gpus`` is the number of GPUs that the child is given; its torch must see them. ``answers`` is
    the file descriptor from which the child reads which shards to capture, where several workers
    capture a cache; ``shared`` describes the capture that it helps with. ``turn`` is that of the
    stage (``kd.config.kinds``). ``host`` is for a stage that several hosts share.
    """

    stage: str
    config: Json
    home: str
    run_dir: str
    patience: float
    confinement: Json | None = None
    gpus: int = 0
    answers: int | None = None
    shared: SharedCapture | None = None
    turn: int = 0
    host: HostPlace | None = None


@dataclass(frozen=True)
class RangeAsk:
    """What a child asks of its range server; ``range_server`` lists the asks and their fields."""

    ask: Literal["open", "take", "finish"]
    shared: SharedCapture | None = None
    shards: int = 0
    number: int = 0
    sequences: int = 0


@dataclass(frozen=True)
class RangeAnswer:
    """The answer of a range server. A ``range`` has a number, a first shard and a stop."""

    answer: Literal["go", "range", "wait", "done", "stop"]
    number: int = 0
    first: int = 0
    stop: int = 0


def bound_event(event: Event, size: int) -> Event:
    """Return an event of ``size`` bytes that may be sent.

    The texts of an event above ``LONGEST_EVENT`` are cut. If that is not enough, a warning with its
    type and size takes its place.
    """
    if size <= LONGEST_EVENT:
        return event
    data = _cut_texts(event.data)
    if len(json.dumps(data)) <= LONGEST_EVENT:
        return Event(event.type, data)
    message = (
        f"An event {event.type!r} of {size:,} bytes was left out; the most is {LONGEST_EVENT:,}."
    )
    return Event("warning", {"message": message})


def _cut_texts(value: Any) -> Any:
    """Return ``value`` with each of its texts cut to ``LONGEST_TEXT`` characters."""
    match value:
        case str() if len(value) > LONGEST_TEXT:
            return f"{value[:LONGEST_TEXT]}... ({len(value) - LONGEST_TEXT:,} characters cut)"
        case dict():
            return {name: _cut_texts(each) for name, each in value.items()}
        case list():
            return [_cut_texts(each) for each in value]
    return value
