"""The request rate and the open streams of a key, with a real Redis and real connections."""

from __future__ import annotations

import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis

from bench.support.harness import Parts, make_config
from bench.support.waiting import wait_until
from services.api.app import create_app
from services.api.guards import rate_limits
from services.api.guards.rate_limits import HOLD_SCRIPT, TAKE_SCRIPT
from services.store.callers import Caller
from services.store.key_file import create_key, revoke_keys
from tests.support.services.door import bearer, make_door, problem, serving

MakeParts = Callable[..., Parts]
#: An hour in milliseconds: a bucket that fills so slowly gains no token during a test.
HOUR = 3_600_000


# The bucket


def test_a_bucket_gives_a_burst_and_then_a_token_at_a_time(parts: Parts) -> None:
    take = parts.jobs.redis.register_script(TAKE_SCRIPT)
    began = time.monotonic()
    replies: Any = [take(keys=["bucket"], args=[5, HOUR]) for _ in range(7)]
    lasted = 1000 * (time.monotonic() - began) + 1
    assert [reply[0] for reply in replies] == [1, 1, 1, 1, 1, 0, 0]
    assert [reply[1] for reply in replies[:5]] == [4, 3, 2, 1, 0]
    assert all(HOUR / 5 - lasted <= wait <= HOUR / 5 + 1 for *_, wait, _ in replies[5:])
    assert all(HOUR - lasted <= full <= HOUR + 1 for *_, full in replies[4:])


def test_who_waits_as_long_as_a_bucket_says_gets_a_token(parts: Parts) -> None:
    take = parts.jobs.redis.register_script(TAKE_SCRIPT)
    while (reply := take(keys=["bucket"], args=[2, 1000]))[0]:
        pass
    assert 0 < reply[2] <= 500
    time.sleep(reply[2] / 1000)
    assert take(keys=["bucket"], args=[2, 1000])[0] == 1


def test_in_the_long_run_requests_do_not_exceed_the_rate(parts: Parts) -> None:
    take = parts.jobs.redis.register_script(TAKE_SCRIPT)
    begin = time.monotonic()
    taken = 0
    while time.monotonic() - begin < 2.0:
        taken += take(keys=["bucket"], args=[10, 500])[0]
    lasted = time.monotonic() - begin
    assert 20 * lasted - 1 <= taken <= 10 + 20 * lasted + 1


def test_an_unused_bucket_expires(parts: Parts) -> None:
    take = parts.jobs.redis.register_script(TAKE_SCRIPT)
    began = time.monotonic()
    take(keys=["bucket"], args=[60, HOUR])
    first = parts.jobs.redis.pttl("bucket")
    for _ in range(59):
        take(keys=["bucket"], args=[60, HOUR])
    last = parts.jobs.redis.pttl("bucket")
    lasted = 1000 * (time.monotonic() - began) + 1
    # A second more than the time in which the tokens that were taken come back.
    for left, taken in ((first, 1), (last, 60)):
        assert taken * HOUR / 60 + 1000 - lasted <= left <= taken * HOUR / 60 + 1001


def test_a_lower_rate_takes_effect_at_once(parts: Parts) -> None:
    take = parts.jobs.redis.register_script(TAKE_SCRIPT)
    assert take(keys=["bucket"], args=[100, 60_000])[1] == 99
    assert take(keys=["bucket"], args=[10, 60_000])[1] == 9


def test_parallel_requests_take_one_token_each(parts: Parts) -> None:
    taken: list[int] = []

    def ask() -> None:
        with Redis.from_url(parts.server.url, decode_responses=True) as client:
            take = client.register_script(TAKE_SCRIPT)
            taken.extend(take(keys=["bucket"], args=[50, HOUR])[0] for _ in range(25))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 200 and sum(taken) == 50


# Over HTTP


def test_every_answer_says_how_much_is_left(parts: Parts) -> None:
    with serving(
        make_door(parts.settings.model_copy(update={"rate_get": 30, "rate_post": 7}))
    ) as client:
        began = time.monotonic()
        answers = [client.get("/whoami"), client.get("/whoami"), client.post("/things", json={})]
        lasted = time.monotonic() - began
        quiet = client.get("/healthz")
    assert [answer.headers["ratelimit-policy"] for answer in answers] == [
        '"get";q=30;w=60', '"get";q=30;w=60', '"post";q=7;w=60',
    ]  # fmt: skip
    # Tokens come back, one in 2 s and one in 60/7 s, while the requests last.
    for answer, name, rate, taken in zip(
        answers, ("get", "get", "post"), (30, 30, 7), (1, 2, 1), strict=True
    ):
        found = re.fullmatch(rf'"{name}";r=(\d+);t=(\d+)', answer.headers["ratelimit"])
        assert found
        left, seconds = map(int, found.groups())
        assert rate - taken <= left <= rate - taken + lasted * rate / 60
        assert taken * 60 / rate - lasted <= seconds <= math.ceil(taken * 60 / rate)
    assert "ratelimit" not in quiet.headers


