"""The LM head of many architectures, real but tiny: our logits equal the model's own."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedModel,
)

from kd.errors import ModelError, TokenizerMismatch
from kd.models.attention.isolation import isolate_documents, make_small
from kd.models.layers import compute_hidden_states
from kd.models.lm_head import BLOCK_TOKENS, LMHead, find_lm_head, precheck_lm_head
from tests.support.kd.zoo import (
    FALCON_H1,
    LLAMA,
    ROWS,
    SINGLE,
    VOCABULARY,
    ZOO,
    build,
    some_tokens,
)

pytestmark = pytest.mark.usefixtures("one_thread")


PRECISIONS = [(name, torch.float32, 1e-5) for name in ZOO]
PRECISIONS += [(name, torch.float64, 1e-11) for name in ZOO if name not in SINGLE]


@pytest.mark.parametrize("name, dtype, tolerance", PRECISIONS)
@torch.no_grad()
def test_our_logits_are_the_models_own(name, dtype, tolerance):
    model = build(name).to(dtype)
    head = find_lm_head(model, VOCABULARY)
    theirs = model(input_ids=some_tokens(), use_cache=False).logits
    assert theirs.shape[-1] == ROWS
    ours = head.compute_logits(compute_hidden_states(model, some_tokens()).flatten(0, 1)).unflatten(
        0, (2, 12)
    )
    assert ours.dtype == dtype and ours.shape == (2, 12, VOCABULARY)
    assert theirs[..., :VOCABULARY].std() > 0.01
    torch.testing.assert_close(ours, theirs[..., :VOCABULARY], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("vocabulary", [1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 3 * BLOCK_TOKENS - 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_logits_without_a_gradient_are_those_with_one(vocabulary, dtype):
    """Without a gradient, logits are computed one block of the vocabulary at a time, in given
    memory (here a slice of a larger tensor) or in new memory.
    """
    generator = torch.Generator().manual_seed(vocabulary)
    hidden, weight = (
        torch.randn(rows, 24, generator=generator).to(dtype) for rows in (7, vocabulary + 3)
    )
    head = LMHead(weight, None, 1.0, None, vocabulary)
    expected = head.multiply(hidden.requires_grad_())
    assert expected.requires_grad and expected.shape == (7, vocabulary)
    around = torch.full((7, vocabulary + 2), 99.0, dtype=dtype)
    with torch.no_grad():
        given = head.multiply(hidden, around[:, 1:-1])
        for found in (given, head.multiply(hidden)):
            torch.testing.assert_close(
                found, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
            )
    assert given.data_ptr() == around[:, 1:-1].data_ptr()
    assert bool((around[:, [0, -1]] == 99.0).all())


def test_what_a_config_declares_is_in_the_head():
    assert find_lm_head(build("gemma2 low cap"), VOCABULARY).softcap == 2.0
    assert find_lm_head(build("cohere scale"), VOCABULARY).scale == 0.0625
    assert find_lm_head(build("granite scaling"), VOCABULARY).scale == 0.125
    assert find_lm_head(build("phi bias"), VOCABULARY).bias.shape == (ROWS,)
    tied = build("llama tied")
    assert find_lm_head(tied, VOCABULARY).weight is tied.get_input_embeddings().weight


#: Models with multipliers and caps of their own names, their fields, and what these are.
RECURRENT_GEMMA = {
    "vocab_size": ROWS, "hidden_size": 32, "lru_width": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "block_types": ["recurrent", "attention"],
}  # fmt: skip
LOW_RANKS = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}  # fmt: skip
XLSTM = {"vocab_size": ROWS, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2}
SEEN: dict[str, tuple[str, dict[str, Any], float, float | None]] = {
    "multiplied": (
        "FalconH1Config", FALCON_H1 | {"lm_head_multiplier": 0.0390625}, 0.0390625, None
    ),
    "not divided": ("HyperCLOVAXConfig", LLAMA | {"logits_scaling": 0.3}, 0.3, None),
    "divided": ("GraniteMoeConfig", LLAMA | {"logits_scaling": 6.0}, 1.0 / 6.0, None),
    "before the layer": (
        "MiniCPM3Config", LLAMA | LOW_RANKS | {"dim_model_base": 9}, 9.0 / 32.0, None
    ),
    "capped": ("RecurrentGemmaConfig", RECURRENT_GEMMA | {"logits_soft_cap": 0.5}, 1.0, 0.5),
    "capped in parts": ("xLSTMConfig", XLSTM | {"output_logit_soft_cap": 2.0}, 1.0, 2.0),
    "capped as Gemma": ("NanoChatConfig", LLAMA, 1.0, 15.0),
}  # fmt: skip


@pytest.mark.parametrize("kind", SEEN)
@torch.no_grad()
def test_multipliers_and_caps_of_any_name_are_found_by_what_the_model_computes(kind: str) -> None:
    config_class, shape, scale, softcap = SEEN[kind]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, config_class)(**shape)).eval()
    head = find_lm_head(model, VOCABULARY)
    assert head.scale == (pytest.approx(scale, rel=1e-6) if "before" in kind else scale)
    assert head.softcap == softcap
    theirs = model(input_ids=some_tokens(), use_cache=False).logits[..., :VOCABULARY]
    ours = head.compute_logits(compute_hidden_states(model, some_tokens()).flatten(0, 1))
    torch.testing.assert_close(ours, theirs.flatten(0, 1), rtol=1e-5, atol=1e-6)
    rounded = find_lm_head(model.to(torch.bfloat16), VOCABULARY)
    assert (rounded.scale, rounded.softcap) == (pytest.approx(scale, rel=1e-4), softcap)


def test_hidden_states_of_zeros_tell_no_factor() -> None:
    model = build("llama tied")
    model.model.norm.weight.data.zero_()
    assert find_lm_head(model, VOCABULARY).scale == 1.0


class Altered(LlamaForCausalLM):
    """A model that changes its logits in a way that its configuration does not show."""

    change: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = self.change(output.logits)
        return output


UNDECLARED: dict[str, tuple[Any, float, float | None]] = {
    "soft cap": (lambda z: 31 * torch.tanh(z / 31), 1.0, 31.0),
    "high soft cap": (lambda z: 200 * torch.tanh(z / 200), 1.0, 200.0),
    "multiplier": (lambda z: z * 0.7, 0.7, None),
    "multiplier near one": (lambda z: z * 1.01, 1.01, None),
    "both, the cap first": (lambda z: 5 * torch.tanh(z / 10), 0.5, 5.0),
}


@pytest.mark.parametrize("size", [1e-6, 0.02, 1.0], ids=["minute logits", "usual", "large"])
@pytest.mark.parametrize("kind", UNDECLARED)
def test_what_a_configuration_does_not_say_is_found_too(kind: str, size: float) -> None:
    torch.manual_seed(0)
    model = Altered(LlamaConfig(**LLAMA, initializer_range=size, tie_word_embeddings=False))
    model.change, scale, softcap = UNDECLARED[kind]
    head = find_lm_head(model, VOCABULARY)
    assert head.scale == pytest.approx(scale, rel=1e-9)
    assert head.softcap == (softcap and pytest.approx(softcap, rel=1e-9))


UNSUPPORTED = {
    "shift of one token": lambda z: (
        z + z.detach().abs().max() * nn.functional.one_hot(torch.tensor(5), ROWS)
    ),
    "log softmax": lambda z: z.log_softmax(-1),
    "clamp": lambda z: z.clamp(-20, 20),
    "nan": lambda z: z * float("nan"),
    "masked": lambda z: z.masked_fill(torch.arange(ROWS) == 7, float("-inf")),
}


@pytest.mark.parametrize("size", [1e-6, 0.02, 1.0], ids=["minute logits", "usual", "large"])
@pytest.mark.parametrize("change", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_any_other_change_after_the_head_is_refused_by_name(change, size):
    torch.manual_seed(0)
    model = Altered(LlamaConfig(**LLAMA, initializer_range=size, tie_word_embeddings=False))
    model.change = lambda z: z
    find_lm_head(model, VOCABULARY)
    model.change = change
    with pytest.raises(
        ModelError, match="Altered does something to its logits after the LM head"
    ) as caught:
        find_lm_head(model, VOCABULARY)
    assert "soft cap c tanh(z / c)" in caught.value.remedy


def test_a_head_of_zeros_is_accepted():
    model = build("llama untied")
    nn.init.zeros_(model.lm_head.weight)
    assert find_lm_head(model, VOCABULARY).weight.count_nonzero() == 0


def test_weights_that_are_not_finite_are_refused():
    model = build("llama untied")
    with torch.no_grad():
        model.lm_head.weight[3, 3] = float("nan")
    with pytest.raises(ModelError, match="LlamaForCausalLM computes NaN"):
        find_lm_head(model, VOCABULARY)


def test_the_check_leaves_the_model_as_it_was():
    model = build("gpt2").train()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    find_lm_head(model, VOCABULARY)
    isolate_documents(model)
    assert model.training and all(module.training for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def test_a_model_without_a_head_and_a_head_too_narrow_are_refused():
    with pytest.raises(ModelError, match="LlamaModel has no linear LM head"):
        find_lm_head(LlamaModel(LlamaConfig(**LLAMA)), VOCABULARY)
    with pytest.raises(TokenizerMismatch, match="96 output rows, but the tokenizer has 97 tokens"):
        find_lm_head(build("llama tied"), ROWS + 1)
    assert find_lm_head(build("llama tied"), ROWS).vocabulary == ROWS


def test_a_model_that_changes_its_hidden_states_before_the_head_is_refused() -> None:
    """The head of ELECTRA reads a projection to the width of its embeddings."""
    shape = transformers.ElectraConfig(
        vocab_size=ROWS, hidden_size=32, embedding_size=16, intermediate_size=48,
        num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64, is_decoder=True,
    )  # fmt: skip
    with pytest.raises(ModelError, match="they have 32 numbers, and the LM head reads 16"):
        find_lm_head(transformers.ElectraForCausalLM(shape), VOCABULARY)


def require_small(hollow: PreTrainedModel) -> PreTrainedModel:
    small = make_small(hollow)
    assert small is not None
    return small


def test_a_head_that_is_not_supported_is_foreseen_without_the_weights() -> None:
    """A head that reads a projection, and one whose cap has a name of its own."""
    electra = transformers.ElectraConfig(
        vocab_size=ROWS, hidden_size=32, embedding_size=16, intermediate_size=48,
        num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64, is_decoder=True,
    )  # fmt: skip
    with torch.device("meta"):
        hollow = transformers.ElectraForCausalLM(electra)
        known = AutoModelForCausalLM.from_config(
            transformers.RecurrentGemmaConfig(**RECURRENT_GEMMA)
        )
    with pytest.raises(ModelError, match="the LM head reads 16"):
        precheck_lm_head(require_small(hollow))
    precheck_lm_head(require_small(known))


def test_a_model_whose_stand_in_cannot_run_is_left_to_the_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build("llama untied")
    for found in (torch.tensor(float("nan")), None):

        def compute(*args: Any, found: Any = found, **kwargs: Any) -> Any:
            if found is None:
                raise IndexError("a size does not suit it")
            return SimpleNamespace(logits=found)

        monkeypatch.setattr(type(model), "forward", compute)
        precheck_lm_head(model)
