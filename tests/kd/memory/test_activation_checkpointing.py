"""Activation checkpointing: less is kept, and not a bit of the numbers changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kd.config.train import Checkpointing
from kd.errors import ModelError
from kd.memory.activation_checkpointing import checkpoint_activations, compute_group_sizes
from kd.models.layers import compute_hidden_states, find_decoder_layers
from kd.text.packed_rows import PackedRows

LAYERS = 7
SHAPE: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "attention_dropout": 0.3,
}


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SHAPE))


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=60, n_embd=16, n_layer=LAYERS, n_head=2, n_positions=64)
    )


def gemma3() -> PreTrainedModel:
    """Layers of two kinds, each with its own mask and rotary positions."""
    kinds = ["full_attention" if place % 3 == 2 else "sliding_attention" for place in range(LAYERS)]
    return Gemma3ForCausalLM(
        Gemma3TextConfig(**SHAPE, sliding_window=4, layer_types=kinds, pad_token_id=0)
    )


def qwen3() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE))


MODELS = {"llama": llama, "gpt2": gpt2, "gemma3": gemma3, "qwen3": qwen3}
WAYS: list[Checkpointing] = ["full", "sqrt", 2, 3]


def make(name: str, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return MODELS[name]().train()


def passes(model: PreTrainedModel) -> tuple[Tensor, dict[str, Tensor]]:
    """Hidden states of two packed rows, and every gradient."""
    tokens_BL = torch.arange(48).remainder(60).reshape(2, 24)
    positions_BL = torch.cat([torch.arange(15), torch.arange(9)]).expand(2, 24)
    torch.manual_seed(5)
    hidden_BLD = compute_hidden_states(model, tokens_BL, PackedRows.of(positions_BL))
    (hidden_BLD**3).sum().backward()
    gradients = {
        name: each.grad for name, each in model.named_parameters() if each.grad is not None
    }
    return hidden_BLD.detach(), gradients


def kept_by_layers(model: PreTrainedModel) -> int:
    """Numbers that autograd keeps of one forward pass, beside the inputs of checkpoints."""
    kept = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        compute_hidden_states(model, torch.arange(24)[None])
    return kept


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_every_number_stays_the_same_with_dropout_too(name: str, how: Checkpointing) -> None:
    plain = make(name)
    saving = make(name)
    checkpoint_activations(saving, how)
    hidden, gradients = passes(plain)
    torch.manual_seed(9)
    assert not torch.equal(hidden, passes(make(name, 1))[0]), "the comparison can fail"
    hidden_saved, gradients_saved = passes(saving)
    assert torch.equal(hidden_saved, hidden)
    assert gradients_saved.keys() == gradients.keys()
    for key, gradient in gradients.items():
        assert torch.equal(gradients_saved[key], gradient), key


def test_it_keeps_what_each_way_says() -> None:
    """Seven layers keep all of their activations, none, or those of the layers not recomputed."""
    kept = {}
    for how in ("none", *WAYS):
        model = make("llama")
        checkpoint_activations(model, how)
        kept[how] = kept_by_layers(model)
    layer = (kept["none"] - kept["full"]) / LAYERS
    assert layer > 1000
    assert kept["full"] - kept["sqrt"] == (7 - 3) * 24 * 16, (
        "the hidden states that enter a checkpoint"
    )
    assert (kept["none"] - kept[2]) == pytest.approx(4 * layer, rel=0.1)
    assert (kept["none"] - kept[3]) == pytest.approx(3 * layer, rel=0.1)


@pytest.mark.parametrize(("how", "most"), [("none", 0), ("full", 1), ("sqrt", 3), (3, 1)])
def test_layers_that_are_recomputed_at_once(how: Checkpointing, most: int) -> None:
    """The backward pass runs a layer again only within its own group, before its gradients."""
    model = make("llama")
    calls = []
    checkpoint_activations(model, how)
    for number, layer in enumerate(find_decoder_layers(model)):
        layer.mlp.register_forward_pre_hook(
            lambda module, inputs, number=number: calls.append(number)
        )
    passes(model)
    assert calls[:LAYERS] == list(range(LAYERS))
    again = calls[LAYERS:]
    assert (
        compute_group_sizes(LAYERS, how)
        == {"none": [], "full": [1] * 7, "sqrt": [3, 3, 1], 3: [1] * 3}[how]
    )
    assert (
        again
        == {"none": [], "full": [6, 5, 4, 3, 2, 1, 0], "sqrt": [6, 3, 4, 5, 0, 1, 2], 3: [6, 3, 0]}[
            how
        ]
    )
    assert max(compute_group_sizes(LAYERS, how), default=0) == most


@pytest.mark.parametrize("count", [1, 2, 3, 12, 24, 32, 61])
def test_about_square_root_many_groups(count: int) -> None:
    sizes = compute_group_sizes(count, "sqrt")
    assert sum(sizes) == count
    assert len(sizes) <= count**0.5 + 1
    assert max(sizes) <= count**0.5 + 1


@pytest.mark.parametrize("how", ["none", *WAYS])
def test_the_model_is_otherwise_untouched(how: Checkpointing) -> None:
    model = make("llama")
    names = [name for name, _ in model.named_parameters()]
    random = torch.get_rng_state()
    model.eval()
    plain = compute_hidden_states(model, torch.arange(24)[None])
    checkpoint_activations(model, how)
    assert not model.training
    assert [name for name, _ in model.named_parameters()] == names
    assert torch.equal(torch.get_rng_state(), random), "no random numbers were used up"
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(compute_hidden_states(model, torch.arange(24)[None]), plain)
    with torch.no_grad():
        assert torch.equal(
            compute_hidden_states(model.train().eval(), torch.arange(24)[None]), plain
        )


def test_a_copy_of_the_model_is_whole() -> None:
    """A moving average copies the student; the copy must compute with its own weights."""
    model = make("llama")
    checkpoint_activations(model, "sqrt")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(passes(twin)[0], passes(make("llama"))[0])


def test_a_pass_that_an_error_cut_short_leaves_nothing_behind() -> None:
    model = make("llama")
    expected = passes(make("llama"))
    checkpoint_activations(model, "sqrt")
    layer = find_decoder_layers(model)[3]

    def fail(module: nn.Module, inputs: Any) -> None:
        raise MemoryError

    handle = layer.register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        passes(model)
    handle.remove()
    hidden, gradients = passes(model)
    assert torch.equal(hidden, expected[0])
    assert all(torch.equal(gradients[name], each) for name, each in expected[1].items())


def test_frozen_embeddings_do_not_stop_the_gradients() -> None:
    """Then nothing that enters the first layer needs a gradient, as with adapters."""
    plain = make("llama")
    saving = make("llama")
    for model in (plain, saving):
        model.get_input_embeddings().requires_grad_(False)
    checkpoint_activations(saving, "sqrt")
    gradients = passes(plain)[1]
    gradients_saved = passes(saving)[1]
    assert gradients.keys() == gradients_saved.keys()
    assert all(torch.equal(gradients_saved[name], each) for name, each in gradients.items())


# ---------------------------------------------------------------------- refused


class Meddling(LlamaForCausalLM):
    """Between two layers its body looks at the hidden states and changes them."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        layer = self.model.layers[3]
        layer.register_forward_hook(lambda module, inputs, output: output * 2)


