"""A capture with a teacher that is spread over devices: its records, fidelity and identity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cache.store import Cache, open_cache
from kd.capture.fidelity.live import LiveTeacher, TeacherLocation
from kd.capture.fidelity.measure import measure_fidelity
from kd.capture.fidelity.verdict import find_out_of_bounds
from kd.capture.plan import plan_capture
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.memory.model_memory import estimate_least_memory
from kd.memory.one_sequence import LeastCapture
from kd.progress import SILENT
from kd.stages.capture import run_precompute
from tests.support.caches import content
from tests.support.kd.captures import PROFILES

pytestmark = pytest.mark.usefixtures("one_thread")


def make_job(teacher: Path, text: Path, profile: str, **spread: Any) -> JobConfig:
    """A capture of 12 sequences in two shards."""
    return parse_config(
        {
            "kind": "precompute",
            "teacher": {"model": str(teacher), "batch_size": 3, **spread},
            "data": {"train": str(text), "sequence_length": 64, "max_train_samples": 12},
            "cache": {"shard_sequences": 7, **PROFILES[profile]},
        }
    )


def capture(job: JobConfig, home: Path) -> Cache:
    summary = run_precompute(job, home, home / "run", SILENT).cache
    return open_cache(home / "caches" / str(summary["fingerprint"]))


@pytest.mark.long
@pytest.mark.parametrize("profile", PROFILES)
def test_the_records_are_those_of_the_teacher_on_one_device(
    tiny_teacher: Path, tiny_text: Path, tmp_path: Path, profile: str
) -> None:
    plain = capture(make_job(tiny_teacher, tiny_text, profile), tmp_path)
    spread = capture(
        make_job(tiny_teacher, tiny_text, profile, parallel="device_map", host_memory=0), tmp_path
    )
    assert spread.folder != plain.folder and spread.identity.teacher.parallel == "device_map"
    files = [content(each.folder / "shards") for each in (plain, spread)]
    assert len(files[0]) > 4 and files[0] == files[1]
    assert spread.manifest.fidelity == plain.manifest.fidelity


def test_only_the_parallel_field_makes_another_cache(tiny_teacher: Path, tiny_text: Path) -> None:
    """The limits of memory say where weights lie, not what the teacher computes."""

    def name(**spread: Any) -> str:
        return plan_capture(
            make_job(tiny_teacher, tiny_text, "topk", **spread)
        ).identity.fingerprint

    spread = name(parallel="device_map")
    assert name() == name(parallel="none") != spread
    assert name(parallel="device_map", host_memory="1GiB", gpu_memory="2GiB") == spread


def test_fidelity_of_a_spread_teacher_is_measured_in_one_process(
    tiny_teacher: Path, tiny_text: Path, tmp_path: Path
) -> None:
    store = capture(make_job(tiny_teacher, tiny_text, "topk", parallel="device_map"), tmp_path)
    origin = TeacherLocation.find(store, None, Path())
    assert origin.teacher.section.parallel == "device_map" and origin.genuine
    found = measure_fidelity(store, LiveTeacher.load(store.identity, origin.teacher))
    assert found.rows == store.manifest.fidelity
    assert find_out_of_bounds(store, found) == []


def test_weights_that_may_lie_on_the_disk_are_not_refused(
    tiny_teacher: Path, tiny_text: Path
) -> None:
    cpu = torch.device("cpu")
    whole = make_job(tiny_teacher, tiny_text, "topk")
    spread = make_job(tiny_teacher, tiny_text, "topk", parallel="device_map")
    assert LeastCapture.of(plan_capture(whole), cpu).weights > 0
    least = LeastCapture.of(plan_capture(spread), cpu)
    assert least.weights == 0 < least.sequence
    assert estimate_least_memory(spread, Path()) is None


def test_each_device_needs_memory_for_its_part_of_a_shared_teacher(
    tiny_teacher: Path, tiny_text: Path
) -> None:
    whole = make_job(tiny_teacher, tiny_text, "topk")
    four = parse_config(
        make_job(tiny_teacher, tiny_text, "topk", parallel="fsdp").model_dump(mode="json")
        | {"resources": {"gpus": 4}}
    )
    stored = estimate_least_memory(whole, Path())
    assert stored is not None and estimate_least_memory(four, Path()) == stored // 4
    weights = LeastCapture.of(plan_capture(whole), torch.device("cpu")).weights
    assert LeastCapture.of(plan_capture(four), torch.device("cpu"), 4).weights == weights // 4