def test_beyond_the_rate_the_answer_is_429_until_it_says(parts: Parts) -> None:
    with serving(make_door(parts.settings.model_copy(update={"rate_post": 40}))) as client:
        began = time.monotonic()
        answered = 0
        while (refused := client.post("/things", json={})).status_code == 200:
            answered += 1
        lasted = time.monotonic() - began
        others = [client.get("/whoami").status_code, client.get("/healthz").status_code]
        time.sleep(float(refused.headers["retry-after"]))
        again = client.post("/things", json={})
    # A token comes back in 1.5 s.
    assert 40 <= answered <= 40 + lasted / 1.5 and again.status_code == 200
    assert others == [200, 200]  # requests of the other bucket and of none
    document = problem(refused, 429)
    assert (
        document["type"] == "urn:potstill:problem:too-many-requests"
        and "40 requests" in document["detail"]
    )
    assert refused.headers["retry-after"] in ("1", "2")
    assert refused.headers["ratelimit"].startswith('"post";r=0;t=')


def test_health_is_never_limited(parts: Parts) -> None:
    with serving(make_door(parts.settings.model_copy(update={"rate_get": 1}))) as client:
        assert client.get("/whoami").status_code == 200
        assert client.get("/whoami").status_code == 429
        assert {client.get("/healthz").status_code for _ in range(20)} == {200}


