"""A job whose teacher is a server, from POST /jobs to a student, with a worker that is killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.support.paths import AUSTEN
from bench.support.waiting import wait_until
from cache.shards.names import locate_seal, name_shard
from cache.store import open_cache
from kd.config.jobfile import parse_config
from kd.progress import Monitor
from kd.stages.capture import run_precompute
from tests.support.remote_server import RemoteServer
from tests.support.services.runs import MakeParts

#: The child of a real worker.
CHILD = "services.worker.stage_child"


@pytest.mark.long
@pytest.mark.parametrize("backend", ["http", "sglang"])
def test_a_job_with_a_served_teacher_survives_a_kill_of_its_worker(
    new_parts: MakeParts, tiny_text: Path, tmp_path: Path, backend: str
) -> None:
    """The second worker asks only for what is not sealed, and the cache is that of one capture."""
    teacher = AUSTEN / "teacher"
    parts = new_parts(
        child_module=CHILD,
        forked=False,
        lease_seconds=15.0,
        silence_seconds=120.0,
        data_roots=[teacher, tiny_text.parent],
        remote_hosts=("127.0.0.1",),
    )
    parts.start_api()
    worker = parts.start_worker()
    with RemoteServer(teacher, 2048) as server:
        server.delay = 0.1
        job = make_job(server.url, teacher, tiny_text, backend)
        response = parts.http.post("/jobs", json=job)
        assert response.status_code == 202, response.text
        job_id = response.json()["id"]
        caches = parts.settings.caches
        wait_until(lambda: has_sealed_shard(caches), 120)
        worker.kill()
        begun = len(server.asked)
        server.delay = 0.0
        parts.start_worker()
        done = parts.wait_for(job_id, "succeeded", "failed", seconds=240)
        assert done.status == "succeeded", done.error
        assert done.attempt == 2
        assert done.cache is not None and done.cache.fingerprint is not None
        resumed = open_cache(caches / done.cache.fingerprint)
        assert len(server.asked) - begun < len(resumed) + 8, "not all is asked again"
        undisturbed = run_precompute(
            parse_config({**job, "kind": "precompute"}), tmp_path, tmp_path / "run", Monitor()
        )
    whole = open_cache(tmp_path / "caches" / str(undisturbed.cache["fingerprint"]))
    assert whole.manifest.identity == resumed.manifest.identity
    assert [each.digest for each in whole.entries] == [each.digest for each in resumed.entries]
    assert resumed.manifest.served is not None
    student = parts.settings.run_dir(job_id) / "student" / "model.safetensors"
    assert student.is_file()


def has_sealed_shard(caches: Path) -> bool:
    """Return whether a cache has a sealed shard, whichever is first."""
    seals = [locate_seal(name_shard(index)) for index in range(6)]
    return any((folder / seal).is_file() for folder in caches.glob("*") for seal in seals)


def make_job(url: str, teacher: Path, text: Path, backend: str) -> dict[str, Any]:
    proposes = backend == "http"
    return {
        "name": "served",
        "teacher": {
            "backend": backend,
            "model": "teacher",
            "url": url,
            "tokenizer": str(teacher),
            "concurrency": 2,
            **({"proposal": str(teacher)} if proposes else {}),
        },
        "student": {"init": {"layers": 1, "hidden_size": 16}},
        "data": {
            "train": str(text),
            "sequence_length": 48,
            "max_train_samples": 24,
            "max_eval_samples": 4,
        },
        "cache": ({"k": 32} if proposes else {"profile": "hidden"}) | {"shard_sequences": 5},
        "train": {"max_steps": 4, "batch_size": 4, "learning_rate": 1e-3},
        "evaluation": {"continuations": 0, "samples": 0},
    }
