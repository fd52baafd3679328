"""One training on two hosts that share a bucket and no folder."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.support.harness import Parts
from bench.support.waiting import wait_until
from kd.client.wire.jobs import TERMINAL_STATUSES, Job
from kd.tracking.metrics import read_metrics
from tests.support.kd.sharing.processes import find_ranks
from tests.support.services.training import make_body, post

pytestmark = [
    pytest.mark.alone,
    pytest.mark.long,
    pytest.mark.usefixtures("_server_binary"),
    pytest.mark.timeout(900),
]
PATIENCE = 300.0
HOMES = ("one", "two")


@pytest.fixture
def parts(tmp_path: Path, address: str, tiny_teacher: Path) -> Iterator[Parts]:
    parts = Parts(
        tmp_path / "api", "services.worker.stage_child", store=address, silence_seconds=300.0,
        data_roots=(tiny_teacher.parent.parent,),
    )  # fmt: skip
    try:
        parts.start_api()
        for home in HOMES:
            parts.start("services.worker", KD_HOME=str(tmp_path / home), OMP_NUM_THREADS="1")
        wait_until(lambda: len(parts.jobs.list_workers()) == len(HOMES))
        yield parts
    finally:
        parts.close()


def finish(parts: Parts, job_id: str) -> Job:
    job = parts.wait_for(job_id, *TERMINAL_STATUSES, seconds=PATIENCE)
    assert job.status == "succeeded", (job.error, job.warnings)
    return job


def curve(root: Path, job_id: str) -> list[float]:
    """Read the history in the data folder of the host that ended the job."""
    paths = [root / home / "runs" / job_id / "metrics.jsonl" for home in HOMES]
    newest = max((each for each in paths if each.exists()), key=lambda each: each.stat().st_mtime)
    return [each["loss"] for each in read_metrics(newest) if each["type"] == "metrics"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_hosts_go_on_from_a_checkpoint_of_which_each_put_its_part(
    parts: Parts, tmp_path: Path, tiny_teacher: Path, tiny_text: Path, strategy: str
) -> None:
    body: dict[str, Any] = make_body(tiny_teacher, tiny_text, "apart", {"hosts": 2})
    body["train"]["strategy"] = strategy
    job_id = post(parts, body)
    run = parts.settings.find_stored_run(job_id)
    assert run is not None
    wait_until(lambda: run.list_checkpoints() != [], PATIENCE)
    files = {name for each in run.list_checkpoints() for name in each.files}
    assert ("shard-00002-model-00001-of-00001.safetensors" in files) == (strategy == "fsdp")
    ranks = {rank: pid for home in HOMES for rank, pid in find_ranks(tmp_path / home).items()}
    os.kill(ranks[1], signal.SIGKILL)
    assert finish(parts, job_id).attempt == 2
    alone = post(parts, body | {"name": "alone", "resources": {}})
    finish(parts, alone)
    assert curve(tmp_path, job_id) == pytest.approx(curve(tmp_path, alone), rel=1e-4)
    left = [each for home in HOMES for each in (tmp_path / home).rglob(".tmp-*")]
    assert left == []
