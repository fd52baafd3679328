"""The hot path waits for the device as seldom as it can: copies of few numbers are counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kd.loss.decoder import TargetDecoder
from kd.loss.fused import compute_distillation_loss
from kd.loss.objective import Objective
from kd.loss.targets import Targets
from kd.models.attention.blocks import Scoring, attend_in_blocks
from kd.models.lm_head import LMHead
from tests.support.kd.references import (
    WIDTH,
    N,
    V,
    make_codec,
    make_columns,
    make_gold,
    make_logits,
)
from tests.support.simulated_gpu.streams import WAITS

GPU = torch.device("cuda")
CODEC = make_codec("tempered")
GOLD = make_gold().to(GPU)
COLUMNS = {
    name: each.to(GPU) for name, each in make_columns(CODEC, make_logits(), GOLD.cpu()).items()
}


def count_waits(work: Callable[[], Any]) -> int:
    before = WAITS.total()
    work()
    return WAITS.total() - before


def test_a_span_waits_for_nothing() -> None:
    first_l = np.maximum(np.arange(1024) - 100, 0)
    q, k, v = torch.randn(3, 1, 1, 1024, 4, device=GPU)
    q.requires_grad_()

    def train() -> None:
        attend_in_blocks(q, k[0], v[0], None, first_l, Scoring(0.5)).sum().backward()

    assert count_waits(train) == 0


def decode(temperature: float | torch.Tensor) -> Targets:
    """Decode records of profile tempered that are on the device."""
    return TargetDecoder(CODEC).decode(GOLD, COLUMNS, temperature)


def test_the_temperatures_of_a_codec_are_copied_once() -> None:
    decode(1.5)
    assert count_waits(lambda: decode(1.5)) == 0


def test_the_gradient_of_a_learned_temperature_is_copied_once() -> None:
    head = LMHead(torch.randn(V, WIDTH, device=GPU), None, 1.0, None, V)
    hidden = torch.randn(N, WIDTH, device=GPU, requires_grad=True)

    def learn(chunk: int) -> None:
        leaf = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
        terms = compute_distillation_loss(hidden, head, decode(leaf), Objective(), chunk)
        terms.total.backward()
        assert leaf.grad is not None and leaf.grad.device.type == "cpu"

    learn(N)
    assert count_waits(lambda: learn(2)) == count_waits(lambda: learn(N))
