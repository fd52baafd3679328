"""The first module that computes a NaN is named, although the NaN spoils others after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, PreTrainedModel

from kd.checks.nonfinite import locate_nonfinite
from kd.config.data import DataConfig
from kd.models.layers import compute_hidden_states
from kd.models.precision import Precision
from kd.text.batches import Batch, make_batch
from kd.text.packing import Document, pack_documents
from tests.support.kd.students import make_llama


@pytest.fixture
def batch() -> Batch:
    rng = np.random.default_rng(0)
    data = DataConfig(train=("unused.txt",), sequence_length=16)
    documents = [Document(rng.integers(0, 50, length).astype(np.uint32)) for length in (20, 7, 30)]
    return make_batch(pack_documents(documents, data), None)


def make_student() -> LlamaForCausalLM:
    return make_llama(layers=3, attention_dropout=0.1).train()


def make_gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_embd=16, n_layer=3, n_head=2, n_positions=64)
    ).train()


def poison(parameter: nn.Parameter, value: float = float("nan")) -> None:
    with torch.no_grad():
        parameter.view(-1)[3] = value


@pytest.mark.parametrize(
    ("student", "name", "kind"),
    [
        (make_student(), "model.layers.1.mlp.up_proj", "Linear"),
        (make_student(), "model.layers.2.input_layernorm", "LlamaRMSNorm"),
        (make_student(), "model.layers.0.self_attn.v_proj", "Linear"),
        (make_gpt2(), "transformer.h.1.mlp.c_fc", "Conv1D"),
        (make_gpt2(), "transformer.wpe", "Embedding"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_module_whose_weight_is_nan_is_named(
    student: PreTrainedModel, name: str, kind: str, batch: Batch
) -> None:
    poison(student.get_submodule(name).weight)  # type: ignore[arg-type]
    found = locate_nonfinite(student, [batch])
    assert f"is that of {name} ({kind}): its weight is not finite" in found


def test_the_batch_that_makes_it_need_not_be_the_last(batch: Batch) -> None:
    student = make_student()
    calls = []

    def spoil(layer: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return output * torch.nan if len(calls) == 2 else output

    student.model.layers[1].mlp.register_forward_hook(spoil)
    found = locate_nonfinite(student, [batch, batch, batch])
    assert "model.layers.1.mlp" in found and len(calls) == 2


def test_a_layer_that_makes_a_nan_of_finite_numbers_is_named(batch: Batch) -> None:
    student = make_student()
    student.model.layers[1].self_attn.register_forward_hook(
        lambda layer, inputs, output: (output[0] * torch.nan, None)
    )
    found = locate_nonfinite(student, [batch])
    assert (
        "model.layers.1.self_attn (LlamaAttention); its inputs and its own weights are finite"
        in found
    )


def test_an_overflow_of_half_precision_is_found_where_it_happens(batch: Batch) -> None:
    student = make_student()
    with torch.no_grad():
        student.model.layers[1].mlp.down_proj.weight.mul_(1e9)
    half = Precision("cpu", torch.float16)
    assert "model.layers.1.mlp.down_proj" in locate_nonfinite(student, [batch], half)
    assert "is not known" in locate_nonfinite(student, [batch]), "float32 has room for it"


def compute_loss(student: PreTrainedModel) -> Callable[[Batch], torch.Tensor]:
    def compute(batch: Batch) -> torch.Tensor:
        hidden_BLD = compute_hidden_states(student, batch.tokens_BL, batch.packed)
        return student.get_output_embeddings()(hidden_BLD).logsumexp(-1).sum()

    return compute


def hook_output(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change the output of ``module``."""
    module.register_forward_hook(lambda module, inputs, output: change(output))


class Squared(torch.autograd.Function):
    """x^2 with a wrong backward pass, as a kernel of one's own may have."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / 0.0


#: Functions whose value is finite and whose gradient is not, with the operation that makes it.
FAULTS: list[tuple[Callable[[torch.Tensor], torch.Tensor], str]] = [
    (lambda x: x + torch.sqrt(x * 0.0), "Sqrt"),
    (lambda x: x + torch.linalg.vector_norm(x * 0.0, dim=-1, keepdim=True) ** 0.5, "Pow"),
    (lambda x: x + torch.where(x.abs() < 9.0, 0.0, (x * 0.0).log()), "Log"),
    (lambda x: x + Squared.apply(x * 0.0), "Squared"),
]


@pytest.mark.parametrize(("fault", "operation"), FAULTS, ids=[name for _, name in FAULTS])
@pytest.mark.parametrize("layer", [0, 2])
def test_an_operation_whose_backward_pass_makes_a_nan_is_named_with_its_module(
    fault: Callable[[torch.Tensor], torch.Tensor], operation: str, layer: int, batch: Batch
) -> None:
    student = make_student()
    hook_output(student.model.layers[layer].mlp, fault)
    found = locate_nonfinite(student, [batch], None, compute_loss(student))
    assert f"by {operation} in model.layers.{layer}.mlp (LlamaMLP)" in found
    assert "embed" not in found


def test_a_loss_that_is_not_finite_is_told_from_its_gradient(batch: Batch) -> None:
    student = make_student()
    compute = compute_loss(student)
    found = locate_nonfinite(student, [batch], None, lambda each: compute(each) * torch.nan)
    assert found.endswith("the loss itself is not.")
    found = locate_nonfinite(student, [batch], None, lambda each: (compute(each) * 0.0).sqrt())
    assert "by Sqrt, from gradients that are finite" in found, "it belongs to no module"


def test_a_sound_pass_is_not_blamed(batch: Batch) -> None:
    """A fault that does not come again has no known place: no weight is named for its gradient."""
    student = make_student()
    compute_loss(student)(batch).backward()
    gradient = student.model.embed_tokens.weight.grad
    assert gradient is not None
    gradient[0, 0] = torch.nan
    for compute in (None, compute_loss(student)):
        found = locate_nonfinite(student, [batch], None, compute)
        assert found.endswith("is not known.") and "embed" not in found


def test_what_a_forward_pass_does_not_touch_is_looked_at_after_it(batch: Batch) -> None:
    student = make_student()
    poison(student.lm_head.weight)
    assert "lm_head.weight is not finite" in locate_nonfinite(student, [batch])


def test_looking_changes_nothing(batch: Batch) -> None:
    student = make_student()
    poison(student.model.layers[1].mlp.up_proj.weight)
    random = torch.get_rng_state()
    locate_nonfinite(student, [batch], None, compute_loss(student))
    with torch.no_grad():
        student.model.layers[1].mlp.up_proj.weight.nan_to_num_()
    locate_nonfinite(student, [batch], None, compute_loss(student))
    assert torch.equal(torch.get_rng_state(), random)
    assert student.training and all(module.training for module in student.modules())
    assert all(not module._forward_hooks for module in student.modules())
    assert all(parameter.grad is None for parameter in student.parameters())
