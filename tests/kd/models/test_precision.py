"""Precision by hardware, and the loss scale of float16."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn

from kd.config.teacher import TeacherConfig
from kd.errors import ConfigError, TrainingError
from kd.models.loading import choose_teacher_dtype
from kd.models.precision import (
    ALARM_STEPS,
    LEAST_SCALE,
    Precision,
    ScalerWatch,
    allow_tf32,
    make_scaler,
)
from kd.models.teacher_files import TeacherFiles

CPU = torch.device("cpu")
GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def _float32_products_as_before() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("capability", "dtype", "products"),
    [
        ((6, 1), torch.float32, "highest"),  # GTX 10
        ((7, 0), torch.float16, "highest"),  # V100
        ((7, 5), torch.float16, "highest"),  # T4
        ((8, 0), torch.bfloat16, "high"),  # A100
        ((8, 9), torch.bfloat16, "high"),  # L4
        ((9, 0), torch.bfloat16, "high"),  # H100
        ((12, 0), torch.bfloat16, "high"),  # RTX 50
    ],
)
def test_auto_is_decided_by_the_hardware(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype, products: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    precision = Precision.choose("auto", GPU)
    assert torch.get_float32_matmul_precision() == "highest", "whoever asks changes nothing"
    allow_tf32(GPU)
    assert precision.dtype == dtype
    assert precision.scales_loss == (dtype == torch.float16)
    assert torch.get_float32_matmul_precision() == products


@pytest.mark.parametrize(
    ("capability", "bf16", "fp16"),
    [
        ((6, 1), torch.float32, torch.float32),  # P40
        ((7, 0), torch.float16, torch.float16),  # V100
        ((7, 5), torch.float16, torch.float16),  # T4
        ((8, 0), torch.bfloat16, torch.float16),  # A100
        ((9, 0), torch.bfloat16, torch.float16),  # H100
        ((12, 0), torch.bfloat16, torch.float16),  # RTX 50
    ],
)
def test_a_teacher_keeps_the_precision_of_its_weights_where_the_gpu_has_it(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capability: tuple[int, int],
    bf16: torch.dtype,
    fp16: torch.dtype,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    expected = {"bfloat16": bf16, "float16": fp16, "float32": torch.float32}
    for stored, dtype in expected.items():
        (tmp_path / "config.json").write_text(json.dumps({"dtype": stored}))
        teacher = TeacherFiles(TeacherConfig(model=str(tmp_path)), tmp_path)
        assert choose_teacher_dtype(teacher, GPU) == dtype
        assert choose_teacher_dtype(teacher, CPU) == torch.float32
        # What a job asks for, it gets.
        section = TeacherConfig(model=str(tmp_path), dtype="bfloat16")
        asked = TeacherFiles(section, tmp_path)
        assert choose_teacher_dtype(asked, GPU) == torch.bfloat16


def test_a_cpu_computes_in_float32_unless_told_otherwise() -> None:
    assert Precision.choose("auto", CPU).dtype == torch.float32
    assert Precision.choose("bf16", CPU).dtype == torch.bfloat16
    assert torch.get_float32_matmul_precision() == "highest"


def test_fp16_on_a_cpu_is_refused_with_both_named() -> None:
    with pytest.raises(
        ConfigError, match=r"train\.precision: fp16 needs a GPU, but the device of this run is cpu"
    ) as e:
        Precision.choose("fp16", CPU)
    assert [problem.pointer for problem in e.value.problems] == ["/train/precision"]
    assert "bf16" in e.value.problems[0].remedy


# ---------------------------------------------------------------------- the loss scale


def scaler_and_step(
    scale: float,
) -> tuple[torch.amp.GradScaler, nn.Parameter, torch.optim.Optimizer]:
    weight = nn.Parameter(torch.ones(2))
    return (
        torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000),
        weight,
        torch.optim.SGD([weight], 0.1),
    )


def take_step(
    scaler: torch.amp.GradScaler, weight: nn.Parameter, optimizer: torch.optim.Optimizer, bad: bool
) -> None:
    """Take a step like the training loop: scaled backward pass, unscaled gradients; the scaler
    skips a step that overflows.
    """
    optimizer.zero_grad(set_to_none=True)
    scaler.scale((weight * (float("inf") if bad else 1.0)).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


def test_skipped_steps_are_counted_and_the_others_taken() -> None:
    scaler, weight, optimizer = scaler_and_step(2.0**16)
    watch = ScalerWatch()
    taken = []
    for step, bad in enumerate([False, True, False, True, False], start=1):
        before = weight.detach().clone()
        take_step(scaler, weight, optimizer, bad)
        taken.append(watch.update(scaler, step))
        assert torch.equal(before, weight) != taken[-1]
    assert taken == [True, False, True, False, True]
    assert watch.skipped == 2
    assert scaler.get_scale() == 2.0**14
    assert watch.describe_alarm() is None


def test_the_scale_halves_at_an_overflow() -> None:
    scaler = make_scaler(Precision("cpu", torch.float16))
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], 0.1)
    scales = []
    for bad in (False, True, False):
        take_step(scaler, weight, optimizer, bad)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [2.0**16, 2.0**15, 2.0**15]
    assert scaler.get_growth_interval() == 2000 and scaler.get_growth_factor() == 2
    assert not make_scaler(Precision("cpu", torch.bfloat16)).is_enabled()


def run_watch(
    bad_steps: set[int], steps: int, watch: ScalerWatch, first: int = 1
) -> list[tuple[int, str]]:
    scaler, weight, optimizer = scaler_and_step(2.0**30)
    alarms = []
    for step in range(first, steps + 1):
        take_step(scaler, weight, optimizer, step in bad_steps)
        watch.update(scaler, step)
        if (message := watch.describe_alarm()) is not None:
            alarms.append((step, message))
    return alarms


def test_a_scale_that_falls_fast_is_an_alarm_and_a_slow_one_is_none() -> None:
    fast = {10, 15, 20, 29}
    slow = {10, 15, 20, 31}
    assert ALARM_STEPS == 20
    (alarm,) = run_watch(fast, 60, ScalerWatch())
    assert alarm[0] == 29, "at the step of the last fall, and once"
    assert "fell 4 times from step 10 to 29" in alarm[1]
    assert "train.learning_rate" in alarm[1]
    assert run_watch(slow, 60, ScalerWatch()) == []


def test_the_alarm_survives_a_checkpoint() -> None:
    bad = {10, 15, 20, 29}
    before = ScalerWatch()
    assert run_watch(bad, 17, before) == []
    after = ScalerWatch(**json.loads(json.dumps(asdict(before))))
    assert after == before
    assert [step for step, _ in run_watch(bad, 60, after, first=18)] == [29]
    assert after.skipped == 4


def test_a_scale_that_fell_to_nothing_ends_the_run() -> None:
    scaler, weight, optimizer = scaler_and_step(LEAST_SCALE * 3)
    watch = ScalerWatch()
    take_step(scaler, weight, optimizer, bad=True)
    assert not watch.update(scaler, 1)
    take_step(scaler, weight, optimizer, bad=True)
    with pytest.raises(TrainingError, match=r"step 2 the gradients overflow float16") as caught:
        watch.update(scaler, 2)
    assert "fp32" in caught.value.remedy


def test_without_a_loss_scale_every_step_is_taken() -> None:
    watch = ScalerWatch()
    assert watch.update(torch.amp.GradScaler("cpu", enabled=False), 1)
    assert watch == ScalerWatch()
