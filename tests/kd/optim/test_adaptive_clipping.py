"""Adaptive clipping against its formula in float64, row by row."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from kd.optim.adaptive_clipping import clip_rows, find_clipped

SIZES = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip


def test_each_row_is_clipped_to_a_share_of_its_weights() -> None:
    torch.manual_seed(0)
    large = torch.nn.Parameter(torch.randn(7, 5))
    with torch.no_grad():
        large[3] = 0.0  # a row without weights counts as one of norm 1e-3
    experts = torch.nn.Parameter(torch.randn(2, 3, 5))
    for parameter in (large, experts):
        parameter.grad = (
            torch.randn_like(parameter) * torch.logspace(-4, 1, parameter.shape[-2])[:, None]
        )
    before = [parameter.grad.double().clone() for parameter in (large, experts)]
    clip_rows([large, experts, torch.nn.Parameter(torch.zeros(2, 2))], 0.02)
    touched = 0
    for parameter, gradient in zip((large, experts), before, strict=True):
        rows = parameter.detach().double().reshape(-1, 5)
        for row, old, new in zip(
            rows, gradient.reshape(-1, 5), parameter.grad.reshape(-1, 5), strict=True
        ):
            limit = 0.02 * max(float(row.norm()), 1e-3)
            expected = old * min(1.0, limit / float(old.norm()))
            torch.testing.assert_close(new.double(), expected, rtol=1e-5, atol=1e-9)
            touched += float(old.norm()) > limit
    assert 3 < touched < 13, "some rows are clipped and some are not"


def test_matrices_of_the_layers_are_clipped_and_no_others() -> None:
    student = LlamaForCausalLM(LlamaConfig(**SIZES))
    names = {id(parameter): name for name, parameter in student.named_parameters()}
    clipped = {names[id(parameter)] for parameter in find_clipped(student)}
    matrices = {name for name in names.values() if ".layers." in name and "norm" not in name}
    assert clipped == matrices and len(clipped) == 14


def test_the_matrices_of_experts_are_clipped() -> None:
    student = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=2))
    assert any(parameter.ndim == 3 for parameter in find_clipped(student))
