"""Random models of many architectures that read packed rows, and such rows."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kd.models.attention.isolation import isolate_documents
from tests.support.kd.zoo import ROWS, some_tokens

#: Architectures whose values are narrower than their keys.
LATENT = [
    "axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3", "youtu",
]  # fmt: skip
#: The sizes of every model: each takes those that its configuration knows. Those that differ in
#: real models differ here: heads are wider together than the hidden states, and fewer for keys.
SIZES = {
    "vocab_size": ROWS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 6,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "partial_rotary_factor": 0.5, "rotary_dim": 4, "attention_chunk_size": 8,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 12, "kv_lora_rank": 10,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6,
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 40,
    "ffn_dim": 40, "word_embed_proj_dim": 24, "num_layers": 2, "attention_heads": 4,
}  # fmt: skip
#: Sizes of queries and keys that are projected from few numbers: one value head for each query.
_LATENT = {"head_dim": 4, "num_key_value_heads": 4}
#: Sizes of some architectures alone, by ``model_type``. A head of Helium has no width of its own.
#: The layers of Gemma 4 have heads of two widths, and different numbers of them.
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(LATENT, _LATENT),
    "doge": {"head_dim": 8},
    "helium": {"head_dim": 8},
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 24,
        "num_global_key_value_heads": 1, "attention_k_eq_v": True,
        "vocab_size_per_layer_input": ROWS, "hidden_size_per_layer_input": 4,
    },
}  # fmt: skip
#: Architectures whose attention goes through the interface of transformers, by ``model_type``.
OURS = [
    "afmoe", "apertus", "arcee", "aria_text", "axk1", "beam", "bitnet", "cohere", "cohere2",
    "cohere2_moe", "ctrl", "cwm", "deepseek_v2", "deepseek_v3", "diffllama", "ernie4_5",
    "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo", "flint", "gemma", "gemma2", "gemma3_text",
    "gemma4_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt2", "gpt_bigcode", "gpt_neox",
    "gpt_oss", "granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared",
    "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hyperclovax", "internlm3", "iquestcoder",
    "jais2", "jetmoe", "laguna", "llama", "llama4_text", "longcat_flash", "mellum", "mimo_v2_flash",
    "minicpm3", "minimax_m2", "ministral", "ministral3", "mistral", "mixtral", "nanochat",
    "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe",
    "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "solar_open", "stablelm",
    "starcoder2", "vaultgemma", "youtu",
]  # fmt: skip
#: Architectures with attention of their own, which follow their own mask.
THEIRS = ["codegen", "doge", "gpt_neox_japanese", "gptj"]
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8}
#: Architectures whose documents cannot share a row, with their own sizes: a state runs on through
#: it (layers of one kind or of two), or positions are counted from the row's beginning.
OWN_ROWS: dict[str, dict[str, Any]] = {
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "bloom": {},
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 64},
    "granitemoehybrid": _MAMBA | {
        "layer_types": ["mamba", "attention"], "shared_intermediate_size": 16
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4,
              "mamba_dt_rank": 4, "use_mamba_kernels": False},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "mamba": {"state_size": 4},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2},
    "nemotron_h": {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4,
                   "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 8},
    "qwen3_5_text": _DELTA,
    "qwen3_next": _DELTA,
    "rwkv": {"attention_hidden_size": 32, "context_length": 64},
    "xlnet": {"d_model": 32, "d_head": 8, "d_inner": 48},
}  # fmt: skip
#: Some whose documents can.
SHARING = ["deepseek_v3", "gemma4_text", "gpt_oss", "llama", "mixtral"]
#: The lengths of the documents of a row: shorter and longer than the windows and chunks.
DOCUMENTS = (1, 5, 13, 21)
CUTS = list(itertools.pairwise([0, *itertools.accumulate(DOCUMENTS)]))
POSITIONS_BL = torch.cat([torch.arange(each) for each in DOCUMENTS]).expand(2, -1)
TOKENS_BL = some_tokens(2, sum(DOCUMENTS))


def make_random(kind: str, **changes: Any) -> PreTrainedModel:
    """Return a random model of any architecture, with these ``changes`` to its sizes."""
    made = CONFIG_MAPPING[kind]
    known = made().to_dict().keys() | made.attribute_map.keys()
    sizes = {name: size for name, size in SIZES.items() if name in known}
    config = made(**sizes | OWN.get(kind, {}) | OWN_ROWS.get(kind, {}) | changes)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    return model


def make_packed(kind: str) -> PreTrainedModel:
    """Return a random model that can read packed rows."""
    model = make_plain(kind)
    isolate_documents(model)
    return model


def make_plain(kind: str, **sizes: int) -> PreTrainedModel:
    """Return a random model as the library makes it; of ``sizes`` it takes those that it knows."""
    made = CONFIG_MAPPING[kind]
    known = made().to_dict().keys() | made.attribute_map.keys()
    torch.manual_seed(0)
    model = make_random(kind, **{name: size for name, size in sizes.items() if name in known})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model
