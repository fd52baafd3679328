"""The client with a real API: jobs, pages, files, refusals, and connections that are cut."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.support.harness import Parts, make_config
from bench.support.small.caches import make_cache
from kd.client import client as client_module
from kd.client.errors import Refused, TimedOut, Unreachable
from kd.config.jobfile import parse_config
from services.store.jobs.leases import Claim
from tests.support.services.api import inputs, running, tell, valid
from tests.support.wire.cutting_proxy import cutting

Connect = Callable[..., Any]

#: More bytes than the headers of an answer, and fewer than the file of a test.
CUT = 100_000


def test_a_job_is_submitted_as_a_mapping_a_config_and_a_file(
    api: Parts, text: str, tmp_path: Path, connect: Connect
) -> None:
    client = connect(api.settings.server)
    body = valid("quick", text)
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(body))
    jobs = [client.submit(each) for each in (body, parse_config(body), file, str(file))]
    assert len({job.id for job in jobs}) == 4
    assert [job.config for job in jobs] == [jobs[0].config] * 4
    assert client.job(jobs[0].id) == client.job(jobs[0])
    assert client.validate(body).stages == ["train"]


def test_the_actions_of_a_job(api: Parts, text: str, connect: Connect) -> None:
    client = connect(api.settings.server)
    job = client.submit(valid("quick", text))
    assert client.pause(job).status == "paused"
    assert client.resume(job).status == "queued"
    assert client.cancel(job).status == client.wait(job).status == "cancelled"
    assert client.retry(job).status == "queued"
    client.cancel(job)
    twin = client.clone(job, {"name": "twin"})
    assert (twin.name, twin.status) == ("twin", "queued")
    client.delete(job)
    with pytest.raises(Refused, match="There is no job") as refused:
        client.job(job)
    assert refused.value.status == 404


def test_a_refusal_names_the_wrong_fields(api: Parts, text: str, connect: Connect) -> None:
    client = connect(api.settings.server)
    with pytest.raises(Refused) as refused:
        client.submit(valid("quick", text, loss={"alpha": 7.0}))
    assert refused.value.status == 422
    assert [each.pointer for each in refused.value.errors] == ["/loss/alpha"]
    assert refused.value.problem is not None
    job = client.submit(valid("quick", text))
    client.cancel(job)
    with pytest.raises(Refused, match="pause is not possible") as refused:
        client.pause(job)
    assert refused.value.problem is not None
    assert refused.value.problem.job_status == "cancelled"


def test_jobs_are_listed_over_all_pages(
    api: Parts, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.jobs.redis.flushall()
    monkeypatch.setattr(client_module, "PAGE_JOBS", 2)
    made = [api.jobs.create(make_config("quick", labels={"n": str(n % 2)})).id for n in range(5)]
    client = connect(api.settings.server)
    assert [job.id for job in client.jobs()] == made[::-1]
    assert [job.id for job in client.jobs(label="n:1")] == [made[3], made[1]]
    assert list(client.jobs(status="failed")) == []


def test_the_service_tells_of_itself(api: Parts, connect: Connect) -> None:
    client = connect(api.settings.server)
    assert client.health().status == "ok"
    assert client.version().name == "potstill"
    assert client.caches() == client.workers() == client.runs() == []
    assert [account.team for account in client.quotas()] == ["local"]
    shown = client.request("GET", "/jobs", query={"limit": 1, "status": "failed", "cursor": None})
    assert shown == {"data": [], "has_more": False, "next_cursor": None}
    with pytest.raises(Refused, match="There is no cache"):
        client.cache("0" * 32)
    with pytest.raises(Refused, match="There is nothing at"):
        client.delete_cache("../jobs")


def test_a_cache_is_looked_at_and_checked(api: Parts, connect: Connect) -> None:
    api.jobs.redis.flushall()
    folder = make_cache(api.settings.caches, teacher=inputs(api.settings.home / "inputs"))
    client = connect(api.settings.server)
    statistics = client.cache_statistics(folder.name, seed=3)
    assert (statistics.seed, statistics.whole) == (3, True)
    shards = client.cache_shards(folder.name)
    assert set(shards.cells) == {"0"}
    records = client.cache_records(folder.name, sequence=2, start=4, limit=5)
    assert (records.sequence, [each.position for each in records.records]) == (2, [*range(4, 9)])
    assert client.cache_usage(folder.name).jobs == []
    assert client.measure_fidelity(folder.name).kind == "fidelity"
    check = client.verify_cache(folder.name, idempotency_key="once")
    assert client.verify_cache(folder.name, idempotency_key="once").id == check.id
    usage = client.cache_usage(folder.name)
    assert [each.kind for each in usage.jobs] == ["verify", "fidelity"]
    for each in usage.jobs:
        client.cancel(each.id)
    client.delete_cache(folder.name)
    assert client.caches() == []


def test_server_and_key_come_from_the_environment(
    api: Parts, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KD_SERVER", api.settings.server)
    assert connect().health().status == "ok"
    for wrong in ("localhost:8000", "http://[::1", "http://127.0.0.1:one", "https://"):
        monkeypatch.setenv("KD_SERVER", wrong)
        with pytest.raises(Unreachable, match="not a URL"):
            connect()


# ---------------------------------------------------------------------- lost connections


def test_without_a_server_the_error_comes_after_the_patience(connect: Connect) -> None:
    with pytest.raises(Unreachable, match="No server answers at http://127"):
        connect("http://127.0.0.1:9", patience=0.5).health()
    with pytest.raises(Unreachable):
        connect("http://127.0.0.1:9").with_patience(0).health()


def test_a_job_whose_answer_is_lost_is_created_once(
    api: Parts, text: str, connect: Connect
) -> None:
    api.jobs.redis.flushall()
    with cutting(api.settings.port, 0, 10) as proxy:
        job = connect(proxy.url).submit(valid("quick", text))
        assert not proxy.limits, "both answers were cut"
    assert [each.id for each in connect(api.settings.server).jobs()] == [job.id]


def test_a_key_of_the_caller_returns_the_same_job(api: Parts, text: str, connect: Connect) -> None:
    client = connect(api.settings.server)
    first, second = (client.submit(valid("quick", text), idempotency_key="one") for _ in range(2))
    assert first.id == second.id


def test_a_deletion_whose_answer_is_lost_is_done(api: Parts, connect: Connect) -> None:
    job = api.jobs.create(make_config("quick"))
    api.jobs.change("cancel", job.id)
    with cutting(api.settings.port, 0) as proxy:
        connect(proxy.url).delete(job.id)
        assert not proxy.limits
    assert api.jobs.get(job.id) is None


def test_a_retry_whose_answer_is_lost_is_done(api: Parts, connect: Connect) -> None:
    job = api.jobs.create(make_config("quick"))
    api.jobs.change("cancel", job.id)
    with cutting(api.settings.port, 0) as proxy:
        assert connect(proxy.url).retry(job.id).status == "queued"
        assert not proxy.limits
    statuses = [data["status"] for kind, data in api.events(job.id) if kind == "status"]
    assert statuses == ["queued", "cancelled", "queued"]


def test_an_action_that_is_refused_stays_refused_after_a_lost_answer(
    api: Parts, connect: Connect
) -> None:
    claim = running(api)
    api.jobs.finish(claim, "succeeded")
    for action in ("retry", "cancel"):
        with cutting(api.settings.port, 0) as proxy, pytest.raises(Refused, match="not possible"):
            getattr(connect(proxy.url), action)(claim.id)


def test_a_job_that_does_not_end_in_time_is_named(api: Parts, connect: Connect) -> None:
    job = api.jobs.create(make_config("quick"))
    with pytest.raises(TimedOut, match=f"{job.id} has not ended after 1.2 s: it is queued"):
        connect(api.settings.server).wait(job.id, timeout=1.2)
    with pytest.raises(TimeoutError):
        connect(api.settings.server).wait(job.id, timeout=0)


# ---------------------------------------------------------------------- downloads


def produce(api: Parts, content: bytes) -> Claim:
    """Create a job that has a student with one file."""
    claim = running(api)
    student = api.settings.run_dir(claim.id) / "student"
    student.mkdir(parents=True)
    (student / "model.safetensors").write_bytes(content)
    tell(api, claim, ("artifact", {"name": "student", "path": str(student)}))
    return claim


def test_a_download_goes_on_where_it_was_cut(api: Parts, tmp_path: Path, connect: Connect) -> None:
    content = os.urandom(5 * CUT)
    job_id = produce(api, content).id
    with cutting(api.settings.port, CUT, 10, 2 * CUT) as proxy:
        client = connect(proxy.url)
        goal = tmp_path / "new" / "model.safetensors"
        assert client.download(job_id, "student/model.safetensors", goal) == goal
        assert not proxy.limits
        names = [each.name for each in client.artifacts(job_id)]
    assert goal.read_bytes() == content
    assert names == ["student/model.safetensors"]
    assert [each.name for each in goal.parent.iterdir()] == [goal.name]
    whole = tmp_path / "whole"
    client = connect(api.settings.server)
    client.download(job_id, "student/model.safetensors", whole)
    assert whole.read_bytes() == content


def test_a_file_that_changes_between_two_parts_arrives_as_it_is_now(
    api: Parts, tmp_path: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = produce(api, os.urandom(3 * CUT)).id
    now = os.urandom(4 * CUT)
    file = api.settings.run_dir(job_id) / "student" / "model.safetensors"

    def change(*_: object) -> float:
        other = file.with_name("other")
        other.write_bytes(now)
        other.replace(file)
        return 0.0

    monkeypatch.setattr("kd.client.downloading.Backoff.next_pause", change)
    with cutting(api.settings.port, CUT) as proxy:
        connect(proxy.url).download(job_id, "student/model.safetensors", tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == now


def test_a_download_that_fails_leaves_nothing(api: Parts, tmp_path: Path, connect: Connect) -> None:
    job_id = produce(api, os.urandom(2 * CUT)).id
    before = tmp_path / "file"
    before.write_text("before")
    with cutting(api.settings.port, CUT) as proxy:
        client = connect(proxy.url, patience=0)
        with pytest.raises(Unreachable):
            client.download(job_id, "student/model.safetensors", before)
    with pytest.raises(Refused, match="no artifact"):
        connect(api.settings.server).download(job_id, "student/none", tmp_path / "none")
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    assert before.read_text() == "before"


def test_an_empty_file_arrives(api: Parts, tmp_path: Path, connect: Connect) -> None:
    job_id = produce(api, b"").id
    connect(api.settings.server).download(job_id, "student/model.safetensors", tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b""


def test_the_client_loads_neither_torch_nor_the_service() -> None:
    program = (
        "import kd.client.client, sys; "
        "print([each for each in ('torch', 'services', 'fastapi', 'redis', 'zarr')"
        " if each in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
