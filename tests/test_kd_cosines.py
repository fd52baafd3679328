"""Cosines of hidden states: against the definition of the DCT-II, and what they are for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from cache.codec import Codec, cosine_basis
from kd.cosines import from_cosines, to_cosines
from kd.models import Head
from kd.recording import Recorder
from kd.targets import HiddenTarget, TargetDecoder

WIDTHS = [1, 2, 7, 40, 576]
V, N = 50, 20


@pytest.mark.parametrize("width", WIDTHS)
def test_the_basis_is_the_orthonormal_dct(width: int) -> None:
    basis = cosine_basis(width)
    np.testing.assert_allclose(basis @ basis.T, np.eye(width), atol=1e-12)
    for k in {0, width // 3, width - 1}:
        factor = math.sqrt((1 if k == 0 else 2) / width)
        row = [factor * math.cos(math.pi * k * (n + 0.5) / width) for n in range(width)]
        np.testing.assert_allclose(basis[k], row, atol=1e-12)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_there_and_back(width: int, dtype: torch.dtype) -> None:
    states_ND = torch.randn(N, width, generator=torch.Generator().manual_seed(width)).to(dtype)
    cosines_ND = to_cosines(states_ND)
    assert cosines_ND.dtype == dtype
    exact_ND = states_ND.double() @ torch.from_numpy(cosine_basis(width)).T
    near = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(cosines_ND.double(), exact_ND, atol=near, rtol=0.0)
    torch.testing.assert_close(from_cosines(cosines_ND), states_ND, atol=near, rtol=0.0)


def error_of(codec: Codec, states_ND: torch.Tensor) -> torch.Tensor:
    """What recording and decoding make of the states, less the states."""
    head = Head(torch.randn(V, states_ND.shape[1], generator=torch.Generator().manual_seed(1)), None, 1.0, None, V)
    gold_N = torch.zeros(len(states_ND), dtype=torch.int64)
    records = Recorder(head, codec).records(states_ND, gold_N, 0, np.arange(len(states_ND)))
    columns = {name: torch.from_numpy(column) for name, column in records.columns.items()}
    target = TargetDecoder(codec, head).targets(gold_N, columns).teacher
    assert isinstance(target, HiddenTarget)
    return target.states(slice(None)) - states_ND


def test_a_coordinate_that_is_far_larger_does_not_cost_the_others_their_digits() -> None:
    """Kept as they are, all others would be off by a hundredth of the large one over the square root of twelve."""
    states_ND = torch.randn(N, 256, generator=torch.Generator().manual_seed(0))
    states_ND[:, 17] = 60.0
    error = error_of(Codec("hidden", V, bits=8), states_ND)
    rms, as_they_are = float(error.square().mean().sqrt()), 60.0 / 127 / math.sqrt(12)
    assert rms < as_they_are / 5
    assert float(error_of(Codec("hidden", V, bits=16), states_ND).abs().max()) <= 60.0 / 65_534 * 1.01
