"""The attention that keeps documents apart is chosen by what a model computes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from kd.errors import ModelError
from kd.models.attention.isolation import isolate_documents, warn_of_mask
from kd.models.layers import compute_hidden_states
from kd.progress import Monitor
from kd.text.packed_rows import PackedRows
from tests.support.kd.zoo import LEAKS, LLAMA, build

pytestmark = pytest.mark.usefixtures("one_thread")


class ReadsAhead(nn.Module):
    """Adds a share of the embedding of the token before, also of another document's token."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, tokens_BL: Tensor) -> Tensor:
        found: Tensor = self.embedding(tokens_BL) + 0.1 * self.embedding(tokens_BL.roll(1, dims=1))
        return found


class Forgetful(LlamaForCausalLM):
    """A model whose body ignores position ids."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        whole = self.model.forward
        self.model.forward = lambda position_ids=None, **kwargs: whole(**kwargs)


class Particular(LlamaForCausalLM):
    """A model whose body does with its mask what only a tensor can."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            whole = layer.forward

            def forward(*args: Any, attention_mask: Tensor, whole: Any = whole, **more: Any) -> Any:
                return whole(*args, attention_mask=attention_mask[:, :, :, :], **more)

            layer.forward = forward


@pytest.mark.parametrize("kind", sorted(LEAKS))
def test_a_model_that_lets_documents_see_each_other_is_refused(kind: str) -> None:
    model = build(kind).train()
    own = model.config._attn_implementation
    with pytest.raises(ModelError, match="attends across the documents") as caught:
        isolate_documents(model)
    assert "data.packing" in caught.value.remedy
    assert model.config._attn_implementation == own
    assert model.training


def test_a_leak_outside_the_attention_is_found() -> None:
    model = LlamaForCausalLM(LlamaConfig(**LLAMA)).eval()
    model.model.embed_tokens = ReadsAhead(model.model.embed_tokens)  # type: ignore[assignment]
    with pytest.raises(ModelError, match="LlamaForCausalLM attends across the documents"):
        isolate_documents(model)


def test_relative_positions_need_no_position_ids() -> None:
    model = Forgetful(LlamaConfig(**LLAMA)).eval()
    isolate_documents(model)
    assert model.config._attn_implementation == "potstill"


def test_a_second_isolation_changes_nothing() -> None:
    """A forecast and a training may isolate the documents of one student after each other."""
    model = build("llama tied")
    isolate_documents(model)
    isolate_documents(model)
    assert model.config._attn_implementation == "potstill"


def test_a_model_that_needs_its_mask_keeps_it() -> None:
    torch.manual_seed(0)
    model = Particular(LlamaConfig(**LLAMA)).eval()
    isolate_documents(model)
    assert model.config._attn_implementation == "sdpa"
    tokens = torch.tensor([[3, 4, 5, 6, 7]])
    packed = compute_hidden_states(model, tokens, PackedRows.of(torch.tensor([[0, 1, 0, 1, 2]])))
    alone = compute_hidden_states(LlamaForCausalLM(model.config), tokens[:, 2:])
    assert packed.shape[1] == alone.shape[1] + 2


def test_a_large_mask_is_told_before_the_run() -> None:
    told: list[str] = []
    monitor = Monitor(lambda event: told.append(event.data["message"]))
    for kind in ("gptj bias", "llama tied"):
        model = build(kind)
        isolate_documents(model)
        for length in (4096, 16_384):
            warn_of_mask(model, length, monitor)
    (message,) = told
    assert message.startswith("GPTJForCausalLM computes its attention by its own code")
    assert "256 MiB for each packed sequence of 16384 tokens" in message
    assert "data.sequence_length" in message
    assert "data.packing" in message


def test_16_bit_models_use_it_too() -> None:
    for kind in ("llama tied", "gemma2 windows", "gpt-oss"):
        model = build(kind).to(torch.bfloat16)
        isolate_documents(model)
        assert model.config._attn_implementation.startswith("potstill")
