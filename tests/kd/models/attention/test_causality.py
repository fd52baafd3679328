"""A model that looks ahead is refused by what it computes, whatever its configuration calls it."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kd.errors import ModelError
from kd.models.attention.causality import LENGTHS, precheck_causality, require_causal
from kd.models.attention.isolation import isolate_documents, make_small
from tests.support.kd.zoo import DECODERS, FOUR, GPT, LLAMA, OPT, ROWS, WINDOWS, ZOO, build

pytestmark = pytest.mark.usefixtures("one_thread")

NOT_CAUSAL = LLAMA | {"is_causal": False}
ALL_WAYS = FOUR | WINDOWS | {"use_bidirectional_attention": True}
XLNET = {"vocab_size": ROWS, "d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 48}
SEERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", NOT_CAUSAL),
    "mistral, a window": ("MistralConfig", NOT_CAUSAL | {"sliding_window": 8}),
    "qwen3": ("Qwen3Config", NOT_CAUSAL | {"head_dim": 16}),
    "phi3": ("Phi3Config", NOT_CAUSAL),
    "gpt-neox": ("GPTNeoXConfig", NOT_CAUSAL),
    "opt": ("OPTConfig", OPT | {"is_causal": False}),
    "gptj": ("GPTJConfig", GPT | {"rotary_dim": 8, "is_causal": False}),
    "gemma": ("GemmaConfig", FOUR | {"use_bidirectional_attention": True}),
    "gemma3": ("Gemma3TextConfig", ALL_WAYS),
    "bert": ("BertConfig", LLAMA),
    "roberta": ("RobertaConfig", LLAMA),
    "xlnet": ("XLNetConfig", XLNET),
}


def make(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config_class, shape = SEERS[kind]
    return AutoModelForCausalLM.from_config(getattr(transformers, config_class)(**shape)).eval()


class Seeing(nn.Module):
    """Adds a share of the embedding ``distance`` tokens later, in texts of more than ``least``."""

    def __init__(self, embedding: nn.Embedding, distance: int, least: int) -> None:
        super().__init__()
        self.embedding, self.distance, self.least = embedding, distance, least

    def forward(self, tokens_BL: Tensor) -> Tensor:
        found: Tensor = self.embedding(tokens_BL)
        if tokens_BL.shape[1] <= self.least:
            return found
        return found + 0.1 * functional.pad(found, (0, 0, 0, self.distance))[:, self.distance :]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", SEERS)
def test_a_model_that_looks_ahead_is_refused(kind: str, dtype: torch.dtype) -> None:
    model = make(kind).to(dtype).train()
    with pytest.raises(ModelError, match=f"{type(model).__name__} looks ahead") as caught:
        require_causal(model, 64)
    assert "is_causal" in caught.value.remedy
    assert model.training


@pytest.mark.parametrize("distance, least", [(1, 0), (5, 0), (1, 700)])
def test_a_few_tokens_ahead_and_long_texts_alone_are_found(distance: int, least: int) -> None:
    model = LlamaForCausalLM(LlamaConfig(**LLAMA | {"max_position_embeddings": 1024})).eval()
    require_causal(model, max(LENGTHS))
    model.model.embed_tokens = Seeing(model.model.embed_tokens, distance, least)  # type: ignore[assignment]
    with pytest.raises(ModelError, match="looks ahead"):
        require_causal(model, max(LENGTHS))


@pytest.mark.parametrize("kind", sorted(ZOO | DECODERS))
def test_causal_models_are_accepted_also_when_documents_are_kept_apart(kind: str) -> None:
    """The rounding of experts, which depends on how many tokens they get, is no look ahead."""
    model = build(kind)
    require_causal(model, 64)
    if kind == "llama tied":
        isolate_documents(model)
        require_causal(model, 64)
    if kind in ("mixtral", "granite moe", "gpt-oss"):
        require_causal(model.to(torch.bfloat16), 64)


def test_a_model_that_looks_ahead_is_seen_without_its_weights() -> None:
    with torch.device("meta"):
        hollow = make("qwen3")
    small = make_small(hollow)
    assert small is not None
    with pytest.raises(ModelError, match="Qwen3ForCausalLM looks ahead"):
        precheck_causality(small, 64)
    small.lm_head = small.model.layers[0].mlp.down_proj = nn.Linear(7, 7)
    precheck_causality(small, 64)
