"""Packed rows of many architectures: hidden states, loss and gradients of each document alone."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from kd.models.attention.interface import use_own_attention
from kd.models.layers import compute_hidden_states
from kd.models.lm_head import find_lm_head
from kd.text.packed_rows import PackedRows
from tests.support.kd.zoo import ROWS
from tests.support.packed_zoo import (
    CUTS,
    DOCUMENTS,
    OURS,
    POSITIONS_BL,
    THEIRS,
    TOKENS_BL,
    make_packed,
)

pytestmark = pytest.mark.usefixtures("one_thread")

#: Those whose gradients are compared, too.
DIFFERENTIATED = [
    "cohere2", "deepseek_v2", "gemma2", "gemma3_text", "gpt2", "gpt_oss", "llama", "llama4_text",
    "mistral", "mixtral", "olmo3", "qwen3", "smollm3", "vaultgemma",
]  # fmt: skip


def compute_alone(model: PreTrainedModel) -> Tensor:
    """Return the hidden states of plain transformers for one document at a time."""
    use_own_attention(model)
    return torch.cat(
        [compute_hidden_states(model, TOKENS_BL[:, start:stop]) for start, stop in CUTS], dim=1
    )


def compute_plain_loss(model: PreTrainedModel) -> float:
    """Return the loss of plain transformers, over all targets of the documents."""
    losses = [
        float(model(input_ids=part, labels=part, use_cache=False).loss) * (part.shape[1] - 1)
        for part in (TOKENS_BL[:, start:stop] for start, stop in CUTS)
        if part.shape[1] > 1
    ]
    return sum(losses) / sum(length - 1 for length in DOCUMENTS)


def compute_loss(model: PreTrainedModel, hidden_BLD: Tensor) -> float:
    """Return the cross-entropy of packed rows: the loss of a first step."""
    is_target_L = torch.ones(sum(DOCUMENTS), dtype=torch.bool)
    is_target_L[[stop - 1 for _, stop in CUTS]] = False
    head = find_lm_head(model, ROWS)
    logits_NV = head.compute_logits(hidden_BLD[:, is_target_L].flatten(0, 1))
    gold_N = TOKENS_BL.roll(-1, dims=1)[:, is_target_L].flatten()
    return float(functional.cross_entropy(logits_NV, gold_N))


@pytest.mark.parametrize("kind", OURS + THEIRS)
@torch.no_grad()
def test_packed_hidden_states_and_loss_are_those_of_documents_alone(kind: str) -> None:
    model = make_packed(kind)
    assert model.config._attn_implementation.startswith("potstill") == (kind in OURS)
    packed = compute_hidden_states(model, TOKENS_BL, PackedRows.of(POSITIONS_BL))
    alone = compute_alone(model)
    assert float((packed - alone).abs().max()) <= 1e-5 * float(alone.abs().max())
    assert math.isclose(compute_loss(model, packed), compute_plain_loss(model), rel_tol=1e-5)


@pytest.mark.parametrize("kind", DIFFERENTIATED)
def test_gradients_are_those_of_documents_alone(kind: str) -> None:
    model = make_packed(kind)
    trained = [each for each in model.parameters() if each.requires_grad]

    def differentiate(hidden_BLD: Tensor) -> list[Tensor]:
        found: Any = torch.autograd.grad(hidden_BLD.square().sum(), trained, allow_unused=True)
        return [each for each in found if each is not None]

    ours = differentiate(compute_hidden_states(model, TOKENS_BL, PackedRows.of(POSITIONS_BL)))
    theirs = differentiate(compute_alone(model))
    assert len(ours) == len(theirs)
    for mine, expected in zip(ours, theirs, strict=True):
        assert float((mine - expected).abs().max()) <= 1e-4 * float(expected.abs().max()) + 1e-5
