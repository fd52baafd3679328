"""The attention that keeps documents apart is chosen by what a model computes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from kd.errors import ModelError
from kd.models.attention import kernels
from kd.models.attention.interface import use_packed_attention
from kd.models.attention.isolation import (
    _computes_as_alone,
    _make_trials,
    explain_own_rows,
    isolate_documents,
    make_small,
    precheck_isolation,
    warn_of_mask,
)
from kd.models.layers import compute_hidden_states
from kd.models.lm_head import find_lm_head, precheck_lm_head
from kd.progress import SILENT, Monitor
from kd.text.packed_rows import PackedRows
from tests.support.kd.zoo import LEAKS, LLAMA, PACKS, build
from tests.support.packed_zoo import OWN_ROWS, SHARING, make_random

pytestmark = pytest.mark.usefixtures("one_thread")


class ReadsAhead(nn.Module):
    """Adds a share of the embedding of the token before, also of another document's token."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, tokens_BL: Tensor) -> Tensor:
        found: Tensor = self.embedding(tokens_BL) + 0.1 * self.embedding(tokens_BL.roll(1, dims=1))
        return found


class ReadsFarAhead(nn.Module):
    """Adds a share of the embedding of the token ``distance`` before, whatever its document."""

    def __init__(self, embedding: nn.Embedding, distance: int) -> None:
        super().__init__()
        self.embedding = embedding
        self.distance = distance

    def forward(self, tokens_BL: Tensor) -> Tensor:
        found: Tensor = self.embedding(tokens_BL)
        earlier_BLD = functional.pad(found, (0, 0, self.distance, 0))[:, : found.shape[1]]
        return found + 0.1 * earlier_BLD


class WindowInTensor(LlamaForCausalLM):
    """A model whose layers narrow their mask to a window of 16 tokens, if it is a tensor."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            whole = layer.forward

            def forward(
                hidden_BLD: Tensor, attention_mask: Any, whole: Any = whole, **more: Any
            ) -> Any:
                return whole(hidden_BLD, attention_mask=narrow(hidden_BLD, attention_mask), **more)

            layer.forward = forward


def narrow(hidden_BLD: Tensor, mask: Any) -> Any:
    """Return ``mask`` with a window of 16 tokens; bounds of documents stay as they are."""
    if mask is not None and not isinstance(mask, Tensor):
        return mask
    place_L = torch.arange(hidden_BLD.shape[1])
    distance_LL = place_L[:, None] - place_L
    window_LL = (distance_LL >= 0) & (distance_LL < 16)
    return window_LL[None, None] if mask is None else mask & window_LL


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


def test_a_model_that_cannot_compute_is_refused_by_name() -> None:
    model = LlamaForCausalLM(LlamaConfig(**LLAMA)).eval()
    model.model.layers[0].self_attn.o_proj = torch.nn.Linear(7, 7)
    with pytest.raises(ModelError, match="LlamaForCausalLM cannot read a text of 8") as caught:
        isolate_documents(model)
    assert "shapes cannot be multiplied" in caught.value.detail
    assert caught.value.remedy == "Check the sizes in its config.json."


def test_sizes_that_only_our_attention_accepts_are_refused_by_name() -> None:
    """Half as many key heads as transformers' own code makes of the latent vectors."""
    model = make_random("glm4_moe_lite", num_key_value_heads=2)
    with pytest.raises(ModelError, match="Glm4MoeLiteForCausalLM cannot read a text of 8 tokens"):
        isolate_documents(model)


@pytest.mark.parametrize("kind", [*SHARING, *OWN_ROWS])
def test_whether_documents_share_rows_shows_before_weights_are_read(kind: str) -> None:
    with torch.device("meta"):
        hollow = make_random(kind)
    why = explain_own_rows(hollow)
    assert (why is None) == (kind in SHARING)
    if why is not None:
        assert why.detail.startswith(type(hollow).__name__)


def test_a_model_too_large_to_try_has_rows_by_the_kind_of_its_layers() -> None:
    for kind, expected in (("qwen3_next", False), ("llama", True)):
        with torch.device("meta"):
            hollow = make_random(kind, hidden_size=2**23)
        assert make_small(hollow) is None
        assert (explain_own_rows(hollow) is None) == expected


def test_wide_mlps_are_tried_narrow() -> None:
    with torch.device("meta"):
        hollow = make_random("mixtral", intermediate_size=2**24)
    small = make_small(hollow)
    assert small is not None
    assert small.num_parameters() < 2**20
    assert explain_own_rows(hollow) is None


@pytest.mark.parametrize("distance", [16, 100])
@torch.no_grad()
def test_a_leak_from_far_back_is_found(distance: int) -> None:
    """Documents of four tokens do not show it. Fields of the configuration name long distances."""
    config = LlamaConfig(**LLAMA | {"max_position_embeddings": 512, "memory_window": distance})
    model = LlamaForCausalLM(config).eval()
    model.model.embed_tokens = ReadsFarAhead(model.model.embed_tokens, distance)  # type: ignore[assignment]
    short, long = _make_trials(model)
    assert _computes_as_alone(model, short)
    assert long.first > distance
    with pytest.raises(ModelError, match="LlamaForCausalLM attends across the documents"):
        isolate_documents(model)


