"""A record that cannot be read: it is shown, hides no other, and can be removed."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest

from services.store.jobs.listing import JobQuery
from services.store.jobs.records import make_job_id, read_creation_time
from services.store.jobs.store import JobStore
from tests.support.records import job_of, queued

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


def test_whole_surrogate_pairs_are_text(jobs: JobStore) -> None:
    smile = "a text \U0001f600"
    job_id = queued(jobs, data={"train": smile})
    assert job_of(jobs, job_id).config["data"]["train"] == [smile]
    assert job_of(jobs, job_id).error is None


def test_the_id_of_a_job_holds_its_time_of_creation() -> None:
    assert abs(read_creation_time(make_job_id()) - datetime.now(UTC)) < timedelta(minutes=1)
