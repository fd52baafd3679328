"""Products of factors in half precision, against the same products in float64.

Where CUDA's libraries sum in float32 by themselves is tested in tests/system/test_gpu.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kd.models.lm_head import LMHead
from kd.models.precision import float32_products
from kd.models.products.wide import (
    CONVERTED_ROWS,
    _exact_products,
    add_product_,
    multiplies_bfloat16,
    sums_wide,
    write_product_,
)

pytestmark = pytest.mark.usefixtures("one_thread")
HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
#: A vocabulary that no block of the product divides.
V = 1201
D = 96


def make_factors(dtype: torch.dtype, rows: int = 9) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    hidden_ND = torch.randn(rows, D, generator=generator)
    return hidden_ND.to(dtype), torch.randn(V, D, generator=generator).to(dtype)


def measure_error(found_NV: Tensor, expected_NV: Tensor) -> float:
    """The largest error, as a share of the largest number."""
    return float((found_NV.double() - expected_NV).abs().max() / expected_NV.abs().max())


@HALF
def test_a_product_into_float32_is_not_rounded_to_its_factors(dtype: torch.dtype) -> None:
    hidden_ND, weight_VD = make_factors(dtype)
    expected_NV = hidden_ND.double() @ weight_VD.double().T
    out_NV = torch.full((len(hidden_ND), V), torch.nan)
    write_product_(out_NV, hidden_ND, weight_VD.T)
    assert measure_error(out_NV, expected_NV) < 1e-6
    add_product_(out_NV, hidden_ND, weight_VD.T)
    assert measure_error(out_NV, 2 * expected_NV) < 1e-6
    rounded_NV = torch.empty(len(hidden_ND), V, dtype=dtype)
    write_product_(rounded_NV, hidden_ND, weight_VD.T)
    assert measure_error(rounded_NV, expected_NV) > 1e-4


def test_a_cpu_converts_the_factors_instead() -> None:
    assert not sums_wide(torch.ones(2, 2, dtype=torch.bfloat16), torch.float32)


@pytest.mark.skipif(
    not multiplies_bfloat16(torch.device("cpu")), reason="this CPU does not multiply bfloat16"
)
def test_a_cpu_may_round_factors_to_bfloat16_only_where_they_are_in_it() -> None:
    halves = {dtype: torch.ones(1, dtype=dtype) for dtype in (torch.bfloat16, torch.float16)}
    products = torch.backends.mkldnn.matmul
    with float32_products():
        before = products.fp32_precision
        with _exact_products(halves[torch.bfloat16]):
            assert products.fp32_precision == "bf16"
        with _exact_products(halves[torch.float16]):
            assert products.fp32_precision == before
        assert products.fp32_precision == before != "bf16"
    assert torch.get_float32_matmul_precision() == "highest"


@HALF
def test_rows_that_are_converted_part_by_part_make_the_same_product(dtype: torch.dtype) -> None:
    hidden_ND, weight_VD = make_factors(dtype, CONVERTED_ROWS + 3)
    hidden_ND, weight_VD = hidden_ND[:, :8], weight_VD[:5, :8]
    expected_NV = hidden_ND.double() @ weight_VD.double().T
    out_NV = torch.full((len(hidden_ND), 5), torch.nan)
    write_product_(out_NV, hidden_ND, weight_VD.T)
    assert measure_error(out_NV, expected_NV) < 1e-6
    add_product_(out_NV, hidden_ND, weight_VD.T)
    assert measure_error(out_NV, 2 * expected_NV) < 1e-6


def test_torch_has_the_products_that_a_gpu_is_asked_for() -> None:
    """Their arguments, and the memory of a padded row, which a device without values can check."""
    factor = torch.empty(16, 16, dtype=torch.bfloat16, device="meta")
    out = torch.empty(16, 64, device="meta")[:, :16]
    assert torch.mm(factor, factor, out_dtype=torch.float32, out=out).stride() == (64, 1)
    assert torch.addmm(out, factor, factor, out_dtype=torch.float32, out=out).stride() == (64, 1)


@HALF
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("softcap", [None, 12.0], ids=["", "soft cap"])
@torch.no_grad()
def test_logits_of_a_head_in_half_precision_are_those_of_float64(
    dtype: torch.dtype, biased: bool, softcap: float | None
) -> None:
    hidden_ND, weight_VD = make_factors(dtype)
    bias = torch.linspace(-1, 1, V).to(dtype) if biased else None
    head = LMHead(weight_VD, bias, 0.75, softcap, V - 3)
    exact = LMHead(
        weight_VD.double(), None if bias is None else bias.double(), 0.75, softcap, V - 3
    )
    expected_NV = exact.compute_logits(hidden_ND.double())
    around_NV = torch.full((len(hidden_ND), V + 20), 99.0)
    given_NV = head.compute_logits(hidden_ND, around_NV[:, : V - 3])
    assert given_NV.data_ptr() == around_NV.data_ptr() and (around_NV[:, V - 3 :] == 99.0).all()
    for found_NV in (given_NV, head.compute_logits(hidden_ND)):
        assert found_NV.dtype == torch.float32
        assert measure_error(found_NV, expected_NV) < 1e-6


@pytest.mark.parametrize(("largest", "least_kl"), [(20.0, 5e-5), (36.0, 2e-4)])
@torch.no_grad()
def test_logits_in_float32_have_no_error_where_rounded_ones_have(
    largest: float, least_kl: float
) -> None:
    hidden_ND, weight_VD = make_factors(torch.bfloat16, 64)
    expected_NV = hidden_ND.double() @ weight_VD.double().T
    scale = largest / float(expected_NV.abs().max())
    hidden_ND = (hidden_ND.float() * scale).bfloat16()
    logp_NV = (hidden_ND.double() @ weight_VD.double().T).log_softmax(1)
    head = LMHead(weight_VD, None, 1.0, None, V)

    def measure_kl(logits_NV: Tensor) -> float:
        difference_NV = logp_NV - logits_NV.double().log_softmax(1)
        return float((logp_NV.exp() * difference_NV).sum(1).mean())

    assert abs(measure_kl(head.compute_logits(hidden_ND))) < 1e-9
    assert measure_kl(head.multiply(hidden_ND)) > least_kl
