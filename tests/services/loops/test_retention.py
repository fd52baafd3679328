"""The nightly pass of retention: at its hour, once a day, and only if a rule is set."""

from __future__ import annotations

import asyncio
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from bench.support.harness import Parts
from bench.support.small.caches import make_cache
from bench.support.waiting import wait_until
from cache.errors import StorageError
from services.loops import retention
from services.loops.reconciler import Reconciler
from services.loops.retention import NightlyRetention
from services.settings import DAY_SECONDS, Settings
from services.store.audit import AuditLog, AuditQuery
from tests.support.records import finished

AT_THREE = datetime(2026, 1, 5, 3, 20, tzinfo=UTC)


def make_settings(home: Path, **rules: Any) -> Settings:
    (home / "runs").mkdir(parents=True, exist_ok=True)
    return Settings(home=home, **rules)


def make_old_cache(home: Path) -> Path:
    folder = make_cache(home / "caches")
    long_ago = time.time() - 100 * DAY_SECONDS
    os.utime(folder / "manifest.json", (long_ago, long_ago))
    return folder


def read_audit(settings: Settings) -> list[dict[str, Any]]:
    return AuditLog(settings).read_page(AuditQuery(), 100).entries


def test_it_removes_at_its_hour_once_a_day(parts: Parts, tmp_path: Path) -> None:
    settings = make_settings(tmp_path, retain_caches_unused_days=30, retain_runs_days=7)
    folder = make_old_cache(tmp_path)
    job_id = finished(parts.jobs)
    parts.jobs.redis.hset(f"kd:job:{job_id}", "finished_at", 1)
    one, other = (NightlyRetention(parts.jobs, settings) for _ in range(2))
    for hour in (2, 4):
        one.step(AT_THREE.replace(hour=hour))
    assert folder.is_dir() and read_audit(settings) == []
    one.step(AT_THREE)
    assert not folder.exists() and parts.jobs.get(job_id) is None
    entries = {entry["target"]: entry for entry in read_audit(settings)}
    assert set(entries) == {folder.name, job_id}
    entry = entries[folder.name]
    assert (entry["actor"], entry["action"], entry["kind"]) == (
        "retention",
        "retention.remove",
        "caches",
    )
    assert entry["bytes"] > 0 and "not used for 100 days" in entry["why"]
    freed = {
        labels["kind"]: value
        for name, labels, value in parts.jobs.read_counters()
        if name == "kd_retention_freed_bytes_total"
    }
    assert freed["caches"] == entry["bytes"]
    again = make_old_cache(tmp_path)
    other.step(AT_THREE.replace(minute=50))
    assert again.is_dir(), "another process has done it today"
    other.step(AT_THREE.replace(day=6))
    assert not again.exists()


def test_it_is_off_unless_a_rule_is_set(parts: Parts, tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    folder = make_old_cache(tmp_path)
    NightlyRetention(parts.jobs, settings).step(AT_THREE)
    assert folder.is_dir()
    assert not parts.jobs.redis.keys("kd:retention:*")


def test_what_cannot_be_removed_does_not_hold_up_the_rest(
    parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings(tmp_path, retain_caches_unused_days=30, retain_runs_days=7)
    folder = make_old_cache(tmp_path)
    job_id = finished(parts.jobs)
    parts.jobs.redis.hset(f"kd:job:{job_id}", "finished_at", 1)

    def refuse(*arguments: Any) -> None:
        raise StorageError("The disk is read-only.", "Make it writable.")

    monkeypatch.setattr("cache.operations.remove_cache", refuse)
    NightlyRetention(parts.jobs, settings).step(AT_THREE)
    assert folder.is_dir() and parts.jobs.get(job_id) is None


def test_the_reconciler_runs_it(
    parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "INTERVAL_SECONDS", 0.05)
    hour = parts.jobs.read_clock().hour
    settings = make_settings(tmp_path, retain_caches_unused_days=30, retain_hour=hour)
    folder = make_old_cache(tmp_path)

    async def run() -> None:
        task = asyncio.create_task(Reconciler(parts.jobs, parts.queue, settings).run())
        await asyncio.to_thread(wait_until, lambda: not folder.exists(), 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


def test_a_removal_ends_with_the_api(
    parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hour = parts.jobs.read_clock().hour
    settings = make_settings(tmp_path, retain_runs_days=7, retain_hour=hour)
    for _ in range(40):
        parts.jobs.redis.hset(f"kd:job:{finished(parts.jobs)}", "finished_at", 1)
    retired: list[str] = []

    def retire(job_id: str, *_: Any) -> bool:
        retired.append(job_id)
        time.sleep(0.1)
        return False

    monkeypatch.setattr(parts.jobs, "retire", retire)

    async def run() -> None:
        task = asyncio.create_task(NightlyRetention(parts.jobs, settings).run())
        await asyncio.to_thread(wait_until, lambda: retired, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())  # it waits for the thread
    assert len(retired) < 20
