"""AdamW with a state of 8 bits: its steps by hand, its weights, and what it learns beside AdamW.

Shapes: N numbers of a parameter, K blocks of them, C values of a code.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kd.config.train import TrainConfig
from kd.errors import ConfigError
from kd.optim.optimizers import find_eight_bit_weights, make_optimizer
from kd.optim.schedules import make_scheduler
from tests.support.kd.quantizers import needs_torchao
from tests.support.kd.students import make_llama
from tests.support.kd.zoo import build

CPU = torch.device("cpu")
BLOCK = 256
KEYS = ("exp_avg", "exp_avg_sq")


def make_options(**changes: Any) -> TrainConfig:
    chosen = {"optim": "adamw_8bit", "learning_rate": 0.01, "weight_decay": 0.1} | changes
    return TrainConfig(max_steps=40, **chosen)


def make_student() -> PreTrainedModel:
    return make_llama(width=64)


def train(student: PreTrainedModel, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """Train on the same few tokens, and return the loss of each step."""
    tokens_BL = torch.arange(48).reshape(4, 12)
    losses = []
    for _ in range(steps):
        loss = student(input_ids=tokens_BL, labels=tokens_BL, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


def round_to_codes(values: Tensor, codes_C: Tensor) -> Tensor:
    """Each number as the nearest code of its block's largest size, in float64 and by search."""
    blocks_KN = values.reshape(-1, BLOCK)
    scale_K1 = blocks_KN.abs().amax(1, keepdim=True).clamp(min=1e-12)
    distance = ((blocks_KN / scale_K1)[..., None] - codes_C).abs()
    return (codes_C[distance.argmin(-1)] * scale_K1).view_as(values)


@needs_torchao
def test_three_steps_are_those_of_adamw_with_a_rounded_state() -> None:
    student = make_student()
    weight = student.model.layers[0].self_attn.q_proj.weight
    optimizer = make_optimizer(student, (), make_options(), CPU)
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(64, 64, generator=generator) for _ in range(3)]
    w = weight.detach().double()
    m = v = torch.zeros_like(w)
    for step, gradient in enumerate(gradients, 1):
        weight.grad = gradient
        optimizer.step()
        g = gradient.double()
        m = 0.9 * m + 0.1 * g
        v = 0.95 * v + 0.05 * g * g
        root = (v / (1 - 0.95**step)).sqrt() + 1e-8
        w = w - 0.01 * 0.1 * w - 0.01 * (m / (1 - 0.9**step)) / root
        assert torch.allclose(weight.double(), w, rtol=1e-4, atol=1e-5), step
        state = optimizer.state[weight]
        m, v = (
            round_to_codes(each, state[key].qmap.double())
            for each, key in zip((m, v), KEYS, strict=True)
        )
        for each, key in zip((m, v), KEYS, strict=True):
            # In float32 a number in the middle of two codes may fall to the other one.
            differs = (state[key].dequantize() - each).abs() > 1e-6 * each.abs().max()
            assert differs.float().mean() < 0.01
        m, v = (state[key].dequantize().double() for key in KEYS)


@needs_torchao
def test_it_learns_as_adamw_does() -> None:
    losses = {}
    for name in ("adamw", "adamw_8bit"):
        student = make_student()
        optimizer = make_optimizer(student, (), make_options(optim=name, learning_rate=1e-3), CPU)
        losses[name] = train(student, optimizer, 40)
    assert losses["adamw"][0] - losses["adamw"][-1] > 2.0, "the student learns"
    pairs = zip(losses["adamw"], losses["adamw_8bit"], strict=True)
    assert max(abs(one - other) for one, other in pairs) < 0.05


@needs_torchao
@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_the_lm_head_and_vectors_keep_a_state_in_full(tied: bool) -> None:
    student = make_llama(vocabulary=128, width=64, tie_word_embeddings=tied)
    optimizer = make_optimizer(student, (), make_options(), CPU)
    train(student, optimizer, 1)
    for name, parameter in student.named_parameters():
        mean_square = optimizer.state[parameter]["exp_avg_sq"]
        assert hasattr(mean_square, "codes") == (".layers." in name and parameter.ndim == 2), name
        assert parameter.numel() >= 4096 or parameter.ndim == 1, "each is large enough"


def test_experts_in_one_stack_have_a_state_of_eight_bits() -> None:
    student = build("mixtral", hidden_size=64, intermediate_size=64)
    stacks = {each for each in student.parameters() if each.ndim == 3}
    assert stacks
    assert stacks < find_eight_bit_weights(student)


@needs_torchao
def test_rates_are_those_of_the_schedule_and_stay_numbers() -> None:
    student = make_student()
    options = make_options(lr_scheduler_type="linear", weight_decay=0)
    optimizer = make_optimizer(student, (), options, CPU)
    scheduler = make_scheduler(optimizer, options, 4)
    weight = student.model.layers[0].mlp.up_proj.weight
    moved = []
    for _ in range(5):
        before = weight.detach().clone()
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        scheduler.step()
        moved.append(float((weight.detach() - before).abs().mean()))
    assert {type(group["lr"]) for group in optimizer.param_groups} == {float}
    assert moved == pytest.approx([0.01, 0.0075, 0.005, 0.0025, 0.0], rel=0.02)


def test_without_torchao_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kd.config.extras.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="torchao, which is not installed") as caught:
        make_optimizer(make_student(), (), make_options(), CPU)
    assert caught.value.problems[0].pointer == "/train/optim"
    assert "potstill[quantization]" in caught.value.problems[0].remedy
