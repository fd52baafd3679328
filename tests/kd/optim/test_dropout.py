"""The places of dropout in a model, and that they act in the next forward pass."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
)

from kd.errors import ModelError
from kd.optim.dropout import Dropout

LLAMA = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
    num_attention_heads=2,
)  # fmt: skip
GPT2 = GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32)
OPT = OPTConfig(
    vocab_size=64, hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=2,
    word_embed_proj_dim=16, max_position_embeddings=32,
)  # fmt: skip


@pytest.mark.parametrize(
    "make",
    [lambda: LlamaForCausalLM(LLAMA), lambda: GPT2LMHeadModel(GPT2), lambda: OPTForCausalLM(OPT)],
)
def test_a_probability_acts_in_training_and_zero_drops_nothing(make: object) -> None:
    student: PreTrainedModel = make()  # type: ignore[operator]
    student.train()
    dropout = Dropout.of(student)
    tokens = torch.arange(16).unsqueeze(0)

    def varies() -> bool:
        one, other = (student(tokens).logits for _ in range(2))
        return not torch.equal(one, other)

    outside = [
        module
        for name, module in student.named_modules()
        if isinstance(module, torch.nn.Dropout) and "layer" not in name and ".h." not in name
    ]
    for module in outside:
        module.p = 0.0
    dropout.set(0.5)
    assert varies()
    dropout.set(0.0)
    assert not varies()


def test_a_model_whose_layers_have_no_dropout_is_refused() -> None:
    student = MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2))
    with pytest.raises(ModelError, match="layers of MambaForCausalLM have no dropout") as caught:
        Dropout.of(student)
    assert "train.dropout" in caught.value.remedy
