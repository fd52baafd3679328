"""The events of a job over cut connections and restarts: without a gap and without a repetition."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from bench.support.harness import Parts, make_config
from bench.support.waiting import wait_until
from kd.client.errors import Refused, Unreachable, is_transient
from kd.client.event_decoder import EventDecoder
from kd.client.retrying import MOST_PAUSE_SECONDS, Backoff
from kd.client.wire.history import JobEvent
from tests.support.services.api import running, tell
from tests.support.wire.cutting_proxy import cutting

Connect = Callable[..., Any]
MakeParts = Callable[..., Parts]


def list_ids(parts: Parts, job_id: str) -> list[str]:
    return [place for place, _ in parts.jobs.redis.xrange(f"kd:job:{job_id}:events")]


def test_a_job_is_submitted_followed_and_waited_for(service: Parts, connect: Connect) -> None:
    client = connect(service.settings.server)
    job_id = service.submit("quick")
    events = list(client.events(job_id))
    assert [event.id for event in events] == list_ids(service, job_id)
    assert [event.data["status"] for event in events if event.type == "status"][-1] == "succeeded"
    assert client.wait(job_id).status == "succeeded"
    past = list(client.past_events(job_id))
    # The list also tells the step that the run had reached.
    assert [event.model_copy(update={"step": None}) for event in past] == events
    assert [event.step for event in past if event.type == "metrics"] == [1, 2, 3]
    some = list(client.events(job_id, after=events[2].id, types=["metrics"]))
    assert some == [event for event in events[3:] if event.type == "metrics"]
    assert client.log(job_id).decode().endswith("printed by the run\n")
    assert client.log(job_id, tail=1).decode() == "printed by the run\n"
    assert client.log(job_id, start=10**6) == b""
    assert [each.name for each in client.metrics(job_id, names="loss").series] == ["loss"]
    assert client.checkpoints(job_id) == []


@pytest.mark.parametrize(
    "limits", [(0, 300, 900, 1500, 700), pytest.param((1200,) * 8, marks=pytest.mark.long)]
)
def test_events_come_once_over_connections_that_are_cut(
    api: Parts, connect: Connect, limits: tuple[int, ...]
) -> None:
    claim = running(api)
    for step in range(60):
        tell(api, claim, ("metrics", {"step": step, "loss": 1.0}))
    with cutting(api.settings.port, *limits) as proxy:
        found = []
        for event in connect(proxy.url).events(claim.id):
            found.append(event)
            if event.type == "metrics" and event.data["step"] == 59:
                tell(api, claim, ("metrics", {"step": 60, "loss": 1.0}))
                api.jobs.finish(claim, "succeeded")
        assert not proxy.limits, "every cut has happened"
    assert [event.id for event in found] == list_ids(api, claim.id)
    steps = [event.data["step"] for event in found if event.type == "metrics"]
    assert steps == list(range(61))


def test_events_go_on_after_a_restart_of_the_server(new_parts: MakeParts, connect: Connect) -> None:
    parts = new_parts()
    api = parts.start_api()
    claim = running(parts)
    tell(parts, claim, ("metrics", {"step": 0, "loss": 1.0}))
    client = connect(parts.settings.server)
    events = client.events(claim.id)
    found = [next(events)]
    api.send_signal(signal.SIGKILL)
    api.wait()
    tell(parts, claim, ("metrics", {"step": 1, "loss": 1.0}))
    # The job ends while no server runs.
    api = parts.start_api()
    found += [next(events) for _ in range(2)]
    api.send_signal(signal.SIGTERM)
    tell(parts, claim, ("metrics", {"step": 2, "loss": 1.0}))
    parts.jobs.finish(claim, "succeeded")
    api.wait()
    with ThreadPoolExecutor() as pool:
        rest = pool.submit(list, events)
        time.sleep(0.5)
        parts.start_api()
        found += rest.result()
    assert [event.id for event in found] == list_ids(parts, claim.id)
    assert client.wait(claim.id).status == "succeeded"


@pytest.mark.long
def test_a_wait_lasts_over_a_restart_of_the_server(new_parts: MakeParts, connect: Connect) -> None:
    parts = new_parts()
    claim = running(parts)
    with ThreadPoolExecutor() as pool:
        end = pool.submit(connect(parts.settings.server).wait, claim.id)
        time.sleep(0.5)
        # Not in a timer's thread: an API ends with the thread that started it.
        parts.start_api()
        parts.jobs.finish(claim, "succeeded")
        assert end.result().status == "succeeded"


@pytest.mark.long
def test_a_server_without_its_store_is_asked_again(new_parts: MakeParts, connect: Connect) -> None:
    parts = new_parts()
    parts.start_api()
    job_id = parts.jobs.create(make_config("quick")).id
    client = connect(parts.settings.server)
    parts.server.stop()
    with pytest.raises(Refused, match="Redis") as refused:
        client.with_patience(0).job(job_id)
    assert (refused.value.status, refused.value.retry_after) == (503, 2.0)
    starter = threading.Timer(0.5, parts.server.start)
    starter.start()
    assert client.job(job_id).status == "queued"
    starter.join()


def test_the_events_of_a_retried_job_go_on_after_its_first_end(
    api: Parts, connect: Connect
) -> None:
    claim = running(api)
    api.jobs.finish(claim, "failed", {"type": "x", "detail": "x"})
    api.jobs.change("retry", claim.id)
    again = api.jobs.claim(claim.id, "train", "test", 600)
    assert again is not None
    api.jobs.finish(again, "succeeded")
    statuses = [
        event.data["status"]
        for event in connect(api.settings.server).events(claim.id)
        if event.type == "status"
    ]
    assert statuses[-1] == "succeeded"
    assert "failed" in statuses
    assert statuses == api.statuses(claim.id)


def test_a_job_whose_events_have_expired_ends_at_once(api: Parts, connect: Connect) -> None:
    claim = running(api)
    api.jobs.finish(claim, "succeeded")
    api.jobs.redis.delete(f"kd:job:{claim.id}:events")
    client = connect(api.settings.server)
    assert list(client.events(claim.id)) == []
    with pytest.raises(Refused, match="There is no job"):
        list(client.events("job_" + 26 * "0"))


# ---------------------------------------------------------------------- the parts


def encode(events: list[JobEvent]) -> bytes:
    lines = [
        f"event: {event.type}\ndata: {json.dumps(event.data)}\nid: {event.id}\n\n: ping\n\n"
        for event in events
    ]
    return "".join(lines).encode()


def decode(content: bytes, size: int) -> Iterator[JobEvent]:
    decoder = EventDecoder()
    for start in range(0, len(content), size):
        yield from decoder.feed(content[start : start + size])


def test_a_stream_gives_the_same_events_in_pieces_of_any_size() -> None:
    events = [
        JobEvent.model_validate(
            {"id": f"{n}000-1", "ts": n, "type": "metrics", "data": {"text": "é: \u2028", "n": n}}
        )
        for n in range(1, 4)
    ]
    content = encode(events).replace(b"\\u2028", "\u2028".encode())
    for size in range(1, len(content) + 1):
        assert list(decode(content, size)) == events
    assert list(decode(content[:-40], 7)) == events[:-1], "a cut event is dropped"
    assert list(decode(content.replace(b"\n", b"\r\n"), 7)) == events


def test_pauses_grow_and_end_with_the_patience() -> None:
    error = Unreachable("away")
    backoff = Backoff(1000.0)
    pauses = [backoff.next_pause(error) for _ in range(9)]
    assert pauses[0] < 0.5 and 0.75 * MOST_PAUSE_SECONDS <= pauses[-1] <= 1.25 * MOST_PAUSE_SECONDS
    assert Backoff(60.0).next_pause(Refused(429, "busy", retry_after=12.0)) == 12.0
    for refusal in (Refused(429, "busy", retry_after=90.0), Refused(404, "no")):
        with pytest.raises(Refused):
            Backoff(60.0).next_pause(refusal)
    assert wait_until(lambda: is_transient(Refused(503, "away")))
