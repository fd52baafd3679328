"""What teams use and what callers did, over real HTTP: quotas, costs and the audit log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.support.harness import Parts, make_config
from bench.support.waiting import wait_until
from kd.client.wire.service import Device, WorkerState
from kd.progress import Event
from services.api.auditing import REFUSALS
from services.store.callers import Caller, Quota
from services.store.jobs.leases import Capacity, EventBatch
from services.store.key_file import create_key, revoke_keys, set_quota
from tests.support.services.api import client, inputs, problem, serving, valid

NLP = Caller("ann", named_team="nlp")


@dataclass
class House:
    """A service with two keys of team nlp, one of another team, and an admin."""

    parts: Parts
    file: Path
    keys: dict[str, str]
    text: str
    ann: httpx.Client
    ben: httpx.Client
    eve: httpx.Client
    root: httpx.Client

    def audit(self, **query: Any) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = self.root.get("/audit", params=query).json()["data"]
        return entries

    def account(self, who: httpx.Client) -> dict[str, Any]:
        found: dict[str, Any] = who.get("/quota").json()["data"][0]
        return found


@pytest.fixture(scope="module")
def house(_server_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    file = tmp_path_factory.mktemp("keys") / "keys.jsonl"
    teams = {"ann": "nlp", "ben": "nlp", "eve": None, "root": None}
    keys = {
        name: create_key(file, name, ["admin" if name == "root" else "write"], team=team)[0]
        for name, team in teams.items()
    }
    with serving(tmp_path_factory.mktemp("api"), api_keys_file=file) as parts:
        clients = {name: client(parts, key) for name, key in keys.items()}
        text = inputs(parts.settings.home / "inputs")
        yield House(parts, file, keys, text, **clients)
        for each in clients.values():
            each.close()


@pytest.fixture(autouse=True)
def _clean(house: House) -> None:
    """No jobs, no use and no quotas; the rules are written again by the API's reconciler."""
    house.parts.jobs.redis.flushall()
    set_quota(house.file, "nlp", Quota())


def set_rules(house: House, team: str, quota: Quota) -> None:
    """Set the quota of a team in the key file, and wait until the API has read it."""
    set_quota(house.file, team, quota)
    wait_until(lambda: house.parts.jobs.read_accounts(team)[0].quota == quota)


def spend(house: House, caller: Caller, seconds: float, price: float | None = None) -> str:
    """Run a job of the caller for so long, until it succeeds."""
    jobs = house.parts.jobs
    job_id = jobs.create(make_config("quick"), caller).id
    claim = jobs.claim(job_id, "train", "w", 600, Capacity(price=price))
    assert claim is not None
    jobs.redis.hincrby(f"kd:job:{job_id}", "charged_at", -int(seconds * 1000))
    assert jobs.finish(claim, "succeeded") == "succeeded"
    return job_id


# ---------------------------------------------------------------------- quotas


def test_a_team_sees_its_own_account_and_an_admin_sees_all(house: House) -> None:
    set_rules(house, "nlp", Quota(device_seconds=3600.0, bytes=10**9))
    spend(house, NLP, 600)
    spend(house, Caller("eve"), 60)
    mine, theirs = house.account(house.ann), house.account(house.ben)
    assert mine["team"] == theirs["team"] == "nlp"
    assert mine["device_seconds"]["used"] == pytest.approx(600, abs=1)
    assert mine["device_seconds"]["left"] == pytest.approx(3000, abs=1)
    assert mine["recent_device_seconds"] == pytest.approx(600, abs=1)
    end = datetime.fromisoformat(mine["device_seconds"]["resets_at"])
    assert timedelta(0) < end - datetime.now(UTC) <= timedelta(days=1)
    assert (end.hour, end.minute, end.second) == (0, 0, 0)
    assert mine["bytes"]["limit"] == 10**9
    assert [entry["team"] for entry in house.eve.get("/quota").json()["data"]] == ["eve"]
    assert house.account(house.eve)["device_seconds"]["limit"] is None
    seen = [entry["team"] for entry in house.root.get("/quota").json()["data"]]
    assert seen == ["root", "eve", "nlp"]


