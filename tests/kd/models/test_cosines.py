"""Cosines of hidden states, compared with the definition of the DCT-II, and their precision in
int8.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from cache.codec import Codec
from cache.rounding import make_cosine_basis
from kd.capture.recording import Recorder
from kd.loss.decoder import TargetDecoder
from kd.loss.whole_targets import HiddenTarget
from kd.models.cosines import from_cosines, to_cosines
from kd.models.lm_head import LMHead

WIDTHS = [1, 2, 7, 40, 576]
V = 50
N = 20


@pytest.mark.parametrize("width", WIDTHS)
def test_the_basis_is_the_orthonormal_dct(width: int) -> None:
    basis = make_cosine_basis(width)
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
    exact_ND = states_ND.double() @ torch.from_numpy(make_cosine_basis(width)).T
    near = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(cosines_ND.double(), exact_ND, atol=near, rtol=0.0)
    torch.testing.assert_close(from_cosines(cosines_ND), states_ND, atol=near, rtol=0.0)


def error_of(codec: Codec, states_ND: torch.Tensor) -> torch.Tensor:
    """Return the error that recording and decoding add to the states."""
    head = LMHead(
        torch.randn(V, states_ND.shape[1], generator=torch.Generator().manual_seed(1)),
        None,
        1.0,
        None,
        V,
    )
    gold_N = torch.zeros(len(states_ND), dtype=torch.int64)
    records = Recorder(head, codec).record(states_ND, gold_N, 0, np.arange(len(states_ND)))
    columns = {name: torch.from_numpy(column) for name, column in records.columns.items()}
    target = TargetDecoder(codec, head).decode(gold_N, columns).teacher
    assert isinstance(target, HiddenTarget)
    return target.decode_states(slice(None)) - states_ND


def test_a_coordinate_that_is_far_larger_does_not_cost_the_others_their_digits() -> None:
    """Stored without the transform, all other coordinates would have an error of a hundredth of the
    large one, divided by the square root of twelve.
    """
    states_ND = torch.randn(N, 256, generator=torch.Generator().manual_seed(0))
    states_ND[:, 17] = 60.0
    error = error_of(Codec("hidden", V, bits=8), states_ND)
    rms = float(error.square().mean().sqrt())
    as_they_are = 60.0 / 127 / math.sqrt(12)
    assert rms < as_they_are / 5
    assert (
        float(error_of(Codec("hidden", V, bits=16), states_ND).abs().max()) <= 60.0 / 65_534 * 1.01
    )
