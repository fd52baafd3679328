"""A parameter that does not learn is named: unused, cut off, spoiled; one that must wait is not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, PreTrainedModel

from kd.checks.gradients import check_gradients, compute_gradient_norms
from kd.models.layers import group_layers
from tests.support.kd.students import make_llama


def make_student(tied: bool = True) -> LlamaForCausalLM:
    return make_llama(tie_word_embeddings=tied)


def make_gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    )


def run_backward(student: PreTrainedModel) -> PreTrainedModel:
    """Run a real backward pass over some tokens."""
    tokens_BL = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(1))
    student(input_ids=tokens_BL, labels=tokens_BL, use_cache=False).loss.backward()
    return student


@pytest.mark.parametrize(
    "student",
    [make_student(), make_student(tied=False), make_gpt2()],
    ids=["tied", "untied", "gpt2"],
)
def test_a_sound_student_learns_everywhere(student: PreTrainedModel) -> None:
    verdict = check_gradients(run_backward(student))
    assert verdict.ok, verdict.message
    assert verdict.facts["parameters"] == len(list(student.parameters()))


def test_a_parameter_that_nothing_uses_is_named() -> None:
    student = make_student()
    student.model.layers[1].register_parameter("forgotten", nn.Parameter(torch.ones(3)))
    verdict = check_gradients(run_backward(student))
    assert not verdict.ok
    assert verdict.facts["missing"] == ["model.layers.1.forgotten"]
    assert (
        "no gradient reaches model.layers.1.forgotten" in verdict.message
        and "freeze it" in verdict.remedy
    )


def test_a_row_of_the_embedding_that_occurs_and_does_not_learn_is_named() -> None:
    student = make_student(tied=False)
    tokens_BL = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(1))
    student.model.embed_tokens.padding_idx = int(tokens_BL[1, 3])
    assert check_gradients(run_backward(student)).ok, "the whole parameter has a gradient"
    verdict = check_gradients(student, tokens_N=tokens_BL[:, :-1].flatten())
    name = f"model.embed_tokens.weight (the rows of tokens {int(tokens_BL[1, 3])})"
    assert verdict.facts["zero"] == [name] and name in verdict.message
    student.zero_grad()
    student.model.embed_tokens.padding_idx = None
    assert check_gradients(run_backward(student), tokens_N=tokens_BL[:, :-1].flatten()).ok


def test_a_layer_that_is_cut_off_is_named() -> None:
    student = make_student()
    student.model.layers[0].mlp.register_forward_hook(lambda layer, inputs, output: output * 0.0)
    verdict = check_gradients(run_backward(student))
    assert not verdict.ok
    mlp = [f"model.layers.0.mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")]
    assert verdict.facts["zero"] == [*mlp, "model.layers.0.post_attention_layernorm.weight"]
    assert "the gradient is 0 in model.layers.0.mlp.gate_proj.weight" in verdict.message


def test_a_detached_layer_is_named() -> None:
    student = make_student(tied=False)
    student.model.layers[0].register_forward_hook(lambda layer, inputs, output: output.detach())
    verdict = check_gradients(run_backward(student))
    names = [name for name, _ in student.named_parameters()]
    expected = [name for name in names if "layers.0" in name or "embed" in name]
    assert verdict.facts["missing"] == expected
    assert f"and {len(expected) - 5} more" in verdict.message


def test_a_gradient_that_is_not_finite_is_named_unless_the_loss_is_scaled() -> None:
    student = run_backward(make_student())
    gradient = student.model.layers[1].self_attn.q_proj.weight.grad
    assert gradient is not None
    for value in (math.nan, math.inf):
        gradient[0, 0] = value
        verdict = check_gradients(student)
        assert not verdict.ok and verdict.facts["not_finite"] == [
            "model.layers.1.self_attn.q_proj.weight"
        ]
        assert check_gradients(student, scaled=True).ok


def test_what_is_frozen_need_not_learn() -> None:
    student = make_student()
    student.model.embed_tokens.requires_grad_(False)
    verdict = check_gradients(run_backward(student))
    assert verdict.ok and verdict.facts["parameters"] == len(list(student.parameters())) - 1


def test_an_adapter_waits_for_its_other_half() -> None:
    from peft import LoraConfig, inject_adapter_in_model

    student = make_student()
    student.requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj", "up_proj"]), student)
    verdict = check_gradients(run_backward(student))
    assert verdict.ok and verdict.facts["parameters"] == 8, "A has a gradient of 0 while B is 0"
    with torch.no_grad():
        student.model.layers[1].self_attn.q_proj.lora_B["default"].weight += 1.0
    found = check_gradients(student)
    assert found.facts["zero"] == ["model.layers.1.self_attn.q_proj.lora_A.default.weight"]


@pytest.mark.parametrize(
    "student",
    [make_student(), make_student(tied=False), make_gpt2()],
    ids=["tied", "untied", "gpt2"],
)
def test_norms_of_layer_groups_make_up_the_whole(student: PreTrainedModel) -> None:
    run_backward(student)
    norms = compute_gradient_norms([*group_layers(student), ("all", list(student.parameters()))])
    everything = norms.pop("all")
    assert len(norms) == len({*norms}) == 4
    squares = {
        name: float(p.grad.double().square().sum()) for name, p in student.named_parameters()
    }  # type: ignore[union-attr]
    layer = sum(square for name, square in squares.items() if "layers.1." in name or "h.1." in name)
    assert norms["layer 1"] == pytest.approx(math.sqrt(layer), rel=1e-5)
    whole = math.sqrt(sum(norm**2 for norm in norms.values()))
    assert whole == pytest.approx(math.sqrt(sum(squares.values())), rel=1e-5)
    assert everything == pytest.approx(whole, rel=1e-5)
    assert whole == pytest.approx(
        float(nn.utils.clip_grad_norm_(student.parameters(), math.inf)), rel=1e-5
    )


def test_a_group_without_gradients_has_norm_0() -> None:
    assert set(compute_gradient_norms(group_layers(make_student())).values()) == {0.0}
