"""The rates of a device are measured with numbers such as a training has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bench.gpu import device_rates
from bench.gpu.device_rates import measure_rates


def test_products_are_measured_with_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU needs less power to multiply ones, and runs at a higher clock than with real data."""
    factors: list[Tensor] = []
    multiply = torch.mm

    def watch(left: Tensor, right: Tensor, **options: Any) -> Tensor:
        factors.extend((left, right))
        return multiply(left, right, **options)

    monkeypatch.setattr(torch, "mm", watch)
    monkeypatch.setitem(device_rates._WIDTHS, "cpu", 64)
    monkeypatch.setitem(device_rates._COPIED, "cpu", 1 << 16)
    rates = measure_rates(torch.device("cpu"))
    assert {each.dtype for each in factors} == {torch.float32, torch.bfloat16}
    for each in factors:
        numbers = each.float()
        assert len(numbers.unique()) > 200 and 0.9 < float(numbers.std()) < 1.1
        assert abs(float(numbers.mean())) < 0.1
    assert min(rates.single, rates.half, rates.bandwidth) > 0
