"""Attention in blocks has the values and the gradients of attention with all scores at once."""

import numpy as np
import pytest
import torch
from torch import Tensor

from kd.models.attention import blocks
from kd.models.attention.blocks import Scoring, attend_in_blocks

K, G, L, D, E = 2, 3, 50, 8, 6
PLACE_L = np.arange(L)
FIRSTS = {
    "all": np.zeros(L, np.int64),
    "window": np.maximum(PLACE_L - 6, 0),
    "wide window": np.maximum(PLACE_L - 30, 0),
}
#: Soft-cap and sinks.
KINDS = {
    "bare": (None, False),
    "soft-cap": (2.0, False),
    "sinks": (None, True),
    "both": (1.5, True),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the 50 queries into blocks of 16 and less."""
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", 1)


def make_inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(K, G, L, D), (K, L, D), (K, L, E), (K, G)]
    return [
        torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
        for shape in shapes
    ]


def attend_densely(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, first_l: np.ndarray, scoring: Scoring
) -> Tensor:
    """Compute the formula with all scores (K, G, L, L), without dropout."""
    score = scoring.scale * torch.einsum("kgqd,kjd->kgqj", q, k)
    if scoring.softcap is not None:
        score = scoring.softcap * torch.tanh(score / scoring.softcap)
    place_L = torch.arange(L)
    hidden = (place_L > place_L[:, None]) | (place_L < torch.from_numpy(first_l)[:, None])
    score = score.masked_fill(hidden, -torch.inf)
    if sink is not None:
        score = torch.cat([score, sink[..., None, None].expand(K, G, L, 1)], dim=-1)
    return torch.einsum("kgqj,kje->kgqe", score.softmax(-1)[..., :L], v)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", FIRSTS)
def test_values_and_gradients_are_those_of_the_formula(kind: str, first: str) -> None:
    softcap, with_sinks = KINDS[kind]
    q, k, v, sink = make_inputs()
    used = [q, k, v, *([sink] if with_sinks else [])]
    arguments = (sink if with_sinks else None, FIRSTS[first], Scoring(0.4, softcap))
    ours = attend_in_blocks(q, k, v, *arguments)
    theirs = attend_densely(q, k, v, *arguments)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    weight = torch.randn(ours.shape, dtype=ours.dtype, generator=torch.Generator().manual_seed(1))
    for mine, expected in zip(
        torch.autograd.grad((ours * weight).sum(), used),
        torch.autograd.grad((theirs * weight).sum(), used),
        strict=True,
    ):
        torch.testing.assert_close(mine, expected, rtol=1e-11, atol=1e-11)


def test_sums_are_float32_for_16_bits() -> None:
    q, k, v, sink = make_inputs(torch.bfloat16)
    exact = [each.detach().double() for each in (q, k, v, sink)]
    scoring = Scoring(0.4)
    ours = attend_in_blocks(q, k, v, sink, FIRSTS["all"], scoring)
    assert ours.dtype == torch.bfloat16
    expected = attend_densely(*exact, FIRSTS["all"], scoring)
    torch.testing.assert_close(ours.double(), expected, rtol=2**-8, atol=1e-6)
    gradients = torch.autograd.grad(ours.float().sum(), (q, k, v, sink))
    assert {each.dtype for each in gradients} == {torch.bfloat16}


def test_dropout_is_drawn_again_in_the_backward_pass() -> None:
    """Gradients are those of the same weights, by differences of the output."""
    q, k, v, sink = make_inputs()
    scoring = Scoring(0.4, 2.0, dropout=0.3)

    def run(*inputs: Tensor) -> Tensor:
        torch.manual_seed(5)
        return attend_in_blocks(*inputs, FIRSTS["window"], scoring)

    assert torch.autograd.gradcheck(run, (q, k, v, sink), fast_mode=True)


def test_dropout_keeps_the_mean_and_follows_the_random_state() -> None:
    q, k, v, _ = (each.detach() for each in make_inputs(torch.float32))
    whole = attend_in_blocks(q, k, v, None, FIRSTS["all"], Scoring(0.4))
    torch.manual_seed(1)
    drawn = [
        attend_in_blocks(q, k, v, None, FIRSTS["all"], Scoring(0.4, dropout=0.5))
        for _ in range(400)
    ]
    assert not torch.equal(drawn[0], drawn[1])
    assert (torch.stack(drawn).mean(0) - whole).abs().mean() < 0.05
    torch.manual_seed(1)
    again = attend_in_blocks(q, k, v, None, FIRSTS["all"], Scoring(0.4, dropout=0.5))
    assert torch.equal(drawn[0], again)
    nothing = attend_in_blocks(q, k, v, None, FIRSTS["all"], Scoring(0.4, dropout=1.0))
    assert not nothing.any()


def test_under_autocast_the_sums_stay_float32() -> None:
    inputs = [each.detach() for each in make_inputs(torch.float32)]
    plain = attend_in_blocks(*inputs, FIRSTS["all"], Scoring(0.4))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attend_in_blocks(*inputs, FIRSTS["all"], Scoring(0.4)), plain)
