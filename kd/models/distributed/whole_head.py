"""The LM head of a spread teacher: whole, on the device where its logits are computed.

Shapes: B sequences, L positions of a sequence, D hidden width, V rows of the LM head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kd.models.layers import find_body


def put_head_whole(
    model: PreTrainedModel, weight_VD: Tensor, bias_V: Tensor | None, device: torch.device
) -> None:
    """Give ``model`` an LM head of these weights on ``device``.

    The one that it had computes a part of the logits, or fetches its weights for each product.
    """
    rows, width = weight_VD.shape
    head = nn.Linear(width, rows, bias=bias_V is not None, device="meta")
    head.weight = nn.Parameter(weight_VD.to(device), requires_grad=False)
    if bias_V is not None:
        head.bias = nn.Parameter(bias_V.to(device), requires_grad=False)
    model.set_output_embeddings(head)


def move_hidden_states(model: PreTrainedModel, device: torch.device) -> None:
    """Let the body of ``model`` give its last hidden states on ``device``."""

    def move(body: nn.Module, inputs: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state.to(device)
        return output

    find_body(model).register_forward_hook(move)
