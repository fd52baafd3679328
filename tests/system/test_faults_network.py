"""A worker that is cut off from its server, in private network namespaces."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.support.faults import Network
from bench.support.harness import Parts
from bench.support.judge import find_job_violations, list_written, read_ledger
from bench.support.waiting import wait_until
from kd.client.wire.jobs import TERMINAL_STATUSES

#: How long the worker is cut off.
PARTITION_SECONDS = float(os.environ.get("CHAOS_PARTITION_SECONDS", "8"))
#: The worker must claim a job this soon after the network is back.
CONSUMING_SECONDS = 5.0

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(
        sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None,
        reason="network namespaces need root on Linux, and the command ip",
    ),
    pytest.mark.slow,
    pytest.mark.timeout(400),
]


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network()
    yield made
    made.close()


@pytest.fixture
def parts(network: Network, tmp_path: Path, _server_binary: Path) -> Iterator[Parts]:
    """Server and API on the near side, where the test runs too."""
    with network.inside("near"):
        # A fork would be in the network of the process that it comes from.
        made = Parts(tmp_path / "home", "bench.support.light_child", forked=False, rate_get=10**6)
        made.jobs.redis.config_set("bind", f"127.0.0.1 {network.ADDRESS['near']}")
        made.start_api()
        yield made
        made.close()


def start_far_worker(parts: Parts, network: Network) -> None:
    assert parts.settings.redis_url is not None
    url = parts.settings.redis_url.replace("127.0.0.1", network.ADDRESS["near"])
    with network.inside("far"):
        parts.start("services.worker", KD_REDIS_URL=url)
    wait_until(parts.jobs.list_workers)


@pytest.mark.parametrize("direction", ["both", "out", "in"])
def test_a_worker_that_was_cut_off_works_again_within_five_seconds(
    parts: Parts, network: Network, tmp_path: Path, direction: str
) -> None:
    start_far_worker(parts, network)
    milliseconds = int(PARTITION_SECONDS / 20 * 1000) + 150
    name = f"light-50-4-{milliseconds}"
    job_id = parts.submit(name, "distill")
    wait_until(lambda: list_written(parts.settings.run_dir(job_id)))
    network.cut(direction)
    cut = time.monotonic()
    before = len(list_written(parts.settings.run_dir(job_id)))
    # The run continues while the worker is cut off.
    wait_until(lambda: len(list_written(parts.settings.run_dir(job_id))) > before + 1)
    time.sleep(max(PARTITION_SECONDS - (time.monotonic() - cut), 0))
    assert parts.http.get(f"/jobs/{job_id}").status_code == 200, "the near side works"
    claims = parts.statuses(job_id).count("running")
    network.heal(direction)
    healed = time.monotonic()
    wait_until(lambda: parts.statuses(job_id).count("running") > claims)
    taken = time.monotonic() - healed
    assert taken <= CONSUMING_SECONDS, f"taken again after {taken:.1f} s"
    job = parts.wait_for(job_id, *TERMINAL_STATUSES)
    assert job.status == "succeeded", job.error
    assert find_job_violations(parts, job_id, name, tmp_path / "spare") == []
    assert job.attempt <= 1 + claims
    assert {line.what for line in read_ledger(parts.settings.run_dir(job_id))} >= {
        "begin",
        "wrote",
        "end",
    }


def test_an_idle_worker_that_was_cut_off_hears_of_a_job_within_five_seconds(
    parts: Parts, network: Network
) -> None:
    start_far_worker(parts, network)
    network.cut("both")
    time.sleep(PARTITION_SECONDS)
    job_id = parts.submit("light-51-1-20", "distill")
    network.heal("both")
    healed = time.monotonic()
    parts.wait_for(job_id, "running", *TERMINAL_STATUSES)
    taken = time.monotonic() - healed
    assert taken <= CONSUMING_SECONDS, f"taken after {taken:.1f} s"
    assert parts.wait_for(job_id, *TERMINAL_STATUSES).status == "succeeded"
