"""Small random models, one training step of one, and comparisons of their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kd.models.layers import compute_hidden_states
from kd.text.packed_rows import PackedRows

#: The places of tokens in two documents of each row of ``step_packed``.
POSITIONS_BL = torch.arange(6).repeat(2).expand(2, 12)


def make_llama(
    vocabulary: int = 50, width: int = 16, layers: int = 2, seed: int = 0, **changes: Any
) -> LlamaForCausalLM:
    """Return a random Llama with two attention heads.

    ``changes`` are further fields of its configuration. Torch's generator is left as the
    initialisation leaves it, so that a test may draw from it next.
    """
    torch.manual_seed(seed)
    shape = {
        "intermediate_size": 3 * width // 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
    }
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            num_hidden_layers=layers,
            **(shape | changes),
        )
    )


def save_teacher(folder: Path, tokenizer: Any, width: int, **changes: Any) -> Path:
    """Save a random Llama with its tokenizer, and return ``folder``.

    Its LM head is padded to 2,112 rows, as those of real models often are.
    """
    model = make_llama(
        2112,
        width,
        intermediate_size=2 * width,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **changes,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def step_packed(student: PreTrainedModel) -> tuple[Tensor, list[Tensor]]:
    """Return the hidden states of a packed batch and the gradients of the body."""
    tokens_BL = torch.arange(24).reshape(2, 12)
    hidden_BLD = compute_hidden_states(student, tokens_BL, PackedRows.of(POSITIONS_BL))
    student.zero_grad(set_to_none=True)
    hidden_BLD.square().mean().backward()
    return hidden_BLD.detach(), [
        each.grad for each in student.base_model.parameters() if each.grad is not None
    ]


def copy_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the model's parameters by name."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare the weights of two students bit for bit."""
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
