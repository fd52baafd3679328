"""The size of an event: what a worker sends to the job store is bounded, whatever its run says."""

from __future__ import annotations

import json
from typing import Any

#: Bytes of one event at most, as JSON.
LONGEST_EVENT = 1 << 16
#: Characters that each text of a longer event keeps.
LONGEST_TEXT = 1 << 12


def bound_event(event: dict[str, Any], size: int) -> dict[str, Any]:
    """Return an event of ``size`` bytes that may be sent.

    The texts of an event above ``LONGEST_EVENT`` are cut. If that is not enough, a warning with its
    type and size takes its place.
    """
    if size <= LONGEST_EVENT:
        return event
    data = _cut_texts(event["data"])
    if len(json.dumps(data)) <= LONGEST_EVENT:
        return {**event, "data": data}
    message = (
        f"An event {event['type']!r} of {size:,} bytes was left out; the most is {LONGEST_EVENT:,}."
    )
    return {**event, "type": "warning", "data": {"message": message}}


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
