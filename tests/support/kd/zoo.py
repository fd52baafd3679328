"""Tiny models of many architectures with random weights, and a writer of GGUF files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

#: Token ids in use. Fewer than ROWS: each LM head is padded.
VOCABULARY = 90
#: Rows of each embedding and LM head.
ROWS = 96
#: As in real models, its heads are wider together than the hidden states, and fewer for keys.
LLAMA = {
    "vocab_size": ROWS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT = {
    "vocab_size": ROWS, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
OPT = {
    "vocab_size": ROWS, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 64, "word_embed_proj_dim": 32,
}  # fmt: skip
MAMBA = {"vocab_size": ROWS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
BLOOM = {"vocab_size": ROWS, "hidden_size": 32, "n_layer": 2, "n_head": 2}
FALCON_H1 = LLAMA | {
    "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8,
    "mamba_n_groups": 1,
}  # fmt: skip
ZOO: dict[str, tuple[str, dict[str, Any]]] = {
    "llama tied": ("LlamaConfig", LLAMA | {"tie_word_embeddings": True}),
    "llama untied": ("LlamaConfig", LLAMA | {"tie_word_embeddings": False}),
    "gpt2": ("GPT2Config", GPT),
    "gemma2 soft cap": ("Gemma2Config", LLAMA),
    "gemma2 low cap": ("Gemma2Config", LLAMA | {"final_logit_softcapping": 2.0}),
    "gemma2 no cap": ("Gemma2Config", LLAMA | {"final_logit_softcapping": None}),
    "gemma3": ("Gemma3TextConfig", LLAMA | {"final_logit_softcapping": 20.0}),
    "cohere scale": ("CohereConfig", LLAMA | {"logit_scale": 0.0625}),
    "cohere2 scale": ("Cohere2Config", LLAMA | {"logit_scale": 4.0}),
    "granite scaling": ("GraniteConfig", LLAMA | {"logits_scaling": 8.0}),
    "phi bias": ("PhiConfig", LLAMA),
    "gptj bias": ("GPTJConfig", GPT | {"rotary_dim": 8}),
    "qwen2": ("Qwen2Config", LLAMA),
    "qwen3": ("Qwen3Config", LLAMA),
    "gpt-neox": ("GPTNeoXConfig", LLAMA),
    "mistral": ("MistralConfig", LLAMA),
    "mixtral": ("MixtralConfig", LLAMA | {"num_local_experts": 4}),
    "falcon-h1": ("FalconH1Config", FALCON_H1),
    "opt": ("OPTConfig", OPT),
    "bloom": ("BloomConfig", BLOOM),
    "mamba": ("MambaConfig", MAMBA),
}
#: More decoders, with layers of several kinds, for tests that take layers out. Four layers each.
FOUR = LLAMA | {"num_hidden_layers": 4}
#: Heads of models whose code takes their width from that of the hidden states.
NARROW = {"head_dim": 8}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 4}
EXPERTS = FOUR | {"num_experts_per_tok": 2, "moe_intermediate_size": 12}
DEEPSEEK = {name: size for name, size in EXPERTS.items() if name != "head_dim"} | {
    "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 2, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip
LLAMA4 = EXPERTS | {
    "num_local_experts": 4, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 40,
    "attention_chunk_size": 8, "no_rope_layers": [1, 1, 0, 1],
}  # fmt: skip
GEMMA4 = FOUR | WINDOWS | {
    "global_head_dim": 24, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    "vocab_size_per_layer_input": ROWS, "hidden_size_per_layer_input": 4,
}  # fmt: skip
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("GemmaConfig", FOUR),
    "gemma2 windows": ("Gemma2Config", FOUR | WINDOWS),
    "gemma3 windows": ("Gemma3TextConfig", FOUR | WINDOWS),
    "gemma4": ("Gemma4TextConfig", GEMMA4),
    "phi3": ("Phi3Config", FOUR),
    "olmo2": ("Olmo2Config", FOUR),
    "olmo3": ("Olmo3Config", FOUR | WINDOWS),
    "granite deep": ("GraniteConfig", FOUR | {"residual_multiplier": 0.5}),
    "smollm3": ("SmolLM3Config", FOUR | {"no_rope_layers": [1, 0, 1, 1]}),
    "stablelm": ("StableLmConfig", FOUR | NARROW),
    "cohere": ("CohereConfig", FOUR),
    "cohere2 windows": ("Cohere2Config", FOUR | WINDOWS),
    "mixtral deep": ("MixtralConfig", FOUR | {"num_local_experts": 4}),
    "qwen2 moe": ("Qwen2MoeConfig", EXPERTS | {"num_experts": 4, "decoder_sparse_step": 2}),
    "qwen3 moe": ("Qwen3MoeConfig", EXPERTS | {"num_experts": 4, "mlp_only_layers": [0, 2]}),
    "olmoe": ("OlmoeConfig", EXPERTS | NARROW | {"num_experts": 4}),
    "granite moe": ("GraniteMoeConfig", FOUR | {"num_local_experts": 4}),
    "gpt-oss": ("GptOssConfig", EXPERTS | WINDOWS | {"num_local_experts": 4}),
    "deepseek": ("DeepseekV3Config", DEEPSEEK),
    "llama4": ("Llama4TextConfig", LLAMA4),
    "gpt2 deep": ("GPT2Config", GPT | {"n_layer": 4}),
    "gpt-neox deep": ("GPTNeoXConfig", FOUR),
}
#: Models that ignore position_ids, which keep packed documents apart: here documents leak.
LEAKS = {"bloom", "mamba", "falcon-h1"}
#: Models that can pack several documents into a sequence.
PACKS = sorted(ZOO.keys() - LEAKS)
#: Models with operations that have no float64 on a CPU.
SINGLE = {"mixtral", "mamba", "falcon-h1"}


def some_tokens(rows: int = 2, length: int = 12) -> torch.Tensor:
    """Return random token ids (B, L) of ``VOCABULARY``, without special tokens."""
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))


def build(name: str, **changes: Any) -> PreTrainedModel:
    """Return the model with random weights; biases and the scales of norms are random too."""
    config_class, shape = (ZOO | DECODERS)[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        getattr(transformers, config_class)(**(shape | changes))
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


def write_gguf(
    model: LlamaForCausalLM,
    tokenizer: Any,
    path: Path,
    dtype: type[np.floating],
    left_out: str = "",
) -> None:
    """Write the model as llama.cpp does, without the tensor ``left_out``.

    Names and metadata are llama.cpp's; the rows of q and k are in its rotary order.
    """
    gguf = pytest.importorskip("gguf")
    config = model.config
    state = model.state_dict()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(config.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    content = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges([" ".join(pair) for pair in content["merges"]])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_bos_token_id(tokenizer.eos_token_id)
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    parts = {
        "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    for layer in range(config.num_hidden_layers):
        names |= {
            f"blk.{layer}.{short}": f"model.layers.{layer}.{long}" for short, long in parts.items()
        }
    names.pop(left_out, None)
    for short, long in names.items():
        tensor = state[f"{long}.weight"].numpy()
        if "attn_q" in short or "attn_k" in short:
            heads = tensor.reshape(-1, 2, config.head_dim // 2, tensor.shape[1])
            tensor = heads.swapaxes(1, 2).reshape(tensor.shape)
        writer.add_tensor(
            f"{short}.weight", tensor.astype(np.float32 if tensor.ndim == 1 else dtype)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
