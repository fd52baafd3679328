"""Plans of a training by arithmetic: the strategies that fit, their order, and their times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kd.config.jobfile import parse_config
from kd.errors import ConfigError
from kd.forecast.strategies import (
    LAYER_LAUNCHES,
    PASS_LAUNCHES,
    STEP_LAUNCHES,
    DeviceGroup,
    TrainingPlan,
    plan_job,
)
from kd.memory.devices import CUDA_CONTEXT, DEVICE_KINDS, LAUNCH_SECONDS
from kd.models.loading import build_student
from kd.models.tokenizers import load_tokenizer
from kd.tracking.stopwatch import count_flops_per_token

pytestmark = pytest.mark.usefixtures("one_thread")


def plan(
    teacher: Path, text: Path, devices: str = "8xh100", tokens: int | None = None, **changes: Any
) -> TrainingPlan:
    job = {
        "teacher": {"model": str(teacher)},
        "student": {"init": {"layers": 2, "hidden_size": 32}},
        "data": {"train": str(text), "sequence_length": 64},
        "train": {"max_steps": 100, "batch_size": 8, "gradient_accumulation_steps": 2},
    }
    config = parse_config(job | changes)
    return plan_job(config, Path(), Path(), DeviceGroup.parse(devices), tokens, price=2.0)


def make_large(width: int, layers: int = 2) -> dict[str, Any]:
    heads = {"num_attention_heads": width // 128}
    return {"init": {"layers": layers, "hidden_size": width} | heads}


def test_the_flop_are_those_of_the_meter(tiny_teacher: Path, tiny_text: Path) -> None:
    """6 N D, with the attention: as the utilisation of a run is counted."""
    found = plan(tiny_teacher, tiny_text)
    init = {"layers": 2, "hidden_size": 32}
    config = parse_config({
        "teacher": {"model": str(tiny_teacher)}, "student": {"init": init},
        "data": {"train": str(tiny_text), "sequence_length": 64}, "train": {"max_steps": 1},
    })  # fmt: skip
    student = build_student(config.student, load_tokenizer(tiny_teacher), 64, config.teacher_files)
    vocabulary = student.get_output_embeddings().weight.shape[0]
    per_token = count_flops_per_token(student, vocabulary, 64)
    assert found.flops == pytest.approx(found.tokens * per_token, rel=1e-6)
    assert found.parameters == student.num_parameters()
    numbers = found.parameters
    single = next(each for each in found.strategies if each.strategy == "single")
    assert (single.memory.gradients, single.memory.optimizer) == (4 * numbers, 8 * numbers)


def test_one_device_is_offered_and_comes_first_where_more_are_no_faster(
    tiny_teacher: Path, tiny_text: Path
) -> None:
    """A tiny student waits for launches, however many devices there are."""
    found = plan(tiny_teacher, tiny_text, "2xh100")
    assert [(each.strategy, each.ranks) for each in found.strategies] == [
        ("single", 1), ("ddp", 2), ("fsdp", 2),
    ]  # fmt: skip
    # Two layers, in one micro-batch: 479 launches of five microseconds.
    launches = 2 * LAYER_LAUNCHES + PASS_LAUNCHES + STEP_LAUNCHES
    assert launches * LAUNCH_SECONDS == pytest.approx(2.395e-3)
    for each in found.strategies:
        assert each.step_seconds == pytest.approx(launches * LAUNCH_SECONDS)
    costs = [each.cost or 0.0 for each in found.strategies]
    assert costs == sorted(costs)


def test_a_student_that_one_device_cannot_hold_is_divided(
    tiny_teacher: Path, tiny_text: Path
) -> None:
    """Some 13 billion numbers of 16 bytes fit no H100, and divided by eight each."""
    found = plan(tiny_teacher, tiny_text, student=make_large(16_384, 4))
    assert [each.strategy for each in found.strategies] == ["fsdp"]
    (fsdp,) = found.strategies
    assert fsdp.memory_bytes == fsdp.memory.total + CUDA_CONTEXT <= found.usable_bytes
    assert fsdp.memory.weights == pytest.approx(4 * found.parameters / 8, rel=0.01)
    assert found.remedies == ()


def test_where_nothing_fits_the_least_and_its_remedies_are_told(
    tiny_teacher: Path, tiny_text: Path
) -> None:
    found = plan(tiny_teacher, tiny_text, "t4", student=make_large(16_384, 4))
    assert found.strategies == () and found.least.memory_bytes > found.usable_bytes
    assert found.least.gradient_checkpointing == "full" and found.least.batch_size == 1
    assert any("train.optim" in remedy for remedy in found.remedies)


def test_tokens_and_price_multiply(tiny_teacher: Path, tiny_text: Path) -> None:
    short, long = (plan(tiny_teacher, tiny_text, tokens=count) for count in (10**8, 10**9))
    for one, other in zip(short.strategies, long.strategies, strict=True):
        assert other.seconds == pytest.approx(10 * one.seconds, rel=0.01)
        assert other.cost == pytest.approx(other.seconds / 3600 * 2.0 * other.ranks, rel=0.01)
    assert short.capture is not None and long.capture is not None
    assert long.capture.seconds == pytest.approx(10 * short.capture.seconds, rel=0.1)


def test_a_capture_reads_the_context_too(tiny_teacher: Path, tiny_text: Path) -> None:
    """A teacher that reads 8,192 tokens for each sequence of 64 needs far longer for as many."""
    section = {"model": str(tiny_teacher), "batch_size": 4096}
    longer = section | {"context": "{fact}", "max_length": 8192}
    job = {
        "student": {"init": {"layers": 2, "hidden_size": 32}},
        "data": {"train": str(tiny_text), "sequence_length": 64},
        "train": {"max_steps": 100, "batch_size": 8},
    }
    device = DeviceGroup.parse("8xh100")
    plain, read = (
        plan_job(parse_config(job | {"teacher": each}), Path(), Path(), device, 10**9).capture
        for each in (section, longer)
    )
    assert plain is not None and read is not None
    assert read.seconds > 20 * plain.seconds


def test_adapters_have_less_work_and_smaller_gradients(tiny_teacher: Path, tiny_text: Path) -> None:
    student = {"model": str(tiny_teacher)}
    plain = plan(tiny_teacher, tiny_text, student=student)
    adapted = plan(tiny_teacher, tiny_text, student=student | {"lora": {"rank": 4}})
    assert adapted.flops == pytest.approx(2 / 3 * plain.flops, rel=0.1)
    assert adapted.least.memory.gradients < 0.5 * plain.least.memory.gradients


def test_half_precision_is_that_of_the_device(tiny_teacher: Path, tiny_text: Path) -> None:
    for devices, precision in (("t4", "fp16"), ("l4", "bf16")):
        found = plan(tiny_teacher, tiny_text, devices)
        assert {each.precision for each in found.strategies} == {precision}
    assert DeviceGroup.parse("8xH100") == DeviceGroup(DEVICE_KINDS["h100"], 8)


def test_a_step_that_cannot_be_divided_is_refused(tiny_teacher: Path, tiny_text: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be split evenly over 5 devices"):
        plan(tiny_teacher, tiny_text, "5xh100")


@pytest.mark.parametrize("devices", ["h100", "8xh100", "1024xb200"])
def test_no_step_is_faster_than_its_launches(
    devices: str, tiny_teacher: Path, tiny_text: Path
) -> None:
    """However many devices share a step, the host starts its operations one by one."""
    train = {"max_steps": 1, "batch_size": 1024}
    found = plan(tiny_teacher, tiny_text, devices, train=train)
    least = (2 * LAYER_LAUNCHES + PASS_LAUNCHES + STEP_LAUNCHES) * LAUNCH_SECONDS
    steps = [each.step_seconds for each in found.strategies]
    assert steps and min(steps) >= 0.999 * least, "seconds are rounded to microseconds"


@pytest.mark.parametrize("name", ["8 of h100", "cpu", "0xh100", "8xh1000", "x", ""])
def test_devices_that_no_plan_has_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is no number and kind of devices") as refusal:
        DeviceGroup.parse(name)
    assert "rtx4090" in refusal.value.problems[0].remedy
