"""A worker and its job store: what it says, and when it ends. No process is started."""

from __future__ import annotations

import pytest

from services.store.connection import connect_redis
from services.store.embedded import find_free_port
from services.store.jobs.store import JobStore
from services.worker.consumer import require_writes


def test_a_worker_waits_for_a_store_that_is_not_up_yet(caplog: pytest.LogCaptureFixture) -> None:
    with connect_redis(f"redis://127.0.0.1:{find_free_port()}/0") as client:
        require_writes(JobStore(client))
    assert "the job store does not answer" in caplog.text
