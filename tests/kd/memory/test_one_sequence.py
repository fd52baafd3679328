"""A capture that cannot fit is refused before it begins, with the field to change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kd.capture.plan import plan_capture
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.errors import ConfigError
from kd.memory.one_sequence import LeastCapture
from kd.models.loading import load_model
from kd.progress import SILENT
from kd.stages.capture import run_precompute

pytestmark = pytest.mark.usefixtures("one_thread")


def make_job(teacher: Path, text: Path, **resources: Any) -> JobConfig:
    return parse_config(
        {
            "kind": "precompute",
            "teacher": {"model": str(teacher)},
            "data": {"train": str(text), "sequence_length": 64, "max_train_samples": 4},
            "resources": resources,
        }
    )


def test_the_weights_are_those_that_are_loaded(tiny_teacher: Path, tiny_text: Path) -> None:
    plan = plan_capture(make_job(tiny_teacher, tiny_text))
    model = load_model(tiny_teacher, torch.float32)
    found = LeastCapture.of(plan, torch.device("cpu"))
    assert found.weights == 4 * sum(each.numel() for each in model.parameters())


def test_too_little_memory_is_named_before_the_capture(
    tiny_teacher: Path, tiny_text: Path, tmp_path: Path
) -> None:
    plan = plan_capture(make_job(tiny_teacher, tiny_text))
    least = LeastCapture.of(plan, torch.device("cpu"))
    too_little = {
        "/teacher/model": least.weights - 1,
        "/data/sequence_length": least.weights + least.sequence - 1,
    }
    for pointer, memory in too_little.items():
        job = make_job(tiny_teacher, tiny_text, memory=memory)
        with pytest.raises(ConfigError) as refusal:
            run_precompute(job, tmp_path, tmp_path / "run", SILENT)
        (problem,) = refusal.value.problems
        assert problem.pointer == pointer and "teacher.dtype" in problem.remedy
        assert not (tmp_path / "caches").exists()


def test_a_sealed_cache_needs_no_memory_for_its_teacher(
    tiny_teacher: Path, tiny_text: Path, tmp_path: Path
) -> None:
    enough = make_job(tiny_teacher, tiny_text)
    first = run_precompute(enough, tmp_path, tmp_path / "run", SILENT).cache
    little = make_job(tiny_teacher, tiny_text, memory=1)
    again = run_precompute(little, tmp_path, tmp_path / "run", SILENT).cache
    assert again["reused"] and again["fingerprint"] == first["fingerprint"]
