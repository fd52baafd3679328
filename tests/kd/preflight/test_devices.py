"""Whether torch can compute on the device that was promised; its answers are simulated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kd import pipeline
from kd.config.jobfile import parse_config
from kd.errors import DeviceUnusable
from kd.preflight.devices import (
    TorchGpu,
    TorchGpus,
    ask_torch,
    is_known,
    require_known_architecture,
    require_promised_gpus,
)

#: The architectures of torch 2.13's builds for Linux on x86.
CUDA_13 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
CUDA_12 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")

Answer = Callable[..., None]


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Answer:
    """Let torch answer as on a machine with these GPUs."""

    def replace(
        capabilities: list[tuple[int, int]],
        architectures: tuple[str, ...] = CUDA_13,
        cuda: str | None = "13.0",
        failure: Exception | None = None,
    ) -> None:
        def init() -> None:
            if failure is not None:
                raise failure

        answers: dict[str, Any] = {
            "is_available": lambda: bool(capabilities),
            "device_count": lambda: len(capabilities),
            "get_device_name": lambda index: f"GPU {index}",
            "get_device_capability": lambda index=0: capabilities[index],
            "get_arch_list": lambda: list(architectures),
            "init": init,
        }
        for name, value in answers.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.version, "cuda", cuda)

    return replace


@pytest.mark.parametrize(
    ("capability", "architectures", "expected"),
    [
        ((7, 0), CUDA_13, False),  # V100
        ((7, 0), CUDA_12, True),
        ((6, 1), CUDA_12, True),  # code for sm_60 runs on sm_61
        ((7, 5), CUDA_13, True),  # T4
        ((8, 9), CUDA_13, True),  # code for sm_86 runs on sm_89
        ((9, 0), CUDA_13, True),
        ((10, 3), CUDA_13, True),
        ((11, 0), CUDA_13, False),
        ((12, 1), CUDA_13, True),
        ((13, 0), CUDA_13, True),  # from compute_120, by the driver's compiler
        ((10, 0), CUDA_12, False),  # B200
        ((8, 0), ("sm_86",), False),  # code for a later minor version
        ((9, 0), ("sm_90a",), True),
        ((9, 1), ("sm_90a",), False),
        ((10, 3), ("sm_100f",), True),
        ((11, 0), ("compute_100f",), False),
        ((9, 0), ("gfx90a", "gfx942"), True),  # not CUDA: not judged
        ((9, 0), (), True),
    ],
)
def test_a_build_runs_on_the_architectures_that_it_has_code_for(
    capability: tuple[int, int], architectures: tuple[str, ...], expected: bool
) -> None:
    assert is_known(capability, architectures) == expected


def test_a_promised_gpu_that_torch_does_not_see_is_an_error_with_its_cause(answer: Answer) -> None:
    answer([], cuda=None, failure=AssertionError("Torch not compiled with CUDA enabled"))
    with pytest.raises(DeviceUnusable, match="gave this job 1 GPU, but torch sees none") as caught:
        require_promised_gpus(1, ask_torch())
    assert "Torch not compiled with CUDA enabled" in caught.value.detail
    assert f"{torch.__version__} (without CUDA)" in caught.value.detail
    assert "TORCH_INDEX" in caught.value.remedy

    answer([], failure=RuntimeError("The NVIDIA driver on your system is too old\nmore advice"))
    with pytest.raises(DeviceUnusable, match=r"\(CUDA 13.0\) says .*driver .* too old") as caught:
        require_promised_gpus(2, ask_torch())
    assert "gave this job 2 GPUs" in caught.value.detail
    assert "more advice" not in caught.value.detail
    assert "driver 580 or newer" in caught.value.remedy
    assert caught.value.type == "device_unusable"

    answer([])
    assert ask_torch().failure == "torch counts 0 GPUs"


def test_without_a_promise_or_with_the_gpu_nothing_is_wrong(answer: Answer) -> None:
    answer([])
    require_promised_gpus(0, ask_torch())
    require_known_architecture(ask_torch())
    answer([(9, 0), (9, 0)])
    require_promised_gpus(2, ask_torch())
    require_known_architecture(ask_torch())


def test_an_architecture_that_the_build_does_not_know_is_named(answer: Answer) -> None:
    answer([(7, 0)])
    with pytest.raises(DeviceUnusable, match="no code for GPU 0, whose architecture is sm_70"):
        require_known_architecture(ask_torch())
    answer([(7, 0)], CUDA_12, "12.6")
    require_known_architecture(ask_torch())
    # A job uses the first GPU only.
    gpus = (TorchGpu("new", (9, 0)), TorchGpu("old", (7, 0)))
    require_known_architecture(TorchGpus("2.13.0", "13.0", gpus, CUDA_13))


def test_a_stage_fails_before_it_writes_anything(answer: Answer, tmp_path: Path) -> None:
    answer([(7, 0)])
    job = {"kind": "verify", "cache": {"fingerprint": "f" * 32}}
    with pytest.raises(DeviceUnusable):
        pipeline.run_stage("precompute", parse_config(job), tmp_path, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_torch_itself_says_why_it_sees_no_gpu() -> None:
    seen = ask_torch()
    assert seen.gpus == ()
    assert seen.failure.partition(":")[2]
