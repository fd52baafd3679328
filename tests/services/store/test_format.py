"""Records of another format: refused by name, and left as they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from redis.exceptions import ResponseError

from bench.support.harness import make_config
from services.store.jobs.records import make_job_id
from services.store.jobs.store import JobStore

FIRST_CALLS: dict[str, Callable[[JobStore], object]] = {
    "create": lambda jobs: jobs.create(make_config("quick")),
    "expire": lambda jobs: jobs.expire(),
    "due": lambda jobs: jobs.due(),
    "hints": lambda jobs: jobs.list_unannounced("train", 3600),
    "change": lambda jobs: jobs.change("cancel", make_job_id()),
    "claim": lambda jobs: jobs.claim(make_job_id(), "train", "w", 5),
    "webhooks": lambda jobs: jobs.lease_webhooks(5, 5),
}


def test_an_empty_server_is_of_this_format(jobs: JobStore) -> None:
    jobs.expire()
    assert jobs.redis.get("kd:format") == "2"
    assert jobs.redis.keys("*") == ["kd:format"]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ("3", r"NEWERFORMAT the records are of format 3.*reads format 2: use a newer version"),
        ("1", r"OLDERFORMAT the records are of format 1.*reads format 2: use an older version"),
    ],
)
def test_records_of_another_format_are_refused_and_left_alone(
    jobs: JobStore, found: str, words: str
) -> None:
    job_id = jobs.create(make_config("quick")).id
    jobs.redis.set("kd:format", found)
    before = jobs.redis.keys("*")
    record = jobs.redis.hgetall(f"kd:job:{job_id}")
    calls = {
        **FIRST_CALLS,
        "change of this job": lambda jobs: jobs.change("cancel", job_id),
        "view of this job": lambda jobs: jobs.get(job_id),
    }
    for call in calls.values():
        with pytest.raises(ResponseError, match=words):
            call(jobs)
    assert sorted(jobs.redis.keys("*")) == sorted(before)
    assert jobs.redis.hgetall(f"kd:job:{job_id}") == record
