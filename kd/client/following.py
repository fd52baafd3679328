"""Follow a job: the events of its stream, over lost connections, until it has ended."""

from __future__ import annotations

import time
from collections.abc import Iterator

from kd.client.errors import Refused, Unreachable
from kd.client.event_decoder import EventDecoder
from kd.client.requests import JobRef, Request, locate_job
from kd.client.retrying import Backoff, Retrier
from kd.client.wire.history import JobEvent, JobEvents
from kd.client.wire.jobs import TERMINAL_STATUSES, Job

#: The pause before a stream that has ended is asked for again, in seconds.
AGAIN_SECONDS = 0.2
#: Events of one page: the most that the server allows.
PAGE_EVENTS = 1000


def follow_events(caller: Retrier, job: JobRef, place: str) -> Iterator[JobEvent]:
    """Yield the events of a job after ``place`` until it has ended, each once and in order.

    After a lost connection the stream goes on after the last event.
    """
    status: str | None = None
    backoff = Backoff(caller.patience)
    while True:
        try:
            headers = {"Accept": "text/event-stream", "Last-Event-ID": place}
            request = Request("GET", locate_job(job, "/events/stream"), headers=headers)
            with caller.transport.stream(request) as (_, pieces):
                decoder = EventDecoder()
                for piece in pieces:
                    backoff.reset()
                    for event in decoder.feed(piece):
                        place, status = event.id, find_status(event, status)
                        yield event
            # The server may have stopped while the job ended, so the rest is read in pages. The
            # record is read before them: no event follows the end.
            if caller.fetch(Job, Request("GET", locate_job(job))).ended:
                for event in list_events(caller, job, place):
                    place, status = event.id, find_status(event, status)
                    yield event
                # A retry may have queued the job again.
                if status is None or status in TERMINAL_STATUSES:
                    return
            pause = AGAIN_SECONDS
        except (Refused, Unreachable) as error:
            pause = backoff.next_pause(error)
        time.sleep(pause)


def list_events(caller: Retrier, job: JobRef, after: str) -> Iterator[JobEvent]:
    """Yield the events that a job has so far after the event ``after``, page by page."""
    more = True
    while more:
        query = {"after": after, "limit": PAGE_EVENTS}
        page = caller.fetch(JobEvents, Request("GET", locate_job(job, "/events"), query))
        yield from page.data
        after, more = page.next_after, page.has_more


def find_status(event: JobEvent, before: str | None) -> str | None:
    """Return the status that the job has after ``event``."""
    return str(event.data["status"]) if event.type == "status" else before
