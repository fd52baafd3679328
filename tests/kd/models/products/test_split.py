"""Products in float32 as sums of products in bfloat16: no further from float64 than float32 is.

Here every product in bfloat16 runs in float32, which holds its terms and sums them as a GPU does.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kd.loss import whole_targets
from kd.loss.fused import compute_distillation_loss
from kd.loss.objective import Objective
from kd.loss.targets import Targets
from kd.loss.whole_targets import HiddenTarget, decode_lm_head
from kd.models.lm_head import LMHead, SplitLMHead
from kd.models.products.split import can_split, split_into_halves, write_split_product_

pytestmark = pytest.mark.usefixtures("one_thread")
STORED = pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32], ids=str)
CPU = torch.device("cpu")
V = 701
D = 256
N = 32


def make_factors(stored: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    hidden_ND = torch.randn(N, D, generator=generator)
    return hidden_ND, torch.randn(V, D, generator=generator).to(stored)


def round_to_tf32(matrix: Tensor) -> Tensor:
    """The 10 bits after the first one that TF32 keeps of a factor."""
    return ((matrix.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def measure_error(found_NV: Tensor, expected_NV: Tensor) -> float:
    return float((found_NV.double() - expected_NV).square().mean().sqrt())


@STORED
def test_the_parts_of_a_matrix_sum_to_it_exactly(stored: torch.dtype) -> None:
    _, weight_VD = make_factors(stored)
    weight_VD = weight_VD * 2.0 ** torch.arange(-60, -60 + D).clamp(max=60).to(stored)
    parts = split_into_halves(weight_VD)
    assert [each.dtype for each in parts] == [torch.bfloat16] * (1 if stored.itemsize == 2 else 3)
    assert torch.equal(sum(each.double() for each in parts), weight_VD.double())


@STORED
def test_the_error_is_that_of_float32(stored: torch.dtype) -> None:
    hidden_ND, weight_VD = make_factors(stored)
    wide_VD = weight_VD.float()
    expected_NV = hidden_ND.double() @ weight_VD.double().T
    found_NV = torch.empty(N, V)
    write_split_product_(found_NV, hidden_ND, split_into_halves(weight_VD))
    error = measure_error(found_NV, expected_NV)
    assert error <= 1.5 * measure_error(hidden_ND @ wide_VD.T, expected_NV)
    tf32_NV = round_to_tf32(hidden_ND) @ round_to_tf32(wide_VD).T
    assert error < measure_error(tf32_NV, expected_NV) / 100


def test_a_cpu_keeps_its_products_in_float32() -> None:
    assert not can_split(CPU)
    _, weight_VD = make_factors(torch.float32)
    head = decode_lm_head(store(weight_VD, 1.0, 0.0), V, CPU)
    assert type(head) is LMHead and head.weight.dtype == torch.float32


def store(weight_VD: Tensor, scale: float, softcap: float) -> dict[str, np.ndarray]:
    """An LM head as a cache stores it."""
    narrow = weight_VD.dtype == torch.bfloat16
    weight = weight_VD.view(torch.uint16).numpy() if narrow else weight_VD.numpy()
    bias = np.linspace(-1.0, 1.0, V, dtype=np.float32)
    return {"weight": weight, "bias": bias, "transform": np.array([scale, softcap])}


@pytest.fixture
def a_device_that_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU take the way of a GPU with matrix units for bfloat16."""
    monkeypatch.setattr(whole_targets, "can_split", lambda device: True)


@STORED
@pytest.mark.parametrize("softcap", [0.0, 20.0], ids=["", "soft cap"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.usefixtures("a_device_that_splits")
def test_training_through_a_split_head_is_that_through_the_head_in_float64(
    temperature: float, softcap: float, stored: torch.dtype
) -> None:
    hidden_ND, weight_VD = make_factors(stored)
    head = decode_lm_head(store(weight_VD, 0.5, softcap), V, CPU)
    assert isinstance(head, SplitLMHead)
    codes_ND = (hidden_ND * 2000).round().to(torch.int16)
    teacher = HiddenTarget(codes_ND, torch.full((N,), 1 / 2000), head, temperature)
    rows = slice(3, 20)
    found_NV = teacher.take_chunk(rows).logp_NV
    expected_NV = teacher.take_chunk(rows, torch.float64).logp_NV
    assert found_NV.dtype == torch.float32
    torch.testing.assert_close(found_NV.double(), expected_NV, rtol=1e-5, atol=1e-4)
    targets = Targets(torch.arange(N), teacher, temperature)
    student = LMHead(weight_VD.double().flip(0), None, 1.0, None, V)
    losses = [
        compute_distillation_loss(hidden_ND.to(dtype), student, targets, Objective(0.1)).total
        for dtype in (torch.float32, torch.float64)
    ]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0.0)
