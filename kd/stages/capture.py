"""The stage that makes a sealed cache: it plans, checks what comes after, and captures."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from cache.errors import CacheError
from cache.store import has_manifest, open_cache
from kd.capture.capturing import capture_cache, help_capture
from kd.capture.codec_identity import is_earlier_form
from kd.capture.extending import settle_recipe
from kd.capture.plan import CapturePlan, plan_capture
from kd.config.job import JobConfig
from kd.config.kinds import CAPTURE
from kd.files import find_caches, read_json, write_json
from kd.memory.one_sequence import require_capture_memory
from kd.models.attention.causality import precheck_causality
from kd.models.attention.isolation import make_small, precheck_isolation
from kd.models.distributed.following import follow
from kd.models.distributed.leading import leading
from kd.models.lm_head import precheck_lm_head, require_rows
from kd.models.loading import outline_student, require_shareable_teacher, require_trainable_student
from kd.models.precision import pick_device
from kd.models.teacher_files import TeacherFiles
from kd.parallel.devices import count_ranks
from kd.parallel.group import Group, leave_group
from kd.parallel.launch import RankOrder, run_in_ranks
from kd.progress import NOTICES, Monitor, StageResult, keep_notices
from kd.stages import source
from kd.stages.aligning import precheck_alignment
from kd.text.corpus import TEXTS
from kd.training.preparing.requirements import require_stages


def run_precompute(config: JobConfig, home: Path, run_dir: Path, monitor: Monitor) -> StageResult:
    """Make sure that a sealed cache for this job exists: capture it if it does not.

    A teacher that several processes share runs in as many as the job has devices.
    """
    teacher = config.captured_teacher
    if teacher is None or not teacher.is_shared:
        return run_capture(config, home, run_dir, monitor)
    ranks = count_ranks(config)
    require_shareable_teacher(TeacherFiles.resolve(teacher), ranks)
    order = RankOrder(CAPTURE.name, config.model_dump(mode="json"), str(home), str(run_dir))
    return StageResult(**run_in_ranks(order, ranks, monitor))


def share_capture(
    config: JobConfig, home: Path, run_dir: Path, monitor: Monitor, group: Group
) -> StageResult:
    """Capture with a teacher that all ranks of ``group`` share.

    Rank 0 alone plans, records, seals and reports. The others run the teacher with it, and return
    nothing.
    """
    result = StageResult()
    if group.leads:
        with leading():
            result = run_capture(config, home, run_dir, monitor)
    else:
        follow()
    leave_group(group)
    return result


def run_capture(config: JobConfig, home: Path, run_dir: Path, monitor: Monitor) -> StageResult:
    """Make sure that a sealed cache for this job exists, as ``run_precompute`` does.

    Where several workers capture it, one of them does this, and the others help with the shards.
    """
    caches = find_caches(home, config.cache.store)
    planned = settle_recipe(plan_capture(config, monitor, home / TEXTS), caches)
    planned = keep_begun_cache(planned, config, caches, run_dir)
    monitor.check("after the text was read; no shard was started")
    if monitor.ranges is not None and monitor.ranges.shared is not None:
        help_capture(planned, caches, monitor.ranges.shared, monitor)
        return StageResult()
    require_possible_student(config, planned, monitor)
    if not has_manifest(caches / planned.identity.fingerprint):
        require_capture_memory(planned, config.resources, pick_device())
    # Before the capture, so that a listener knows the cache while it is still being written.
    monitor.emit("plan", fingerprint=planned.identity.fingerprint)
    trained = f"{len(planned.corpus.train)} sequences to train on"
    held_out = planned.describe_held_out()
    monitor.emit("stage", stage="precompute", phase=f"text: {trained}; held out: {held_out}")
    summary = capture_cache(planned, caches, monitor)
    write_json(run_dir / "cache.json", {**summary, "inputs": source.select_cache_inputs(config)})
    keep_notices(run_dir / NOTICES, monitor)
    monitor.emit("cache", **summary)
    return StageResult(summary)


def keep_begun_cache(
    planned: CapturePlan, config: JobConfig, caches: Path, run_dir: Path
) -> CapturePlan:
    """Return the plan of the cache that the run began with, if version 0.2.0 captured it.

    Checkpoints, also those of the run that the job continues, go on with the same records alone.
    """
    continued = None if config.resume is None else config.resume.run
    folders = [run_dir] if continued is None else [run_dir, run_dir.parent / continued]
    for folder in folders:
        known = read_json(folder / CAPTURE.last_file)
        if known is None or not source.are_cache_inputs(source.read_cache_inputs(known), config):
            continue
        with suppress(CacheError):
            found = open_cache(caches / known["fingerprint"]).identity
            own = planned.identity.codec
            if is_earlier_form(found.codec, own) and replace(found, codec=own) == planned.identity:
                return replace(planned, identity=found)
    return planned


def require_possible_student(config: JobConfig, planned: CapturePlan, monitor: Monitor) -> None:
    """Raise now the errors that training would raise for the job's student, and warn as it would.

    Its tokenizer and its shape are enough to find them. The capture before training may take days.
    """
    if config.student is None or "student" not in config.own_kind.needs:
        return
    own = source.load_student_tokenizer(config)
    size = planned.identity.tokenizer.vocabulary_size
    sides = (planned.tokenizer, size, own)
    vocabulary, length = precheck_alignment(config, *sides, planned.corpus.train, monitor)
    student = require_trainable_student(config.student, own, length, config.teacher_files)
    require_rows(student, vocabulary)
    train = config.train
    stages = config.resources.devices
    if train is not None and train.strategy == "pipeline" and stages > 1:
        require_stages(config.loss, student, stages)
    # A fresh student is a Llama, and one cut out of the teacher computes as the teacher does.
    if config.student.model is not None:
        # Made once for all checks: that takes seconds for a wide model.
        small = make_small(outline_student(config.student))
        if small is not None:
            precheck_lm_head(small)
            precheck_causality(small, length)
            if config.data.packing:
                precheck_isolation(small, length, monitor)