def test_a_job_above_the_quota_of_device_seconds_is_accepted_and_says_why_it_waits(
    house: House,
) -> None:
    set_rules(house, "nlp", Quota(device_seconds=600.0))
    spend(house, NLP, 601)
    said = "Team nlp has used 601 of its 600 device-seconds of this day"
    plan = house.ben.post("/jobs/validate", json=valid("quick", house.text)).json()
    assert any(warning.startswith(said) for warning in plan["warnings"])
    assert plan["account"]["device_seconds"]["left"] == 0
    made = house.ben.post("/jobs", json=valid("quick", house.text))
    assert made.status_code == 202
    job = made.json()
    assert (job["team"], job["status"]) == ("nlp", "queued")
    assert job["reason"].startswith(said)
    events = house.ben.get(f"/jobs/{job['id']}/events", params={"types": "warning"}).json()["data"]
    assert [event["data"]["message"] for event in events] == [job["reason"]]
    other = house.eve.post("/jobs", json=valid("quick", house.text)).json()
    assert other["reason"] is None
    claim = house.parts.jobs.claim_next("train", "w", 60)
    assert claim is not None and claim.id == other["id"]
    assert house.parts.jobs.claim_next("train", "w", 60) is None


def test_a_job_of_a_team_above_its_bytes_is_refused_with_what_frees_it_up(house: House) -> None:
    ended = spend(house, NLP, 1)
    folder = house.parts.settings.run_dir(ended)
    folder.mkdir(parents=True)
    (folder / "student").write_bytes(bytes(5000))
    set_rules(house, "nlp", Quota(bytes=5000))
    house.parts.jobs.redis.delete("kd:measured")
    wait_until(lambda: house.account(house.ann)["bytes"]["used"] == 5000)
    answer = house.ann.post("/jobs", json=valid("quick", house.text))
    document = problem(answer, 429, "quota-exceeded")
    assert "team nlp take 4.883 KiB, and its quota is 4.883 KiB" in document.detail
    assert document.quota is not None
    assert (document.quota.what, document.quota.limit, document.quota.used) == ("bytes", 5000, 5000)
    assert "deleted" in document.quota.frees_up
    assert "artifacts=true" in document.remedy
    assert answer.headers["retry-after"] == "60"
    assert house.eve.post("/jobs", json=valid("quick", house.text)).status_code == 202
    assert house.ann.delete(f"/jobs/{ended}", params={"artifacts": True}).status_code == 204
    house.parts.jobs.redis.delete("kd:measured")
    wait_until(lambda: house.account(house.ann)["bytes"]["used"] == 0)
    assert house.ann.post("/jobs", json=valid("quick", house.text)).status_code == 202


def test_a_job_whose_cache_would_take_its_team_above_its_bytes_is_refused(house: House) -> None:
    body = valid("quick", house.text, "distill")
    set_rules(house, "nlp", Quota(bytes=100))
    answer = house.ann.post("/jobs", json=body)
    document = problem(answer, 429, "quota-exceeded")
    assert "take 0 bytes, and its quota is 100 bytes. The cache of this job needs about" in (
        document.detail
    )
    assert document.quota is not None and document.quota.used == 0
    assert "cache.fingerprint" in document.remedy
    several = {name: each for name, each in body.items() if name != "teacher"}
    several |= {
        "teachers": {"one": body["teacher"]},
        "data": body["data"] | {"train": [{"path": str(house.text), "teacher": "one"}]},
        "student": {"init": {"layers": 1, "hidden_size": 8, "tokenizer": body["teacher"]["model"]}},
    }
    problem(house.ann.post("/jobs", json=several), 429, "quota-exceeded")
    assert house.ann.post("/jobs", json=valid("quick", house.text)).status_code == 202
    set_rules(house, "nlp", Quota(bytes=10**12))
    assert house.ann.post("/jobs", json=body).status_code == 202


def test_a_cache_counts_for_each_team_that_uses_it(house: House) -> None:
    for caller in (NLP, Caller("eve")):
        jobs = house.parts.jobs
        job_id = jobs.create(make_config("quick", "distill"), caller).id
        claim = jobs.claim(job_id, "precompute", "w", 60)
        assert claim is not None
        event = Event("cache", {"fingerprint": "e" * 32})
        jobs.beat(claim, 60, EventBatch(1, (event,)))
    folder = house.parts.settings.caches / ("e" * 32)
    folder.mkdir(parents=True)
    (folder / "shard").write_bytes(bytes(700))
    house.parts.jobs.redis.delete("kd:measured")
    wait_until(lambda: house.account(house.ann)["bytes"]["used"] == 700)
    assert house.account(house.ann)["disk"] == {"caches": 700, "runs": 0, "files": 0}
    assert house.account(house.eve)["bytes"]["used"] == 700
    assert house.account(house.ann)["bytes"]["measured_at"] is not None


