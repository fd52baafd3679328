"""A job with two teachers, from POST /jobs to a student, with a worker that is killed between."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.support.paths import AUSTEN
from bench.support.waiting import wait_until
from cache.shards.names import locate_seal, name_shard
from cache.store import Cache, has_manifest, open_cache
from kd.config.jobfile import parse_config
from kd.files import read_json
from kd.progress import Monitor
from kd.stages.joining import run_captures
from tests.support.kd.teachers.several import make_several_job, write_texts
from tests.support.remote_server import RemoteServer
from tests.support.services.runs import MakeParts

#: The child of a real worker.
CHILD = "services.worker.stage_child"


@pytest.mark.long
def test_a_worker_that_dies_in_the_second_capture_repeats_nothing(
    new_parts: MakeParts, tiny_text: Path, tiny_teacher: Path, tmp_path: Path
) -> None:
    """The first teacher runs here and the second behind a server, which counts what is asked."""
    served = AUSTEN / "teacher"
    texts = write_texts(tiny_text, tmp_path / "texts")
    roots = [tiny_teacher, served, tmp_path]
    parts = new_parts(
        child_module=CHILD, forked=False, lease_seconds=15.0, silence_seconds=120.0,
        data_roots=roots, remote_hosts=("127.0.0.1",),
    )  # fmt: skip
    parts.start_api()
    worker = parts.start_worker()
    with RemoteServer(served, 2048) as server:
        server.delay = 0.1
        sources = [
            {"path": str(texts["code"]), "teacher": "here"},
            {"path": str(texts["math"]), "teacher": "there"},
        ]
        job = make_several_job(
            {"here": tiny_teacher}, sources, cache={"k": 32, "shard_sequences": 4}
        )
        job["teachers"]["there"] = {
            "backend": "http", "model": "teacher", "url": server.url, "tokenizer": str(served),
            "proposal": str(served), "concurrency": 2,
        }  # fmt: skip
        response = parts.http.post("/jobs", json=job)
        assert response.status_code == 202, response.text
        job_id = response.json()["id"]
        caches = parts.settings.caches
        wait_until(lambda: has_begun_second(caches), 180)
        worker.kill()
        begun = len(server.asked)
        (first,) = [folder for folder in caches.glob("[!.]*/") if has_manifest(folder)]
        sealed_at = (first / "manifest.json").stat().st_mtime_ns
        server.delay = 0.0
        parts.start_worker()
        done = parts.wait_for(job_id, "succeeded", "failed", seconds=240)
        assert done.status == "succeeded", done.error
        assert done.attempt == 2
        assert done.cache is not None and len(done.cache.fingerprints) == 2
        assert done.cache.fingerprints[0] == first.name
        assert (first / "manifest.json").stat().st_mtime_ns == sealed_at
        resumed = [open_cache(caches / name) for name in done.cache.fingerprints]
        assert len(server.asked) - begun < len(resumed[1]) + 8, "not all is asked again"
        undisturbed = run_captures(parse_config(job), tmp_path, tmp_path / "run", Monitor())
    for name, found in zip(undisturbed.cache["fingerprints"], resumed, strict=True):
        require_same_bytes(open_cache(tmp_path / "caches" / name), found)
    report = read_json(parts.settings.run_dir(job_id) / "report.json")
    assert report["domains"].keys() == {"here", "there"}
    users = [parts.jobs.find_cache_jobs(name) for name in done.cache.fingerprints]
    assert users == [[job_id], [job_id]]


def has_begun_second(caches: Path) -> bool:
    """Return whether one cache is sealed, and another has a sealed shard."""
    begun = [
        folder
        for folder in caches.glob("[!.]*/")
        if any((folder / locate_seal(name_shard(index))).is_file() for index in range(6))
    ]
    return len(begun) == 2 and any(map(has_manifest, begun))


def require_same_bytes(one: Cache, other: Cache) -> None:
    assert one.manifest.identity == other.manifest.identity
    assert [each.digest for each in one.entries] == [each.digest for each in other.entries]
