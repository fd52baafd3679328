"""Each kernel is tried before a run relies on it, and a kernel that fails is a warning of the run.

Triton's interpreter runs the kernels on the CPU.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.support.paths import AUSTEN
from kd import pipeline
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.kernels import available
from kd.kernels.available import describe_kernel_failure, try_kernels
from kd.progress import Event, Monitor, StageResult

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off beside a GPU"),
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None and not os.environ.get("CI"),
        reason="needs triton",
    ),
]
CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
KERNELS = ["reduce_rows", "write_gradient"]


@pytest.fixture
def a_gpu_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the pipeline take a GPU on which no kernel can run: torch here is built without CUDA."""
    monkeypatch.setattr(pipeline, "pick_device", lambda: GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    describe_kernel_failure.cache_clear()


def make_job(precision: str) -> JobConfig:
    return parse_config(
        {
            "teacher": {"model": str(AUSTEN / "teacher")},
            "student": {"init": {"layers": 1, "hidden_size": 32}},
            "data": {"train": str(AUSTEN / "text" / "persuasion.txt")},
            "train": {"max_steps": 1, "precision": precision},
        }
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_kernel_is_run_and_its_result_compared(dtype: torch.dtype) -> None:
    trials = try_kernels(CPU, dtype)
    assert list(trials) == KERNELS
    assert list(trials.values()) == [""] * 2


def test_a_wrong_result_and_a_broken_kernel_are_told_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kd.kernels import triton_rows

    whole = triton_rows.reduce_rows

    def reduce_wrongly(*arguments: Any, **options: Any) -> triton_rows.RowSums:
        rows = whole(*arguments, **options)
        return replace(rows, lse_N=rows.lse_N + 0.5)

    monkeypatch.setattr(triton_rows, "reduce_rows", reduce_wrongly)
    monkeypatch.setattr(triton_rows, "_write_gradient_kernel", None)
    errors = try_kernels(CPU)
    assert errors["reduce_rows"] == "ArithmeticError: its result is wrong by 0.5"
    assert errors["write_gradient"].startswith("TypeError: ")


def test_a_kernel_that_fails_in_one_dtype_is_replaced_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The hidden states of a run in bfloat16 are bfloat16: float32 alone tells nothing of it."""

    def fail_in_halves(z_NV: torch.Tensor) -> None:
        if z_NV.dtype != torch.float32:
            raise RuntimeError("no such instruction")

    monkeypatch.setattr(available, "_TRIALS", {"reduce_rows": fail_in_halves})
    describe_kernel_failure.cache_clear()
    assert describe_kernel_failure(CPU, torch.float32) == ""
    with pytest.warns(UserWarning, match="no such instruction"):
        assert "reduce_rows" in describe_kernel_failure(CPU, torch.bfloat16)
    describe_kernel_failure.cache_clear()


def test_kernels_that_fail_are_one_warning_of_a_run(
    a_gpu_that_fails: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for task in ("capture", "train"):
        monkeypatch.setitem(pipeline.TASKS, task, lambda *_: StageResult())
    events: list[Event] = []
    with pytest.warns(UserWarning, match="GPU kernels fail on cuda:0") as logged:
        pipeline.run_stages(make_job("auto"), tmp_path, tmp_path / "run", Monitor(events.append))
    assert len(logged) == 1
    assert [event.data["phase"] for event in events if event.type == "stage"] == [
        "loading data"
    ] * 2, "both stages were run"
    (warning,) = [event.data["message"] for event in events if event.type == "warning"]
    assert all(kernel in warning for kernel in KERNELS)
    # A build of torch without CUDA says so; one with CUDA says that there is no driver.
    assert "CUDA" in warning or "NVIDIA driver" in warning, "the cause"
    assert "kd doctor" in warning


@pytest.mark.parametrize(
    ("precision", "broken"),
    [("auto", torch.bfloat16), ("fp32", torch.bfloat16), ("fp16", torch.float16)],
)
def test_a_kernel_that_fails_in_16_bits_only_is_a_warning_of_the_run(
    a_gpu_that_fails: None, monkeypatch: pytest.MonkeyPatch, precision: str, broken: torch.dtype
) -> None:
    """The capture of a job in fp32 reads a teacher in bfloat16, as most are stored."""

    def fail_in_one(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
        return {"reduce_rows": "no such instruction" * (dtype == broken)}

    monkeypatch.setattr(available, "try_kernels", fail_in_one)
    events: list[Event] = []
    with pytest.warns(UserWarning, match="no such instruction"):
        pipeline.warn_of_kernels(make_job(precision), GPU, Monitor(events.append))
    (warning,) = [event.data["message"] for event in events]
    assert str(broken) in warning and "kd doctor" in warning
    describe_kernel_failure.cache_clear()


def test_another_run_of_the_process_is_warned_too(a_gpu_that_fails: None) -> None:
    events: list[Event] = []
    with pytest.warns(UserWarning, match="GPU kernels fail"):
        pipeline.warn_of_kernels(make_job("auto"), GPU, Monitor(events.append))
    pipeline.warn_of_kernels(make_job("auto"), GPU, Monitor(events.append))
    assert [event.type for event in events] == ["warning"] * 2
    pipeline.warn_of_kernels(make_job("auto"), CPU, Monitor(events.append))
    assert len(events) == 2, "a CPU has no use for them"