@torch.no_grad()
def test_a_model_whose_long_window_needs_its_mask_keeps_it() -> None:
    torch.manual_seed(0)
    model = WindowInTensor(LlamaConfig(**LLAMA)).eval()
    short, _ = _make_trials(model)
    assert use_packed_attention(model)
    assert _computes_as_alone(model, short)
    isolate_documents(model)
    assert model.config._attn_implementation == "sdpa"


def test_documents_that_are_tried_fit_the_context_and_a_bound() -> None:
    for context, window, expected in ((64, 4096, 30), (512, 4096, 32), (2048, 128, 130)):
        changes = {"max_position_embeddings": context, "sliding_window": window}
        model = MistralForCausalLM(MistralConfig(**LLAMA | changes))
        _, long = _make_trials(model)
        assert len(long.tokens_L) <= context
        assert len(long.tokens_L) - long.first == expected


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


@pytest.mark.parametrize("kind", PACKS)
def test_a_model_is_judged_by_its_shape_as_by_its_weights(kind: str) -> None:
    with torch.device("meta"):
        hollow = build(kind)
    told: list[str] = []
    before = torch.random.get_rng_state()
    small = make_small(hollow)
    assert small is not None
    # As before a capture: the same model is checked for its logits first.
    precheck_lm_head(small)
    precheck_isolation(small, 16384, Monitor(lambda event: told.append(event.data["message"])))
    assert torch.equal(torch.random.get_rng_state(), before)
    whole = build(kind)
    isolate_documents(whole)
    assert bool(told) != whole.config._attn_implementation.startswith("potstill")


@pytest.mark.parametrize("kind", sorted(LEAKS))
def test_a_leak_is_seen_without_the_weights(kind: str) -> None:
    with torch.device("meta"):
        hollow = build(kind)
    small = make_small(hollow)
    assert small is not None
    with pytest.raises(ModelError, match="attends across the documents"):
        precheck_isolation(small, 64, SILENT)


def test_models_are_examined_without_tf32_and_trained_as_before() -> None:
    """TF32 rounds to 10 bits: in a deep mixture of experts that looks like a leak."""
    found: list[str] = []
    model = build("mixtral")
    # Of the trunk: isolation reads its hidden states, and never the model's logits.
    model.model.register_forward_hook(lambda *_: found.append(torch.get_float32_matmul_precision()))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        for examine in (isolate_documents, partial(find_lm_head, vocabulary=8)):
            found.clear()
            examine(model)
            assert set(found) == {"highest"}
            assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def isolate_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    kernel: Callable[..., Tensor],
    dtype: torch.dtype | None = torch.bfloat16,
) -> tuple[str, list[str]]:
    """Isolate a float32 model as on a GPU that computes in ``dtype``, in bfloat16 with ``kernel``.

    Returns the attention that the model has then, and what the monitor was told. Flex attention,
    which that GPU takes for float32, must not run: it would be compiled for nothing.
    """

    def choose(traits: kernels.AttentionTraits) -> kernels.Kernel:
        return "varlen" if traits.dtype == torch.bfloat16 else "flex"

    monkeypatch.setattr(kernels, "choose_kernel", choose)
    monkeypatch.setattr(kernels, "flex_attention_forward", None)
    monkeypatch.setattr(kernels, "run_varlen", kernel)
    told: list[str] = []
    model = build("llama tied")
    monitor = Monitor(lambda event: told.append(event.data["message"]))
    isolate_documents(model, dtype, monitor)
    name: str = model.config._attn_implementation
    return name, told


def attend_in_spans(*arguments: Any) -> Tensor:
    return kernels._run_spans(*arguments, None, False)


def test_a_student_is_tried_with_the_kernel_that_it_trains_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used = []

    def run(q: Tensor, *rest: Any) -> Tensor:
        used.append(q.dtype)
        return attend_in_spans(q, *rest)

    assert isolate_on_a_gpu(monkeypatch, run) == ("potstill", [])
    assert set(used) == {torch.bfloat16}


def test_a_kernel_that_cannot_run_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any) -> Tensor:
        raise RuntimeError("no such kernel")

    name, told = isolate_on_a_gpu(monkeypatch, run)
    assert name == "sdpa"
    (message,) = told
    assert "varlen attention failed: RuntimeError: no such kernel" in message


@pytest.mark.parametrize("dtype", [None, torch.float32], ids=str)
def test_flex_attention_that_fails_in_float32_is_told(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype | None
) -> None:
    """An evaluation, a capture and train.precision fp32 compute in the precision of the weights."""
    name, told = isolate_on_a_gpu(monkeypatch, attend_in_spans, dtype)
    assert name == "sdpa"
    (message,) = told
    assert "flex attention failed: " in message and "more time and memory" in message


def test_a_kernel_that_sees_other_documents_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return found.transpose(1, 2)

    name, told = isolate_on_a_gpu(monkeypatch, run)
    assert name == "sdpa"
    (message,) = told
    assert "varlen attention differs from torch's by" in message
