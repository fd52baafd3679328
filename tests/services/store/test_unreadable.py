"""A record that cannot be read: it is shown, hides no other, and can be removed."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
from redis.exceptions import OutOfMemoryError

from services.store.jobs.listing import JobQuery
from services.store.jobs.records import make_job_id, read_creation_time
from services.store.jobs.store import JobStore
from tests.support.records import job_of, let_pass, queued, running, status

SURROGATE = "\ud800"
#: Damage to fields of a record; None = the field is lost.
DAMAGES: dict[str, dict[str, str | None]] = {
    "half a surrogate pair in the configuration": {"config": json.dumps({"name": SURROGATE})},
    "half a surrogate pair in a label": {"labels": json.dumps({"team": SURROGATE})},
    "half a surrogate pair in an artifact": {"artifacts.x": json.dumps("/" + SURROGATE)},
    "no JSON": {"config": "{"},
    "a list for a mapping": {"labels": "[1]"},
    "a number that is none": {"attempt": "x"},
    "fields that are lost": {"kind": None, "name": None, "created_at": None, "config": None},
    "a dotted field that is no JSON": {"progress.done": "{"},
    "an unknown kind": {"kind": "dance"},
    "lists that are no JSON": {"depends_on": "[", "cache.fingerprint": "x"},
}


def damage(jobs: JobStore, job_id: str, fields: dict[str, str | None]) -> None:
    for name, value in fields.items():
        if value is None:
            jobs.redis.hdel(f"kd:job:{job_id}", name)
        else:
            jobs.redis.hset(f"kd:job:{job_id}", name, value)


@pytest.mark.parametrize("fields", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_record_is_shown_and_can_be_removed(
    jobs: JobStore, fields: dict[str, str | None]
) -> None:
    first, bad, last = (queued(jobs) for _ in range(3))
    damage(jobs, bad, fields)
    page = jobs.read_page(JobQuery(), 10).jobs
    assert [job.id for job in page] == [last, bad, first]
    assert [job.error and job.error.type for job in page] == [None, "unreadable_record", None]
    shown = job_of(jobs, bad)
    assert (shown.status, shown.config) == ("queued", {})
    assert shown.model_dump_json()
    assert jobs.change("cancel", bad).status == "cancelled"
    assert jobs.change("delete", bad).status == "deleted"
    assert [job.id for job in jobs.read_page(JobQuery(), 10).jobs] == [last, first]
    assert jobs.get(bad) is None


@pytest.mark.parametrize("text", ["gone", ""])
def test_a_record_with_a_damaged_status_can_only_be_removed(jobs: JobStore, text: str) -> None:
    bad = queued(jobs)
    damage(jobs, bad, {"status": text})
    shown = job_of(jobs, bad)
    assert (shown.status, shown.actions) == ("failed", ["delete"])
    assert jobs.change("cancel", bad).outcome == "illegal"
    assert jobs.change("delete", bad).status == "deleted"
    assert jobs.read_page(JobQuery(), 10).jobs == []


def test_a_removed_record_with_a_damaged_status_is_in_nobodys_way(jobs: JobStore) -> None:
    bad = queued(jobs, deadline_seconds=60)
    lost = running(jobs, deadline_seconds=60).id
    good = queued(jobs)
    for job_id in (bad, lost):
        damage(jobs, job_id, {"status": "gone"})
        assert jobs.change("delete", job_id).status == "deleted"
    for what in ("leases", "deadlines"):
        assert jobs.redis.zcard(f"kd:{what}") == 0
    assert jobs.read_accounts("local")[0].devices == 0
    assert sum(jobs.count_statuses().values()) == 1
    assert jobs.list_unannounced("train", 0) == [good]
    claim = jobs.claim_next("train", "w", 5)
    assert claim is not None
    assert claim.id == good


#: Damage that the script meets when it claims a job, takes it back, or ends it.
IN_THE_WAY: dict[str, dict[str, str | None]] = {
    "an attempt that is no number": {"attempt": "x"},
    "a fence that is no number": {"fence": "x"},
    "a lost time of creation": {"created_us": None},
    "a lost attempt": {"attempt": None},
    "a lost limit of attempts": {"max_attempts": None},
    "a record that is gone": {},
}


def hurt(jobs: JobStore, job_id: str, fields: dict[str, str | None]) -> None:
    damage(jobs, job_id, fields)
    if not fields:
        jobs.redis.delete(f"kd:job:{job_id}")


@pytest.mark.parametrize("fields", IN_THE_WAY.values(), ids=IN_THE_WAY)
def test_a_damaged_record_keeps_no_worker_from_the_next_job(
    jobs: JobStore, fields: dict[str, str | None]
) -> None:
    bad, good = queued(jobs), queued(jobs)
    hurt(jobs, bad, fields)
    claims = [jobs.claim_next("train", "w", 5) for _ in range(2)]
    assert good in [claim and claim.id for claim in claims]
    assert jobs.list_unannounced("train", 0) == []


@pytest.mark.parametrize("fields", IN_THE_WAY.values(), ids=IN_THE_WAY)
def test_a_damaged_record_keeps_no_other_lease_from_its_end(
    jobs: JobStore, fields: dict[str, str | None]
) -> None:
    bad, good = running(jobs).id, running(jobs).id
    hurt(jobs, bad, fields)
    for job_id in (bad, good):
        let_pass(jobs, "leases", job_id)
    jobs.expire()
    assert status(jobs, good) == "queued"
    jobs.repair(0, 5)
    jobs.expire()


@pytest.mark.parametrize("fields", IN_THE_WAY.values(), ids=IN_THE_WAY)
def test_a_damaged_record_keeps_no_other_deadline(
    jobs: JobStore, fields: dict[str, str | None]
) -> None:
    bad, good = queued(jobs, deadline_seconds=60), queued(jobs, deadline_seconds=60)
    hurt(jobs, bad, fields)
    for job_id in (bad, good):
        let_pass(jobs, "deadlines", job_id)
    jobs.due()
    assert status(jobs, good) == "failed"
    assert jobs.redis.zcard("kd:deadlines") == 0


def test_a_full_server_is_not_taken_for_a_damaged_record(jobs: JobStore) -> None:
    waiting, held = queued(jobs), running(jobs, deadline_seconds=60)
    let_pass(jobs, "leases", held.id)
    jobs.redis.config_set("maxmemory", "1")
    try:
        for act in (lambda: jobs.claim_next("train", "w", 5), jobs.expire):
            with pytest.raises(OutOfMemoryError):
                act()
    finally:
        jobs.redis.config_set("maxmemory", "0")
    assert (status(jobs, waiting), status(jobs, held.id)) == ("queued", "running")
    assert jobs.expire() == [held.id]
    claim = jobs.claim_next("train", "w", 5)
    assert claim is not None
    assert claim.id in (waiting, held.id)


def test_whole_surrogate_pairs_are_text(jobs: JobStore) -> None:
    smile = "a text \U0001f600"
    job_id = queued(jobs, data={"train": smile})
    assert job_of(jobs, job_id).config["data"]["train"] == [smile]
    assert job_of(jobs, job_id).error is None


def test_the_id_of_a_job_holds_its_time_of_creation() -> None:
    assert abs(read_creation_time(make_job_id()) - datetime.now(UTC)) < timedelta(minutes=1)
