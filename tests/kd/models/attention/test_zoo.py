"""Packed rows of many architectures: hidden states, loss and gradients of each document alone."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kd.models.attention.interface import use_own_attention
from kd.models.attention.isolation import isolate_documents
from kd.models.layers import compute_hidden_states
from kd.models.lm_head import find_lm_head
from kd.text.packed_rows import PackedRows
from tests.support.kd.zoo import ROWS, some_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

#: The sizes of every model: each takes those that its configuration knows.
SIZES = {
    "vocab_size": ROWS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "partial_rotary_factor": 0.5, "rotary_dim": 4, "attention_chunk_size": 8,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 12, "shared_expert_intermediate_size": 12, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 48,
    "ffn_dim": 48, "word_embed_proj_dim": 32, "num_layers": 2, "attention_heads": 4,
}  # fmt: skip
#: Architectures whose attention goes through the interface of transformers, by ``model_type``.
OURS = [
    "afmoe", "apertus", "arcee", "aria_text", "beam", "bitnet", "cohere", "cohere2", "cohere2_moe",
    "ctrl", "cwm", "deepseek_v2", "diffllama", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe",
    "flex_olmo", "flint", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt2",
    "gpt_bigcode", "gpt_neox", "gpt_oss", "granite", "granite_swa", "granitemoe", "granitemoe_swa",
    "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hyperclovax", "internlm3",
    "iquestcoder", "jais2", "jetmoe", "laguna", "llama", "llama4_text", "mellum", "mimo_v2_flash",
    "minicpm3", "minimax_m2", "ministral", "ministral3", "mistral", "mixtral", "nanochat",
    "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe",
    "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "solar_open", "stablelm",
    "starcoder2", "vaultgemma",
]  # fmt: skip
#: Architectures with attention of their own, which follow their own mask.
THEIRS = ["codegen", "gpt_neox_japanese", "gptj"]
#: Those whose gradients are compared, too.
DIFFERENTIATED = [
    "cohere2", "deepseek_v2", "gemma2", "gemma3_text", "gpt2", "gpt_oss", "llama", "llama4_text",
    "mistral", "mixtral", "olmo3", "qwen3", "smollm3", "vaultgemma",
]  # fmt: skip
#: The lengths of the documents of a row: shorter and longer than the windows and chunks.
DOCUMENTS = (1, 5, 13, 21)
CUTS = list(itertools.pairwise([0, *itertools.accumulate(DOCUMENTS)]))
POSITIONS_BL = torch.cat([torch.arange(each) for each in DOCUMENTS]).expand(2, -1)
TOKENS_BL = some_tokens(2, sum(DOCUMENTS))


def make(kind: str) -> PreTrainedModel:
    """Return a random model that can read packed rows."""
    made = CONFIG_MAPPING[kind]
    known = made().to_dict().keys() | made.attribute_map.keys()
    torch.manual_seed(0)
    config = made(**{name: size for name, size in SIZES.items() if name in known})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    isolate_documents(model)
    return model


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
    model = make(kind)
    assert model.config._attn_implementation.startswith("potstill") == (kind in OURS)
    packed = compute_hidden_states(model, TOKENS_BL, PackedRows.of(POSITIONS_BL))
    alone = compute_alone(model)
    assert float((packed - alone).abs().max()) <= 1e-5 * float(alone.abs().max())
    assert math.isclose(compute_loss(model, packed), compute_plain_loss(model), rel_tol=1e-5)


@pytest.mark.parametrize("kind", DIFFERENTIATED)
def test_gradients_are_those_of_documents_alone(kind: str) -> None:
    model = make(kind)
    trained = [each for each in model.parameters() if each.requires_grad]

    def differentiate(hidden_BLD: Tensor) -> list[Tensor]:
        found: Any = torch.autograd.grad(hidden_BLD.square().sum(), trained, allow_unused=True)
        return [each for each in found if each is not None]

    ours = differentiate(compute_hidden_states(model, TOKENS_BL, PackedRows.of(POSITIONS_BL)))
    theirs = differentiate(compute_alone(model))
    assert len(ours) == len(theirs)
    for mine, expected in zip(ours, theirs, strict=True):
        assert float((mine - expected).abs().max()) <= 1e-4 * float(expected.abs().max()) + 1e-5