@pytest.mark.usefixtures("_server_binary")
def test_the_quotas_of_a_key_name_the_quota_too(tmp_path: Path) -> None:
    with serving(tmp_path, quota_open_jobs=1) as parts:
        text = inputs(tmp_path / "inputs")
        assert parts.http.post("/jobs", json=valid("quick", text)).status_code == 202
        document = problem(parts.http.post("/jobs", json=valid("quick", text)), 429)
        assert document.quota is not None
        assert (document.quota.what, document.quota.limit, document.quota.used) == (
            "open_jobs",
            1,
            1,
        )


# ---------------------------------------------------------------------- costs


def test_the_cost_of_a_job_is_estimated_running_and_final(house: House) -> None:
    jobs = house.parts.jobs
    device = Device(memory_bytes=8 << 30, price=2.0)
    jobs.show_worker(WorkerState(id="w", stages=["train"], device=device), 60)
    body = valid("quick", house.text)
    assert house.ann.post("/jobs/validate", json=body).json()["cost"] is None, "no job has ended"
    spend(house, NLP, 1800, price=2.0)
    plan = house.ann.post("/jobs/validate", json=body).json()
    assert plan["cost"] == {
        "amount": 0.0,
        "final": False,
        "estimated": pytest.approx(1.0, abs=0.01),
        "basis": "earlier_jobs",
    }
    job_id = house.ann.post("/jobs", json=body).json()["id"]
    waiting = house.ann.get(f"/jobs/{job_id}").json()["cost"]
    assert (waiting["amount"], waiting["basis"]) == (0.0, "earlier_jobs")
    assert waiting["estimated"] == pytest.approx(1.0, abs=0.01)
    claim = jobs.claim_next("train", "w", 60, Capacity(price=2.0))
    assert claim is not None
    jobs.redis.hincrby(f"kd:job:{job_id}", "charged_at", -900_000)
    event = Event("progress", {"done": 1, "total": 4, "eta_seconds": 2700.0})
    jobs.beat(claim, 60, EventBatch(1, (event,)))
    running = house.ann.get(f"/jobs/{job_id}").json()
    assert running["cost"] == {
        "amount": pytest.approx(0.5, abs=0.01),
        "final": False,
        "estimated": pytest.approx(2.0, abs=0.01),
        "basis": "pace",
    }
    assert running["device_seconds"] == pytest.approx(900, abs=2)
    jobs.finish(claim, "succeeded")
    ended = house.ann.get(f"/jobs/{job_id}").json()["cost"]
    assert (ended["final"], ended["estimated"]) == (True, None)
    assert ended["amount"] == pytest.approx(0.5, abs=0.01)
    [worker] = house.ann.get("/workers").json()["data"]
    assert worker["device"]["price"] == 2.0


# ---------------------------------------------------------------------- the audit log


def test_what_callers_do_is_written_without_their_keys(house: House) -> None:
    begin = datetime.now(UTC).isoformat()
    body = valid("quick", house.text)
    job_id = house.ann.post("/jobs", json=body, headers={"Idempotency-Key": "k"}).json()["id"]
    house.ann.post("/jobs", json=body, headers={"Idempotency-Key": "k"})
    house.ann.post("/jobs/validate", json=body)
    house.ann.post("/jobs", json=body, params={"dry_run": True})
    copy = house.ann.post(f"/jobs/{job_id}/clone").json()["id"]
    for action in ("pause", "resume", "cancel", "cancel"):
        house.ben.post(f"/jobs/{job_id}/{action}")  # 404: ben has the team, and not the job
        house.root.post(f"/jobs/{job_id}/{action}")
    house.ann.delete(f"/jobs/{job_id}", params={"artifacts": True})
    entries = house.audit(after=begin)
    shown = [(entry["actor"], entry["action"], entry["target"]) for entry in reversed(entries)]
    assert shown == [
        ("ann", "job.create", job_id),
        ("ann", "job.create", copy),
        ("root", "job.pause", job_id),
        ("root", "job.resume", job_id),
        ("root", "job.cancel", job_id),
        ("ann", "job.delete", job_id),
    ]
    newest = entries[0]
    assert (newest["team"], newest["owner"], newest["artifacts"]) == ("nlp", "ann", True)
    assert len(newest["key"]) == 12
    assert newest["request_id"]
    text = (house.parts.settings.home / "audit" / "audit.jsonl").read_text()
    assert not any(key in text for key in house.keys.values())
    assert house.text not in text, "no body of a job"