class Unable(LlamaForCausalLM):
    supports_gradient_checkpointing = False


def layer_drop() -> PreTrainedModel:
    return OPTForCausalLM(
        OPTConfig(
            vocab_size=60,
            hidden_size=16,
            ffn_dim=24,
            num_hidden_layers=4,
            num_attention_heads=2,
            layerdrop=0.5,
            word_embed_proj_dim=16,
        )
    )


@pytest.mark.parametrize(
    ("build", "how", "why"),
    [
        (lambda: Unable(LlamaConfig(**SHAPE)), "full", "Unable, does not support it"),
        (lambda: Meddling(LlamaConfig(**SHAPE)), "sqrt", "computes something else with it"),
        (layer_drop, "sqrt", "drops layers at random"),
    ],
)
def test_a_model_that_cannot_is_refused_with_both_fields_named(
    build: Callable[[], PreTrainedModel], how: Checkpointing, why: str
) -> None:
    torch.manual_seed(0)
    model = build()
    before = compute_hidden_states(model.eval(), torch.arange(24)[None])
    with pytest.raises(ModelError, match=why) as caught:
        checkpoint_activations(model, how)
    assert f"train.gradient_checkpointing is {how}, but student.model" in str(caught.value)
    assert not any("forward" in layer.__dict__ for layer in find_decoder_layers(model)), (
        "it is as it was"
    )
    assert torch.equal(compute_hidden_states(model, torch.arange(24)[None]), before)


def test_a_group_of_one_layer_leaves_room_for_what_happens_between_layers() -> None:
    torch.manual_seed(0)
    plain = Meddling(LlamaConfig(**SHAPE)).train()
    torch.manual_seed(0)
    saving = Meddling(LlamaConfig(**SHAPE)).train()
    checkpoint_activations(saving, "full")
    assert torch.equal(passes(saving)[0], passes(plain)[0])
