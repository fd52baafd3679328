"""The history of a job over HTTP: events as pages and streams, metrics, and the log."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.support.harness import Parts
from bench.support.waiting import PATIENCE_SECONDS
from services.api.answers import event_stream
from services.api.answers.event_stream import EventHub, JobTail
from services.api.answers.masked_log import AROUND_BYTES, MaskedLog, mask_secrets
from services.api.answers.thinning import thin_points
from services.process.logs import redact
from services.store.connection import connect_events
from tests.support.services.api import problem, running, serving, sse, statuses, tell

ACCEPT_STREAM = {"Accept": "text/event-stream"}
SECRETS = [
    "kd_" + "A1b2-_x" * 7,
    "hf_" + "abcDEF12" * 4,
    "whsec_" + "QUJDREVGRw==",
    "redis://:a-password@127.0.0.1:6379/0",
    "https://someone:pass-word@example.org/x",
    "Authorization: Bearer abcdefghijklmnopqrstuvwxyz",
    "api_key=verysecretvalue",
    'password: "verysecretvalue"',
]


@pytest.fixture(scope="module")
def api(_server_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    with serving(tmp_path_factory.mktemp("api")) as parts:
        yield parts


def log_of(api: Parts, job_id: str, content: bytes) -> None:
    folder = api.settings.run_dir(job_id)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log.txt").write_bytes(content)


# ---------------------------------------------------------------------- events


def test_events_come_in_pages(api: Parts) -> None:
    claim = running(api)
    tell(
        api,
        claim,
        *(("warning", {"message": str(number)}) for number in range(7)),
        ("stage", {"phase": "x"}),
    )
    api.jobs.finish(claim, "succeeded")
    seen: list[dict[str, Any]] = []
    after = "0"
    more = True
    while more:
        page = api.http.get(f"/jobs/{claim.id}/events", params={"after": after, "limit": 3}).json()
        assert len(page["data"]) <= 3
        seen += page["data"]
        after = page["next_after"]
        more = page["has_more"]
    assert [(event["type"], event["data"]) for event in seen] == api.events(claim.id)
    assert api.http.get(f"/jobs/{claim.id}/events", params={"after": after}).json() == {
        "data": [],
        "has_more": False,
        "next_after": after,
    }
    now = datetime.now(UTC)
    assert all(
        now - timedelta(minutes=1) < datetime.fromisoformat(event["ts"]) <= now for event in seen
    )


def test_events_are_filtered_by_type(api: Parts) -> None:
    claim = running(api)
    tell(api, claim, *((kind, {"message": "x"}) for _ in range(3) for kind in ("warning", "log")))
    page = api.http.get(f"/jobs/{claim.id}/events", params={"types": "warning", "limit": 2}).json()
    assert [event["type"] for event in page["data"]] == ["warning", "warning"]
    assert page["has_more"] is True
    both = api.http.get(f"/jobs/{claim.id}/events", params={"types": "warning,status"}).json()[
        "data"
    ]
    assert {event["type"] for event in both} == {"warning", "status"}
    assert api.http.get(f"/jobs/{claim.id}/events", params={"types": "none"}).json()["data"] == []


@pytest.mark.parametrize("query", ["after=yesterday", "after=-1", "limit=0", "limit=1001"])
def test_a_bad_page_is_refused(api: Parts, query: str) -> None:
    problem(api.http.get(f"/jobs/{running(api).id}/events?{query}"), 422)


def test_events_stream_to_the_end_and_resume_anywhere(api: Parts) -> None:
    claim = running(api)
    tell(api, claim, *(("metrics", {"step": step, "loss": 1.0}) for step in range(20)))
    api.jobs.finish(claim, "succeeded")
    url = f"/jobs/{claim.id}/events/stream"
    with api.http.stream("GET", url) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache"
        live = list(sse(response))
    assert statuses(live) == ["queued", "running", "succeeded"]
    assert [(event["event"], json.loads(event["data"])) for event in live] == api.events(claim.id)
    for place in (0, len(live) // 2, len(live) - 2, len(live) - 1):
        with api.http.stream("GET", url, headers={"Last-Event-ID": live[place]["id"]}) as response:
            assert list(sse(response)) == live[place + 1 :]
    problem(api.http.get(url, headers={"Last-Event-ID": "yesterday"}), 422)


def test_a_stream_of_new_events_begins_with_the_first_that_comes(api: Parts) -> None:
    claim = running(api)
    tell(api, claim, ("metrics", {"step": 1, "loss": 2.0}))
    url = f"/jobs/{claim.id}/events/stream?new_only=true"
    with api.http.stream("GET", url) as response:
        tell(api, claim, ("metrics", {"step": 2, "loss": 1.0}))
        api.jobs.finish(claim, "succeeded")
        seen = list(sse(response))
    assert [event["event"] for event in seen] == ["metrics", "status"]
    assert json.loads(seen[0]["data"])["step"] == 2
    place = api.http.get(f"/jobs/{claim.id}/events").json()["data"][0]["id"]
    with api.http.stream("GET", url, headers={"Last-Event-ID": place}) as response:
        assert len(list(sse(response))) == len(api.events(claim.id)) - 1
    with api.http.stream("GET", url) as response:
        assert list(sse(response)) == []


def test_hundreds_of_streams_are_open_at_a_time(api: Parts) -> None:
    """Each holds a connection to the store; the library's default pool would refuse the 101st."""
    claim = running(api)
    address = ("127.0.0.1", api.settings.port)
    request = f"GET /jobs/{claim.id}/events/stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()
    with ExitStack() as stack:
        streams = [
            stack.enter_context(socket.create_connection(address, timeout=60)) for _ in range(150)
        ]
        for stream in streams:
            stream.sendall(request)
        assert {stream.recv(12) for stream in streams} == {b"HTTP/1.1 200"}
        api.jobs.finish(claim, "succeeded")


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_both_paths_of_events_serve_the_stream(api: Parts, prefix: str) -> None:
    """A browser's EventSource names its media type; a client that names none gets a page."""
    claim = running(api)
    api.jobs.finish(claim, "succeeded")
    url = f"{prefix}/jobs/{claim.id}/events"
    with api.http.stream("GET", url, headers={"Accept": "text/event-stream"}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert statuses(list(sse(response))) == ["queued", "running", "succeeded"]
    assert api.http.get(url).headers["content-type"] == "application/json"


def test_a_stream_ends_when_its_job_is_deleted(api: Parts) -> None:
    claim = running(api)
    with api.http.stream("GET", f"/jobs/{claim.id}/events/stream") as response:
        lines = response.iter_lines()
        next(lines)
        api.jobs.finish(claim, "succeeded")
        api.jobs.change("delete", claim.id)
        for _ in lines:
            pass


def test_a_long_history_comes_whole(api: Parts) -> None:
    claim = running(api)
    for number in range(4):
        tell(api, claim, *(("warning", {"message": f"{number} {index}"}) for index in range(500)))
    api.jobs.finish(claim, "succeeded")
    with api.http.stream("GET", f"/jobs/{claim.id}/events/stream") as response:
        assert len(list(sse(response))) == 2003
    page = api.http.get(f"/jobs/{claim.id}/events", params={"limit": 1000}).json()
    assert (len(page["data"]), page["has_more"]) == (1000, True)


def test_a_job_s_stream_is_read_once_for_all_its_followers(api: Parts) -> None:
    claim = running(api)
    streams = 20
    beats = 15
    with ExitStack() as stack:
        # The stream comes on either path.
        paths = [f"/jobs/{claim.id}/events{part}" for part in ("", "/stream")] * (streams // 2)
        readers = [
            sse(
                stack.enter_context(
                    api.http.stream("GET", path, headers=ACCEPT_STREAM, timeout=PATIENCE_SECONDS)
                )
            )
            for path in paths
        ]
        for reader in readers:
            assert [next(reader)["event"], next(reader)["event"]] == ["status", "status"]
        api.jobs.redis.config_resetstat()
        for step in range(beats):
            tell(api, claim, ("metrics", {"step": step, "loss": 1.0}))
            assert [json.loads(next(reader)["data"])["step"] for reader in readers] == (
                [step] * streams
            )
        reads = api.jobs.redis.info("commandstats")["cmdstat_xread"]["calls"]
        # One for each beat, and one a second besides; each stream by itself would need one a beat.
        assert reads < beats * streams / 2
        api.jobs.finish(claim, "succeeded")
        assert [statuses(list(reader)) for reader in readers] == [["succeeded"]] * streams


@pytest.mark.parametrize(("events", "size"), [(3, 1 << 20), (1000, 500), (1000, 1 << 20)])
def test_a_follower_gets_each_event_once_however_slowly_it_reads(
    api: Parts, monkeypatch: pytest.MonkeyPatch, events: int, size: int
) -> None:
    """Followers begin anywhere, pause at random, and fall behind what the tail holds."""
    monkeypatch.setattr(event_stream, "HELD_EVENTS", events)
    monkeypatch.setattr(event_stream, "HELD_BYTES", size)
    monkeypatch.setattr(event_stream, "PAGE_EVENTS", 7)
    claim = running(api)
    tell(api, claim, *(("warning", {"message": str(number)}) for number in range(40)))
    draw = random.Random(events * size)
    history = read_ids(api, claim.id)

    async def read_all(tail: JobTail, after: str, pauses: float) -> list[str]:
        found = b""
        async for content in tail.follow(after, lambda: False):
            found += content
            await asyncio.sleep(draw.random() * pauses)
        return re.findall(r"^id: (.+)$", found.decode(), re.MULTILINE)

    async def scenario() -> dict[str, list[list[str]]]:
        async with connect_events(api.settings.redis_url or "") as client:
            hub = EventHub(client)
            starts = ["0", *draw.sample(history, 10), history[-1]]
            with ExitStack() as stack:
                tasks = []
                for after in starts:
                    tail = stack.enter_context(hub.join_tail(claim.id))
                    tasks += [
                        asyncio.create_task(read_all(tail, after, pauses)) for pauses in (0, 0.02)
                    ]
                for number in range(40):
                    batch = [("warning", {"message": str(number)})] * draw.randint(1, 12)
                    await asyncio.to_thread(tell, api, claim, *batch)
                await asyncio.to_thread(api.jobs.finish, claim, "succeeded")
                ids = await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_SECONDS)
            return {after: ids[2 * n : 2 * n + 2] for n, after in enumerate(starts)}

    found = asyncio.run(scenario())
    whole = read_ids(api, claim.id)
    for after, ids in found.items():
        place = 0 if after == "0" else whole.index(after) + 1
        assert ids == [whole[place:], whole[place:]], after


def read_ids(api: Parts, job_id: str) -> list[str]:
    """List the ids of a job's events."""
    return [place for place, _ in api.jobs.redis.xrange(f"kd:job:{job_id}:events")]


def test_a_job_that_is_retried_is_followed_anew_beside_a_follower_that_is_late(api: Parts) -> None:
    claim = running(api)
    api.jobs.finish(claim, "failed", {"type": "x", "detail": "x", "remedy": ""})

    async def scenario() -> None:
        async with connect_events(api.settings.redis_url or "") as client:
            hub = EventHub(client)
            with hub.join_tail(claim.id) as late:
                assert len([page async for page in late.follow("0", lambda: False)]) == 1
                await asyncio.to_thread(api.jobs.change, "retry", claim.id)
                with hub.join_tail(claim.id) as tail:
                    follower = tail.follow("0", lambda: False)
                    page = await asyncio.wait_for(anext(follower), PATIENCE_SECONDS)
                    assert page.count(b"event: status") == 4, "queued, running, failed, queued"
                    await asyncio.to_thread(api.jobs.change, "cancel", claim.id)
                    page = await asyncio.wait_for(anext(follower), PATIENCE_SECONDS)
                    assert b'"cancelled"' in page

    asyncio.run(scenario())


def test_a_stream_without_events_gets_a_comment_now_and_then(
    api: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "PING_SECONDS", 0.5)
    claim = running(api)

    async def scenario() -> list[bytes]:
        async with connect_events(api.settings.redis_url or "") as client:
            with EventHub(client).join_tail(claim.id) as tail:
                follower = tail.follow("0", lambda: False)
                return [await asyncio.wait_for(anext(follower), PATIENCE_SECONDS) for _ in range(3)]

    assert asyncio.run(scenario())[1:] == [b": ping\n\n"] * 2
    api.jobs.finish(claim, "succeeded")


# ---------------------------------------------------------------------- metrics


def metrics(api: Parts, job_id: str, **query: Any) -> dict[str, dict[str, Any]]:
    answer = api.http.get(f"/jobs/{job_id}/metrics", params=query)
    assert answer.status_code == 200, answer.text
    return {series["name"]: series for series in answer.json()["series"]}


def test_a_range_comes_in_full_from_the_file_of_the_run(api: Parts) -> None:
    claim = running(api)
    tell(api, claim, ("metrics", {"step": 5_000, "loss": 9.0}))
    folder = api.settings.run_dir(claim.id)
    folder.mkdir(parents=True)
    lines: list[dict[str, Any]] = []
    for step in range(1, 20_001):
        lines.append({"type": "metrics", "step": step, "loss": 1.0 / step})
        if step % 1_000 == 0:
            lines.append({"type": "evaluation", "step": step, "validation_kl": 0.5})
            lines.append({"type": "check", "step": step, "ok": True})
    text = "".join(json.dumps(each) + "\n" for each in lines)
    (folder / "metrics.jsonl").write_text(text + '{"type": "metr', encoding="utf-8")
    for first, last in ((1, 40), (4_990, 5_010), (13_000, 13_007), (19_990, 20_000)):
        query = {"after_step": first - 1, "before_step": last + 1, "max_points": 8192}
        found = metrics(api, claim.id, **query)
        assert found["loss"]["steps"] == list(range(first, last + 1))
        assert found["loss"]["values"][0] == 1.0 / first
        evaluated = [step for step in range(first, last + 1) if step % 1_000 == 0]
        assert found.get("validation_kl", {"steps": []})["steps"] == evaluated
    assert metrics(api, claim.id)["loss"]["steps"] == [5_000], "without an end it is the store's"
    (folder / "metrics.jsonl").unlink()
    assert metrics(api, claim.id, before_step=6_000)["loss"]["values"] == [9.0]
    assert metrics(api, claim.id, before_step=5_000) == {}


def test_a_list_of_names_is_bounded(api: Parts) -> None:
    """Each name of a metric is compared with each pattern, and all requests wait meanwhile."""
    claim = running(api)
    for path, name in (("metrics", "names"), ("events", "types")):
        long = {name: "a*b*c," * 1000}
        answer = api.http.get(f"/jobs/{claim.id}/{path}", params=long)
        problem(answer, 422, "invalid-parameter")
        assert api.http.get(f"/jobs/{claim.id}/{path}", params={name: "a*b*c"}).is_success


def test_metrics_are_one_series_each(api: Parts) -> None:
    claim = running(api)
    tell(
        api,
        claim,
        *(("metrics", {"step": step, "loss": 4.0 / step, "kd_loss": None}) for step in range(1, 5)),
    )
    tell(api, claim, ("evaluation", {"step": 4, "validation_loss": 2.5}))
    found = metrics(api, claim.id)
    assert set(found) == {"loss", "validation_loss"}, "a metric that was never known has no series"
    assert found["loss"] == {
        "name": "loss",
        "steps": [1, 2, 3, 4],
        "values": [4.0, 2.0, 4 / 3, 1.0],
        "points": 4,
    }
    assert (found["validation_loss"]["steps"], found["validation_loss"]["values"]) == ([4], [2.5])
    assert set(metrics(api, claim.id, names="loss,temperature")) == {"loss"}
    assert metrics(api, claim.id, after_step=2)["loss"]["steps"] == [3, 4]
    assert metrics(api, claim.id, after_step=4) == {}
    assert api.http.get(f"/jobs/{claim.id}/metrics").json()["last_step"] == 4


def test_points_of_an_earlier_version_have_the_names_of_today(api: Parts) -> None:
    claim = running(api)
    points = [{"step": 1, "perplexity": 9.0}, {"step": 2, "train_perplexity": 8.0}]
    tell(api, claim, *(("metrics", point) for point in points))
    found = metrics(api, claim.id, names="train_perplexity")
    assert found["train_perplexity"]["values"] == [9.0, 8.0]


def test_scalars_of_layers_are_series_that_a_star_finds(api: Parts) -> None:
    claim = running(api)
    scalars = {"grad_norm/layer 0": 0.5, "grad_norm/layer 10": 0.25, "memory/peak_bytes": 2.0**30}
    tell(api, claim, ("metrics", {"step": 1, "loss": 3.0}), ("scalars", {"step": 1, **scalars}))
    assert set(metrics(api, claim.id)) == {"loss", *scalars}
    assert set(metrics(api, claim.id, names="loss,grad_norm/*")) == {
        "loss", "grad_norm/layer 0", "grad_norm/layer 10"
    }  # fmt: skip
    view = api.http.get(f"/jobs/{claim.id}").json()
    assert "memory/peak_bytes" not in view["metrics"], "a job's view stays short"


def test_a_step_that_is_taken_again_counts_once(api: Parts) -> None:
    claim = running(api)
    tell(api, claim, ("metrics", {"step": 1, "loss": 3.0}), ("metrics", {"step": 2, "loss": 2.0}))
    tell(api, claim, ("metrics", {"step": 2, "loss": 2.5}))
    assert metrics(api, claim.id)["loss"]["values"] == [3.0, 2.5]


def test_scalars_keep_fewer_points_than_losses(api: Parts) -> None:
    claim = running(api)
    for start in range(0, 3000, 500):
        steps = range(start, start + 500)
        tell(api, claim, *(("scalars", {"step": s, "memory/peak_bytes": 1.0}) for s in steps))
        tell(api, claim, *(("metrics", {"step": s, "loss": 1.0}) for s in steps))
    found = metrics(api, claim.id)
    assert found["loss"]["points"] == 3000
    assert 512 <= found["memory/peak_bytes"]["points"] <= 1024


def test_a_long_history_is_thinned_out_and_shows_its_spikes(api: Parts) -> None:
    claim = running(api)
    steps = range(0, 30_000, 10)
    for start in range(0, len(steps), 500):
        some = steps[start : start + 500]
        tell(
            api,
            claim,
            *(("metrics", {"step": s, "loss": 99.0 if s == 12_340 else 1 / (s + 1)}) for s in some),
        )
    found = metrics(api, claim.id, max_points=50)["loss"]
    assert found["points"] == 3000
    assert len(found["steps"]) <= 50
    assert found["steps"] == sorted(found["steps"])
    assert (found["steps"][0], found["steps"][-1]) == (0, 29_990)
    assert dict(zip(found["steps"], found["values"], strict=True))[12_340] == 99.0


points = st.lists(
    st.tuples(st.integers(0, 10**6), st.floats(-1e9, 1e9)),
    min_size=1,
    max_size=300,
    unique_by=lambda p: p[0],
)


@given(points.map(sorted), st.integers(4, 60))
def test_thinning_invents_no_point_and_loses_no_extreme(
    series: list[tuple[int, float]], limit: int
) -> None:
    kept = thin_points(series, limit)
    assert len(kept) <= limit
    assert kept == sorted(set(kept))
    assert set(kept) <= set(series)
    assert (kept[0], kept[-1]) == (series[0], series[-1])
    assert len(kept) == len(series) or len(series) > limit
    assert min(value for _, value in kept) == min(value for _, value in series)
    assert max(value for _, value in kept) == max(value for _, value in series)


# ---------------------------------------------------------------------- log


def test_a_job_that_has_not_run_has_an_empty_log(api: Parts) -> None:
    answer = api.http.get(f"/jobs/{running(api).id}/logs")
    assert (answer.status_code, answer.text) == (200, "")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"


def test_a_log_comes_whole_in_part_and_by_its_end(api: Parts) -> None:
    job_id = running(api).id
    content = b"".join(b"line %d\n" % number for number in range(2000))
    log_of(api, job_id, content)

    def get(**headers: str) -> httpx.Response:
        return api.http.get(f"/jobs/{job_id}/logs", headers=headers)

    assert get().content == content
    assert get().headers["accept-ranges"] == "bytes"
    for asked, start, stop in (
        ("bytes=0-9", 0, 10),
        ("bytes=100-", 100, len(content)),
        ("bytes=-20", len(content) - 20, len(content)),
        ("bytes=5-999999", 5, len(content)),
        ("bytes=-999999", 0, len(content)),
    ):
        answer = get(Range=asked)
        assert (answer.status_code, answer.content) == (
            206 if stop - start < len(content) else 200,
            content[start:stop],
        )
        if answer.status_code == 206:
            assert answer.headers["content-range"] == f"bytes {start}-{stop - 1}/{len(content)}"
    for ignored in ("bytes=x-y", "lines=1-2", "bytes=-", "bytes=0-1,4-5"):
        assert (get(Range=ignored).status_code, get(Range=ignored).content) == (200, content)
    for beyond in (f"bytes={len(content)}-", "bytes=-0", "bytes=9-3"):
        assert problem(get(Range=beyond), 416)
        assert get(Range=beyond).headers["content-range"] == f"bytes */{len(content)}"
    assert api.http.get(f"/jobs/{job_id}/logs", params={"tail": 2}).text == "line 1998\nline 1999\n"
    assert api.http.get(f"/jobs/{job_id}/logs", params={"tail": 9999}).content == content
    problem(api.http.get(f"/jobs/{job_id}/logs", params={"tail": 0}), 422)
    head = api.http.head(f"/jobs/{job_id}/logs")
    assert (head.status_code, head.content, head.headers["content-length"]) == (
        200,
        b"",
        str(len(content)),
    )


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"a", b"a\n", b"a\nb", b"a\nb\n", b"\n\n\n", b"x" * 9000 + b"\ny\n"]
)
def test_the_last_lines_are_those_that_python_splits(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(content)
    for lines in (1, 2, 3, 10):
        log = MaskedLog(tmp_path, tmp_path / "log")
        expected = b"".join(content.splitlines(keepends=True)[-lines:])
        assert log.read(log.find_tail(lines), log.size) == expected
        log.close()


def test_a_log_shows_no_secret_whatever_part_is_asked_for(api: Parts) -> None:
    job_id = running(api).id
    rng = random.Random(3)
    filler = "".join(rng.choice("abcdef \n") for _ in range(3 * AROUND_BYTES))
    text = filler + "".join(f"\n{secret}\n{filler[:700]}" for secret in SECRETS) + "é"
    log_of(api, job_id, text.encode())
    whole = api.http.get(f"/jobs/{job_id}/logs").content
    assert len(whole) == len(text.encode()), "every byte stays at its place"
    words = [
        b"A1b2",
        b"abcDEF",
        b"QUJD",
        b"a-password",
        b"pass-word",
        b"abcdefghijklm",
        b"verysecretvalue",
    ]
    assert not [word for word in words if word in whole]
    for start in range(3 * AROUND_BYTES, len(whole), 37):
        part = api.http.get(
            f"/jobs/{job_id}/logs", headers={"Range": f"bytes={start}-{start + 40}"}
        ).content
        assert part == whole[start : start + 41]


@pytest.mark.parametrize("secret", SECRETS)
def test_a_job_log_hides_what_the_service_s_own_logs_hide(secret: str) -> None:
    text = f"before {secret} after"
    shown = mask_secrets(text)
    assert len(shown) == len(text)
    assert re.sub(r"\*+", "***", shown) == redact(text)


def test_a_word_that_is_known_to_be_secret_is_hidden(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes("the pässword is swördfish here".encode())
    log = MaskedLog(tmp_path, tmp_path / "log", ("swördfish",))
    assert log.read(0, log.size) == "the pässword is ********** here".encode()
    log.close()


def test_a_log_of_any_text_is_read_quickly(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"a." * 50_000)
    log = MaskedLog(tmp_path, tmp_path / "log")
    before = time.process_time()
    assert log.read(0, log.size) == b"a." * 50_000
    assert time.process_time() - before < 5
    log.close()


def test_a_log_that_is_a_link_is_not_followed(api: Parts, tmp_path: Path) -> None:
    job_id = running(api).id
    (tmp_path / "secret").write_text("hidden")
    log_of(api, job_id, b"")
    log = api.settings.run_dir(job_id) / "log.txt"
    log.unlink()
    log.symlink_to(tmp_path / "secret")
    answer = api.http.get(f"/jobs/{job_id}/logs")
    assert (answer.status_code, answer.text) == (200, "")
