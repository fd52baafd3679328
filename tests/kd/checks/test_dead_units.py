"""Dead units are found in real models by what their MLPs give, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
)

from kd.checks.dead_units import check_dead_units, watching_units

LLAMA = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
    num_attention_heads=2,
)  # fmt: skip
TOKENS = torch.arange(32).reshape(2, 16)


def find_shares(student: PreTrainedModel) -> dict[str, float]:
    with torch.no_grad(), watching_units(student) as watch:
        student(TOKENS)
        student(TOKENS + 32)
    return watch.find_dead_shares()


def test_channels_without_weights_are_dead_and_others_are_alive() -> None:
    student = LlamaForCausalLM(LLAMA).eval()
    assert find_shares(student) == {"layer 0": 0.0, "layer 1": 0.0}
    with torch.no_grad():
        student.model.layers[1].mlp.gate_proj.weight[:6] = 0.0
    assert find_shares(student) == {"layer 0": 0.0, "layer 1": 0.25}
    assert not student.model.layers[0].mlp.down_proj._forward_pre_hooks


def test_a_relu_whose_bias_is_low_is_dead() -> None:
    student = OPTForCausalLM(
        OPTConfig(
            vocab_size=64, hidden_size=16, ffn_dim=24, num_hidden_layers=2,
            num_attention_heads=2, word_embed_proj_dim=16, max_position_embeddings=32,
        )
    ).eval()  # fmt: skip
    with torch.no_grad():
        student.model.decoder.layers[0].fc1.bias[:12] = -1e3
    assert find_shares(student)["layer 0"] >= 0.5


def test_gpt2_is_looked_at_and_experts_are_not() -> None:
    gpt2 = GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    )
    assert find_shares(gpt2.eval()).keys() == {"layer 0", "layer 1"}
    sizes = {name: getattr(LLAMA, name) for name in ("vocab_size", "hidden_size")}
    mixture = MixtralConfig(
        **sizes, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2,
    )  # fmt: skip
    assert find_shares(MixtralForCausalLM(mixture).eval()) == {}


@pytest.mark.parametrize(("share", "ok"), [(0.1, True), (0.11, False)])
def test_many_dead_units_are_an_alarm_with_its_layers(share: float, ok: bool) -> None:
    verdict = check_dead_units({"layer 0": 0.0, "layer 1": share})
    assert verdict.ok == ok
    assert ok or ("in layer 1 (11%)." in verdict.message and "learning_rate" in verdict.remedy)
