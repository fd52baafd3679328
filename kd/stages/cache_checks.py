"""The stages that check a sealed cache: its digests, or its records against the teacher."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from cache.checking.verify import find_extras, verify_cache
from cache.errors import CacheCorrupt
from cache.reading.usage import hold_for
from cache.store import open_cache
from kd.capture.fidelity.live import TeacherLocation
from kd.capture.fidelity.recheck import recheck_fidelity
from kd.config.job import JobConfig
from kd.errors import FidelityError
from kd.files import find_caches, write_json
from kd.models.layers import stopping_forward
from kd.progress import Monitor, Notice, StageResult
from kd.tracking.loading_events import reported_loading


def run_verify(config: JobConfig, home: Path, run_dir: Path, monitor: Monitor) -> StageResult:
    """Compare all digests of a sealed cache; ``CacheCorrupt`` names what is damaged."""
    folder = find_caches(home, config.cache.store) / str(config.cache.fingerprint)
    monitor.emit("stage", stage="precompute", phase="verifying")
    # Before the check, so that a listener knows the cache even if the check fails.
    monitor.emit("plan", fingerprint=folder.name)
    damage = verify_cache(folder, lambda: monitor.check("while the cache was read"))
    extras = [] if damage else find_extras(folder)
    if extras:
        what = "files in the folder of the cache that are not part of it, ignored"
        monitor.note(Notice(what, len(extras), extras[0]))
    result = {"fingerprint": config.cache.fingerprint, "problems": damage, "extras": extras}
    write_json(run_dir / "verify.json", result)
    monitor.emit("artifact", name="verify.json", path=str(run_dir / "verify.json"))
    if damage:
        detail = f"{folder} is damaged: {'; '.join(damage[:10])}."
        raise CacheCorrupt(detail, "Delete it and capture it again, or restore a backup.")
    found = {"fingerprint": folder.name, "verified": True}
    monitor.emit("cache", **found)
    return StageResult(found)


def run_fidelity(config: JobConfig, home: Path, run_dir: Path, monitor: Monitor) -> StageResult:
    """Compare some records of a sealed cache with its teacher; ``FidelityError`` where they differ.

    What was measured is written beside the job, and into the cache if it is in bounds.
    """
    teacher = config.captured_teacher
    assert teacher is not None, "JobConfig refuses kind fidelity without a teacher"
    folder = find_caches(home, config.cache.store) / str(config.cache.fingerprint)
    monitor.emit("plan", fingerprint=folder.name)
    store = open_cache(folder)
    hold_for(store, folder)
    with reported_loading(monitor):
        origin = TeacherLocation.of_section(store, teacher)
        origin.require_genuine(store)
        monitor.emit("stage", stage="precompute", phase="comparing with the teacher")
        stop = "while the cache was compared with its teacher"
        with stopping_forward(monitor, stop):
            found = recheck_fidelity(store, origin, check_stop=lambda: monitor.check(stop))
    write_json(run_dir / "fidelity.json", {"fingerprint": folder.name, **asdict(found)})
    monitor.emit("artifact", name="fidelity.json", path=str(run_dir / "fidelity.json"))
    if found.problems:
        detail = f"{folder}: the records differ from the teacher: {'; '.join(found.problems)}."
        remedy = "Check that the teacher runs in the same precision and with the same versions."
        raise FidelityError(detail, remedy)
    result = {"fingerprint": folder.name, "faithful": True, "noise": found.noise}
    monitor.emit("cache", **result)
    return StageResult(result)
