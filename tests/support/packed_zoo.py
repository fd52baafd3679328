"""Random models of many architectures that read packed rows, and such rows."""

from __future__ import annotations

import itertools

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kd.models.attention.isolation import isolate_documents
from tests.support.kd.zoo import ROWS, some_tokens

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
#: The lengths of the documents of a row: shorter and longer than the windows and chunks.
DOCUMENTS = (1, 5, 13, 21)
CUTS = list(itertools.pairwise([0, *itertools.accumulate(DOCUMENTS)]))
POSITIONS_BL = torch.cat([torch.arange(each) for each in DOCUMENTS]).expand(2, -1)
TOKENS_BL = some_tokens(2, sum(DOCUMENTS))


def make_packed(kind: str) -> PreTrainedModel:
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
