"""The forecast of a training: its time and memory by real steps, its noise by two samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kd.capture.probe import open_trial
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.evaluation.baseline import build_starting_student
from kd.experiments.noise import NEAR, GradientNoise, advise, measure_noise
from kd.forecast import Question, estimate_job
from kd.memory.devices import DEVICE_KINDS
from kd.models.attention.isolation import isolate_documents
from kd.models.loading import load_model
from kd.models.precision import Precision
from kd.pipeline import load_student_tokenizer
from kd.text.batches import CachedRecords
from tests.support.kd.references import plain_logprobs
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
    assert (found.steps, found.noise) == (9, None)
    assert found.batch_noise is not None and found.batch_noise.records == 0.0
    assert [line.split(" of the batch")[0] for line in found.advice] == ["The noise scale"]
    assert found.tokens_per_step == pytest.approx(8 * 63, rel=0.05)
    without = {"kind": "precompute", "student": None, "train": None}
    forecast = estimate_job(make_job(tiny_teacher, tiny_text, **without), tmp_path)
    capture, found = forecast.capture, forecast.training
    assert capture is not None and found is None and list(tmp_path.iterdir()) == []


def test_the_noise_is_that_of_the_sample_and_the_signal_that_of_the_models(
    tiny_teacher: Path, tiny_text: Path, tmp_path: Path
) -> None:
    """Against the whole distributions of both models, at two thresholds."""
    noises = []
    for threshold in (0.2, 0.02):
        job = make_job(tiny_teacher, tiny_text, threshold)
        student = build_starting_student(job, load_student_tokenizer(job)).eval()
        with open_trial(job, tmp_path) as trial:
            assert trial.second is not None
            first, second = CachedRecords(trial.first), CachedRecords(trial.second)
            noises.append(measure_noise(job, first, second, student, 2048).now)
            sequences, _ = second.read(range(len(trial.second)))
    q_NV, _, _ = plain_logprobs(student, sequences)
    p_NV, _, _ = plain_logprobs(load_model(tiny_teacher, torch.float32).eval(), sequences)
    p_NV, q_NV = p_NV.exp(), q_NV.exp()
    signal = float((p_NV - q_NV).square().sum())
    # At 0.2 and at 0.02, a tail of mass R in m draws has the variance R^2 / m, less the squares.
    for threshold, found in zip((0.2, 0.02), noises, strict=True):
        tail_NV = torch.where(p_NV > threshold, 0.0, p_NV)
        mass_N = tail_NV.sum(1)
        draws_N = (mass_N / threshold).floor().clamp(min=1)
        variance = float((mass_N.square() / draws_N - tail_NV.square().sum(1)).sum())
        assert found == pytest.approx(variance / signal, rel=0.15)


@pytest.mark.long
@pytest.mark.parametrize("profile", ["tempered", "hidden"])
def test_other_profiles_are_measured_at_the_temperature_of_the_job(
    profile: str, tiny_teacher: Path, tiny_text: Path, tmp_path: Path
) -> None:
    changes = {"cache": {"profile": profile}, "loss": {"temperature": 2.0, "alpha": 0.0}}
    found = estimate_job(make_job(tiny_teacher, tiny_text, **changes), tmp_path).training
    assert found is not None and found.steps == 9 and found.step_seconds > 0
    assert (found.noise is None) == (profile == "hidden"), "hidden states are no sample"
    assert found.noise is None or found.noise.now > 0


def test_a_student_like_its_teacher_drowns_in_noise_and_is_told_what_to_set(
    tiny_teacher: Path, tiny_text: Path, tmp_path: Path
) -> None:
    job = make_job(tiny_teacher, tiny_text, student={"model": str(tiny_teacher)})
    found = estimate_job(job, tmp_path).training
    assert found is not None and found.noise is not None and found.noise.now > 10
    assert found.noise.near == pytest.approx(NEAR * found.noise.now)
    said = " ".join(found.advice)
    assert "from the start" in said and "Set cache.threshold to 0.001 " in said
    assert "Or set train.gradient_accumulation_steps to 8 or more" in said
    assert "hidden" not in said


def test_advice_depends_on_noise_profile_and_tokens(tiny_teacher: Path, tiny_text: Path) -> None:
    job = make_job(tiny_teacher, tiny_text)
    assert advise(job, GradientNoise.of(0.04, 1.0), 500) == []
    later = advise(job, GradientNoise.of(0.15, 1.0), 500)
    assert (
        "150% to the squared size of the gradient once the student is 10 times nearer" in later[0]
    )
    assert "only little of that" in later[0] and "cache.threshold to 0.0033 " in later[1]
    tempered = make_job(tiny_teacher, tiny_text, cache={"profile": "tempered", "threshold": 0.05})
    told = advise(tempered, GradientNoise.of(1.0, 1.0), 65_536)
    assert "only a part of that" in told[0] and "cache.profile to hidden" in told[2]
