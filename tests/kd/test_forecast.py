"""The forecast of a training: its time and memory by real steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.evaluation.baseline import build_starting_student
from kd.forecast import Question, estimate_job
from kd.memory.devices import DEVICE_KINDS
from kd.models.attention.isolation import isolate_documents
from kd.models.precision import Precision
from kd.pipeline import load_student_tokenizer
from tests.support.kd.training import estimate_memory

pytestmark = pytest.mark.usefixtures("one_thread")
FRESH = {"init": {"layers": 1, "hidden_size": 16}}


def make_job(teacher: Path, text: Path, threshold: float = 0.05, /, **changes: Any) -> JobConfig:
    job = {
        "teacher": {"model": str(teacher), "batch_size": 4},
        "student": FRESH,
        "data": {
            "train": str(text), "sequence_length": 64, "max_train_samples": 24,
            "validation_fraction": 0.1,
        },
        "cache": {"threshold": threshold},
        "train": {
            "epochs": 3, "batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 1e-3,
        },
    }  # fmt: skip
    return parse_config(job | changes)


def test_steps_tokens_time_and_memory_are_those_of_the_whole_training(
    tiny_teacher: Path, tiny_text: Path, tmp_path: Path
) -> None:
    job = make_job(tiny_teacher, tiny_text)
    forecast = estimate_job(job, tmp_path)
    capture, found = forecast.capture, forecast.training
    assert capture is not None and found is not None and list(tmp_path.iterdir()) == []
    assert (capture.train_sequences, found.steps) == (24, 9)
    assert found.tokens_per_step == round(
        8 * capture.positions / (24 + capture.validation_sequences)
    )
    assert found.tokens == 9 * found.tokens_per_step
    steps = 9 * found.step_seconds
    rounding = 0.05 + 9 * 0.00005  # of `seconds` to a tenth, of `step_seconds` to four decimals
    assert steps - rounding <= found.seconds <= 2 * steps + rounding
    student = build_starting_student(job, load_student_tokenizer(job))
    isolate_documents(student)
    precision = Precision.choose("fp32", torch.device("cpu"))
    expected = estimate_memory(student, job.require_train(), 64, 2048, precision)
    assert found.memory_bytes == expected.total == sum(found.memory.values())
    assert found.parameters == student.num_parameters()
    (device,) = forecast.devices
    phases = {each.phase: each for each in device.phases}
    assert list(phases) == ["capture", "training", "evaluation"] and not device.expected
    assert phases["capture"].seconds == pytest.approx(capture.seconds, abs=0.06)
    together = phases["training"].seconds + phases["evaluation"].seconds
    assert together == pytest.approx(found.seconds, abs=0.06)
    assert phases["training"].memory.weights == found.memory["weights"]


def test_a_kind_of_gpu_and_a_price_are_answered_too(
    tiny_teacher: Path, tiny_text: Path, tmp_path: Path
) -> None:
    job = make_job(tiny_teacher, tiny_text)
    question = Question(DEVICE_KINDS["h100"], price=3.0)
    here, there = estimate_job(job, tmp_path, question=question).devices
    assert (here.expected, there.expected, there.device) == (False, True, "h100")
    assert all(each.cost is None for each in here.phases)
    assert all(each.cost is not None for each in there.phases)


def test_a_training_on_plain_text_and_a_capture_alone_are_estimated_too(
    tiny_teacher: Path, tiny_text: Path, tmp_path: Path
) -> None:
    alone = {
        "kind": "train", "teacher": None, "loss": {"alpha": 1.0},
        "student": {"init": {**FRESH["init"], "tokenizer": str(tiny_teacher)}},
    }  # fmt: skip
    forecast = estimate_job(make_job(tiny_teacher, tiny_text, **alone), tmp_path)
    capture, found = forecast.capture, forecast.training
    assert capture is None and found is not None
    assert found.steps == 9
    assert found.tokens_per_step == pytest.approx(8 * 63, rel=0.05)
    without = {"kind": "precompute", "student": None, "train": None}
    forecast = estimate_job(make_job(tiny_teacher, tiny_text, **without), tmp_path)
    capture, found = forecast.capture, forecast.training
    assert capture is not None and found is None and list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize("profile", ["tempered", "hidden"])
def test_other_profiles_are_measured_at_the_temperature_of_the_job(
    profile: str, tiny_teacher: Path, tiny_text: Path, tmp_path: Path
) -> None:
    changes = {"cache": {"profile": profile}, "loss": {"temperature": 2.0, "alpha": 0.0}}
    found = estimate_job(make_job(tiny_teacher, tiny_text, **changes), tmp_path).training
    assert found is not None and found.steps == 9 and found.step_seconds > 0
