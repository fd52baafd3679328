"""The rules of retention on a real run: a cache, checkpoints and a student of the pipeline."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from bench.support.harness import Parts
from cache.checking.verify import verify_cache
from cache.reading.usage import read_last_use
from kd.config.jobfile import parse_config
from kd.errors import Interrupted
from kd.pipeline import run_stages
from kd.progress import Event, Monitor
from services.settings import Settings
from services.store.jobs.records import make_job_id
from services.store.jobs.store import JobStore
from services.store.retention.collector import Item, find_items, look, remove_items
from services.store.run_folder import read_run

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.long]


class Run:
    """A job that the pipeline ran in this process, with the record of a job that has ended."""

    def __init__(self, store: JobStore, home: Path, job: dict[str, Any], stop_after: int = 0):
        self.id = make_job_id()
        self.home, self.store, self.job = home, store, job
        self.folder = home / "runs" / self.id
        self.saved = 0
        self.stop_after = stop_after
        self.go_on()
        store.adopt(read_run(self.folder), "local")
        store.redis.hset(f"kd:job:{self.id}", "finished_at", 1)

    def go_on(self) -> None:
        """Run all stages, or until so many checkpoints are saved."""
        try:
            run_stages(
                parse_config(self.job), self.home, self.folder, Monitor(self._hear, self._stops)
            )
        except Interrupted:
            assert self.stop_after

    def _hear(self, event: Event) -> None:
        self.saved += event.type == "checkpoint"

    def _stops(self) -> bool:
        return bool(self.stop_after) and self.saved >= self.stop_after

    def steps(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "checkpoints").iterdir())

    def hash_student(self) -> str:
        weights = (self.folder / "student" / "model.safetensors").read_bytes()
        return hashlib.sha256(weights).hexdigest()


@pytest.fixture
def job(tiny_teacher: Path, tiny_text: Path) -> dict[str, Any]:
    return {
        "name": "tiny",
        "teacher": {"model": str(tiny_teacher), "batch_size": 4},
        "student": {"init": {"layers": 1, "hidden_size": 16}},
        "data": {
            "train": str(tiny_text), "validation_fraction": 0.1, "sequence_length": 32,
            "max_train_samples": 20, "max_eval_samples": 4,
        },
        "cache": {"shard_sequences": 8},
        "train": {
            "max_steps": 6, "batch_size": 4, "eval_steps": 3, "save_steps": 2, "logging_steps": 1,
            "learning_rate": 1e-2, "warmup_steps": 2,
        },
        "evaluation": {"max_new_tokens": 4},
    }  # fmt: skip


def sweep(
    parts: Parts, home: Path, keep: int = 0, beside: bool = True, **ages: float
) -> tuple[list[Item], list[Item]]:
    rules: dict[str, Any] = {"retain_checkpoints": keep, "retain_checkpoints_of_students": beside}
    settings = Settings(home=home, redis_url=parts.server.url, **rules)
    scene = look(settings, parts.jobs, ages)
    return remove_items(find_items(scene), scene, lambda *_, **__: None)


def test_a_student_keeps_its_cache_and_a_run_goes_on_from_what_is_kept(
    parts: Parts, tmp_path: Path, job: dict[str, Any]
) -> None:
    whole = Run(parts.jobs, tmp_path / "one", job)
    (cache,) = [path for path in (whole.home / "caches").iterdir() if path.is_dir()]
    assert read_last_use(cache) is not None and verify_cache(cache) == []
    gone, kept = sweep(parts, whole.home, caches=0.0, checkpoints=0.0, beside=False)
    assert {item.kind for item in gone} == {"checkpoints"} and whole.steps() == []
    assert [(item.name, item.kept_by) for item in kept] == [
        (cache.name, f"the student of {whole.id}")
    ]

    stopped = Run(parts.jobs, tmp_path / "two", job, stop_after=2)
    _, newest = stopped.steps()
    gone, kept = sweep(parts, stopped.home, checkpoints=0.0, keep=1)
    assert [item.kind for item in gone] == ["checkpoints"] and kept == []
    assert stopped.steps() == [newest]
    stopped.stop_after = 0
    stopped.go_on()
    assert stopped.hash_student() == whole.hash_student()

    gone, _ = sweep(parts, whole.home, runs=1.0)
    assert whole.id in {item.name for item in gone} and not whole.folder.exists()
    gone, _ = sweep(parts, whole.home, caches=0.0)
    assert [item.name for item in gone] == [cache.name] and not cache.exists()
