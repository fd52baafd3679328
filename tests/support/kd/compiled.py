"""A small student to compile, and one training step."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from kd.models.layers import compute_hidden_states
from kd.text.packed_rows import PackedRows
from tests.support.kd.students import make_llama

#: The places of tokens in two documents of each row.
POSITIONS_BL = torch.arange(6).repeat(2).expand(2, 12)


def make_student() -> PreTrainedModel:
    """Return a student in training mode."""
    return make_llama().train()


def step(student: PreTrainedModel) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the hidden states of a packed batch and the gradients of the body."""
    tokens_BL = torch.arange(24).reshape(2, 12)
    hidden_BLD = compute_hidden_states(student, tokens_BL, PackedRows.of(POSITIONS_BL))
    student.zero_grad(set_to_none=True)
    hidden_BLD.square().mean().backward()
    return hidden_BLD.detach(), [
        each.grad for each in student.base_model.parameters() if each.grad is not None
    ]