def test_downloads_of_a_student_are_exports_and_those_of_reports_are_not(house: House) -> None:
    begin = datetime.now(UTC).isoformat()
    jobs = house.parts.jobs
    job_id = jobs.create(make_config("quick"), NLP).id
    folder = house.parts.settings.run_dir(job_id)
    (folder / "student").mkdir(parents=True)
    (folder / "student" / "weights.bin").write_bytes(bytes(100))
    (folder / "report.md").write_text("# Report\n")
    claim = jobs.claim(job_id, "train", "w", 60)
    assert claim is not None
    events = tuple(
        Event("artifact", {"name": name, "path": str(folder / name)})
        for name in ("student", "report.md")
    )
    jobs.beat(claim, 60, EventBatch(1, events))
    at = f"/jobs/{job_id}/artifacts"
    assert house.ann.get(f"{at}/report.md").status_code == 200
    assert house.ann.head(f"{at}/student/weights.bin").status_code == 200
    parts = [{"Range": "bytes=0-49"}, {"Range": "bytes=50-"}]
    assert [
        house.ann.get(f"{at}/student/weights.bin", headers=part).status_code for part in parts
    ] == [206, 206]
    assert house.eve.get(f"{at}/student/weights.bin").status_code == 404
    [entry] = house.audit(after=begin)
    assert (entry["action"], entry["target"]) == ("student.download", job_id)
    assert entry["file"] == "student/weights.bin"


def test_refused_keys_are_written_but_cannot_fill_the_log(house: House) -> None:
    begin = datetime.now(UTC).isoformat()
    text, key = create_key(house.file, "mal", ["read"])
    with client(house.parts, text) as mal:
        problem(mal.post("/jobs", json={}), 403)
        revoke_keys(house.file, key.id)
        for _ in range(3 * REFUSALS):
            problem(mal.get("/jobs"), 401)
    house.parts.http.get("/jobs")  # a request without a key is no attempt
    entries = house.audit(after=begin)
    assert len(entries) <= REFUSALS
    assert {entry["outcome"] for entry in entries} == {"refused"}
    oldest = entries[-1]
    assert (oldest["actor"], oldest["action"], oldest["target"]) == (
        "mal",
        "auth.forbidden",
        "POST /jobs",
    )
    assert oldest["why"] == "no scope write"
    assert (entries[0]["actor"], entries[0]["action"]) == ("unknown", "auth.failed")
    assert entries[0]["address"] == "127.0.0.1"
    assert text not in json.dumps(entries)


def test_only_admins_read_the_log_page_by_page(house: House) -> None:
    begin = datetime.now(UTC).isoformat()
    for who in (house.ann, house.eve):
        problem(who.get("/audit"), 403)
    made = [house.eve.post("/jobs", json=valid("quick", house.text)).json()["id"] for _ in range(5)]
    query = {"after": begin, "actor": "eve", "action": "job.create", "limit": 2}
    found: list[str] = []
    page = house.root.get("/audit", params=query).json()
    while True:
        found += [entry["target"] for entry in page["data"]]
        if not page["has_more"]:
            break
        page = house.root.get("/audit", params=query | {"cursor": page["next_cursor"]}).json()
    assert found == made[::-1]
    assert house.audit(target=made[2])[0]["target"] == made[2]
    assert house.audit(before=begin, target=made[2]) == []
    problem(house.root.get("/audit", params={"cursor": "nonsense"}), 422, "bad-cursor")
    problem(house.root.get("/audit", params={"after": "yesterday"}), 422)


def test_a_log_that_cannot_be_written_refuses_nobody(
    house: House,
) -> None:
    folder = house.parts.settings.home / "audit"
    hidden = folder.with_name("hidden")
    house.eve.post("/jobs", json=valid("quick", house.text))
    folder.rename(hidden)
    folder.write_text("no folder")
    try:
        assert house.eve.post("/jobs", json=valid("quick", house.text)).status_code == 202
    finally:
        folder.unlink()
        hidden.rename(folder)
