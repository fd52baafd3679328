"""Steps of weights in bfloat16: rounded up or down, and exact in the mean.

Shapes: N numbers of a parameter.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter
from torch.optim import AdamW

from kd.optim.rounded import RoundedAdamW

SETTINGS = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}
NUMBERS = 100_000


def step(optimizer: torch.optim.Optimizer, parameter: Parameter, value: float) -> None:
    parameter.grad = torch.full_like(parameter, value)
    optimizer.step()


def test_a_step_smaller_than_the_numbers_apart_is_exact_in_the_mean() -> None:
    """At 0.3 bfloat16 numbers are 0.00195 apart, twenty steps of the rate."""
    torch.manual_seed(0)
    start = 0.30078125
    weight_N = Parameter(torch.full((NUMBERS,), start, dtype=torch.bfloat16))
    exact = Parameter(torch.tensor([start], dtype=torch.float64))
    step(RoundedAdamW([weight_N], **SETTINGS), weight_N, 0.5)
    step(AdamW([exact], **SETTINGS), exact, 0.5)
    below = start - 2**-9
    assert set(weight_N.double().tolist()) == {start, below}
    share = (start - float(exact.detach())) / (start - below)
    deviation = (share * (1 - share) / NUMBERS) ** 0.5
    moved = float((weight_N.double() == below).double().mean())
    assert moved == pytest.approx(share, abs=5 * deviation)
    assert 0.01 < share < 0.1, "rounded to the nearest, no number would move"


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_other_parameters_are_stepped_as_by_adamw(amsgrad: bool, fused: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    start_N = torch.randn(64, generator=generator)
    one, other = (Parameter(start_N.clone()) for _ in range(2))
    settings = SETTINGS | {"amsgrad": amsgrad, "fused": fused}
    ours = RoundedAdamW([one], **settings)
    theirs = AdamW([other], **settings)
    for value in (0.5, -2.0, 0.1):
        step(ours, one, value)
        step(theirs, other, value)
    assert torch.allclose(one, other, rtol=1e-6, atol=0)
    assert ours.state[one].keys() == theirs.state[other].keys()


def test_the_same_generator_rounds_alike() -> None:
    def run(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        weight_N = Parameter(torch.full((64,), 0.3, dtype=torch.bfloat16))
        optimizer = RoundedAdamW([weight_N], **SETTINGS)
        for _ in range(20):
            step(optimizer, weight_N, 1.0)
        return weight_N.detach()

    assert torch.equal(run(0), run(0))
    assert not torch.equal(run(0), run(1))
