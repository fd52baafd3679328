"""A worker and its job store: what it says, and when it ends. No process is started."""

from __future__ import annotations

import logging

import pytest
from redis.exceptions import OutOfMemoryError, ReadOnlyError, ResponseError

from bench.support.harness import Parts
from services.store.connection import connect_redis
from services.store.embedded import find_free_port
from services.store.jobs.store import JobStore
from services.worker.consumer import StageWorker, require_writes, shorten_end
from services.worker.devices import WorkerDevice


def test_a_worker_waits_for_a_store_that_is_not_up_yet(caplog: pytest.LogCaptureFixture) -> None:
    with connect_redis(f"redis://127.0.0.1:{find_free_port()}/0") as client:
        require_writes(JobStore(client))
    assert "the job store does not answer" in caplog.text


def test_a_mistake_of_our_own_is_not_told_as_one_of_the_store(
    parts: Parts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = StageWorker(parts.settings, parts.queue, parts.jobs, ["train"], WorkerDevice())
    errors = [ResponseError("WRONGTYPE of a damaged record"), OutOfMemoryError("no room")]

    def refuse(*_: object) -> None:
        raise errors.pop(0)

    monkeypatch.setattr(parts.jobs, "claim_next", refuse)
    with pytest.raises(ResponseError, match="damaged record"):
        worker.work("train")
    assert "job store" not in caplog.text
    worker.work("train")
    assert "the job store is full" in caplog.text


@pytest.mark.parametrize("error", [ReadOnlyError("a replica"), ValueError("a mistake")])
def test_only_an_end_because_of_the_store_is_one_line(error: Exception) -> None:
    info = (type(error), error, None)
    record = logging.LogRecord("celery.worker", 50, "", 1, "Unrecoverable: %r", (error,), info)
    assert shorten_end(record)
    told = logging.Formatter().format(record)
    if isinstance(error, ValueError):
        assert told.splitlines() == [
            "Unrecoverable: ValueError('a mistake')",
            "ValueError: a mistake",
        ]
    else:
        assert told == "This worker ends: the job store is a read-only copy: a replica"