def test_each_owner_has_its_own_rate(parts: Parts, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    (one, _), (two, _), (other, _) = (
        create_key(file, name, ["write"]) for name in ("alice", "alice", "bob")
    )
    settings = parts.settings.model_copy(update={"api_keys_file": file, "rate_get": 3})
    with serving(make_door(settings)) as client:
        answers = [
            client.get("/whoami", headers=bearer(key)).status_code
            for key in (one, two, one, two, other, other)
        ]
        strangers = {client.get("/whoami", headers=bearer("kd_no")).status_code for _ in range(10)}
    assert answers == [200, 200, 200, 429, 200, 200]
    assert strangers == {401}


def test_a_refused_scope_costs_a_token_too(parts: Parts, tmp_path: Path) -> None:
    text, _ = create_key(tmp_path / "keys", "bob", ["read"])
    settings = parts.settings.model_copy(
        update={"api_keys_file": tmp_path / "keys", "rate_post": 2}
    )
    with serving(make_door(settings)) as client:
        found = [
            client.post("/things", json={}, headers=bearer(text)).status_code for _ in range(3)
        ]
    assert found == [403, 403, 429]


def count_vain_requests(caplog: pytest.LogCaptureFixture) -> int:
    """The requests that asked Redis in vain: each of them says so in the log."""
    return sum("requests are not counted" in message for message in caplog.messages)


def test_while_redis_is_away_nobody_is_counted_and_few_ask_it(
    new_parts: MakeParts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rate_limits, "AWAY_SECONDS", 5.0)
    parts = new_parts(rate_get=2)
    with serving(make_door(parts.settings)) as client:
        assert [client.get("/whoami").status_code for _ in range(3)] == [200, 200, 429]
        parts.server.stop()
        assert {client.get("/whoami").status_code for _ in range(10)} == {200}
        assert 1 <= count_vain_requests(caplog) < 10


def test_while_redis_hangs_not_every_request_waits_for_it(
    new_parts: MakeParts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rate_limits, "AWAY_SECONDS", 2.0)
    parts = new_parts(rate_get=5)
    pid = parts.jobs.redis.info("server")["process_id"]
    with serving(make_door(parts.settings)) as client:
        client.get("/whoami")
        os.kill(pid, signal.SIGSTOP)
        try:
            assert {client.get("/whoami").status_code for _ in range(6)} == {200}
        finally:
            os.kill(pid, signal.SIGCONT)
        assert 1 <= count_vain_requests(caplog) < 6
        wait_until(lambda: "ratelimit" in client.get("/whoami").headers)


# Streams


def opened(stack: ExitStack, client: httpx.Client, **headers: str) -> httpx.Response:
    """Open a stream and return its answer: its first event has come, or it was refused."""
    answer = stack.enter_context(client.stream("GET", "/stream", headers=headers))
    if answer.is_success:
        ticks = answer.iter_text()
        assert "tick" in next(ticks)
        stack.callback(
            ticks.close
        )  # without a reference, garbage collection would close the stream
    else:
        answer.read()
    return answer


def test_streams_beyond_the_limit_are_refused_and_a_closed_one_makes_room(parts: Parts) -> None:
    redis = parts.jobs.redis
    with (
        serving(make_door(parts.settings.model_copy(update={"rate_sse": 3}))) as client,
        ExitStack() as stack,
    ):
        first = ExitStack()
        assert opened(first, client).status_code == 200
        assert [opened(stack, client).status_code for _ in range(2)] == [200, 200]
        refused = opened(stack, client)
        document = problem(refused, 429)
        assert "3 event streams" in document["detail"] and refused.headers["retry-after"] == "30"
        assert redis.zcard("kd:streams:local") == 3
        first.close()
        wait_until(lambda: redis.zcard("kd:streams:local") == 2)
        assert opened(stack, client).status_code == 200
        stack.close()
        wait_until(lambda: redis.zcard("kd:streams:local") == 0)


def test_streams_are_counted_by_key(parts: Parts, tmp_path: Path) -> None:
    keys = [create_key(tmp_path / "keys", name, ["read"])[0] for name in ("alice", "bob")]
    settings = parts.settings.model_copy(update={"api_keys_file": tmp_path / "keys", "rate_sse": 1})
    with serving(make_door(settings)) as client, ExitStack() as stack:
        found = [opened(stack, client, **bearer(key)).status_code for key in (*keys, *keys)]
    assert found == [200, 200, 429, 429]


def test_a_stream_s_lease_is_renewed_and_that_of_the_dead_runs_out(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rate_limits, "STREAM_LEASE_SECONDS", 1.5)
    hold = parts.jobs.redis.register_script(HOLD_SCRIPT)
    assert hold(keys=["kd:streams:local"], args=["of a dead process", 1500, 1]) == 1
    with (
        serving(make_door(parts.settings.model_copy(update={"rate_sse": 1}))) as client,
        ExitStack() as stack,
    ):
        assert opened(stack, client).status_code == 429
        time.sleep(1.6)
        assert opened(stack, client).status_code == 200
        until = time.monotonic() + 4.0  # as long as several leases
        while time.monotonic() < until:
            assert parts.jobs.redis.zcard("kd:streams:local") == 1
            with ExitStack() as other:
                assert opened(other, client).status_code == 429
            time.sleep(0.1)


@pytest.mark.parametrize(
    "harm", ["revoked", pytest.param("open to others", marks=pytest.mark.long)]
)
def test_only_the_stream_of_a_revoked_key_ends(
    parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    monkeypatch.setattr(rate_limits, "STREAM_LEASE_SECONDS", 0.9)
    file = tmp_path / "keys"
    alice, bob = (create_key(file, name, ["read"])[0] for name in ("alice", "bob"))
    with (
        serving(make_door(parts.settings.model_copy(update={"api_keys_file": file}))) as client,
        ExitStack() as stack,
    ):
        assert [opened(stack, client, **bearer(key)).status_code for key in (alice, bob)] == [
            200,
            200,
        ]
        time.sleep(2.0)  # as long as several leases
        assert held(parts) == {"alice", "bob"}
        if harm == "revoked":
            revoke_keys(file, "alice")
        else:
            file.chmod(0o666)
        gone = {"alice"} if harm == "revoked" else {"alice", "bob"}
        wait_until(lambda: not held(parts) & gone)
        time.sleep(1.0)
        assert held(parts) == {"alice", "bob"} - gone


def held(parts: Parts) -> set[str]:
    """List the owners of the open streams."""
    return {key.rpartition(":")[2] for key in parts.jobs.redis.keys("kd:streams:*")}


def test_the_events_of_a_job_end_for_a_key_that_is_revoked(
    parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rate_limits, "STREAM_LEASE_SECONDS", 0.9)
    file = tmp_path / "keys"
    key, _ = create_key(file, "alice", ["read"])
    job_id = parts.jobs.create(make_config("quick"), Caller("alice")).id
    app = create_app(parts.settings.model_copy(update={"api_keys_file": file}))
    with serving(app, "on") as client:
        with client.stream("GET", f"/jobs/{job_id}/events/stream", headers=bearer(key)) as answer:
            lines = answer.iter_lines()
            assert "status" in next(lines)
            revoke_keys(file, "alice")
            for _ in lines:  # until the server ends the stream; the job goes on
                pass
        problem(client.get(f"/jobs/{job_id}/events/stream", headers=bearer(key)), 401)


def test_a_stream_opens_and_goes_on_while_redis_is_away(new_parts: MakeParts) -> None:
    parts = new_parts(rate_sse=1)
    with serving(make_door(parts.settings)) as client, ExitStack() as stack:
        parts.server.stop()
        assert [opened(stack, client).status_code for _ in range(3)] == [200, 200, 200]
