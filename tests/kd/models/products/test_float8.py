"""Products in float8: which modules get them, how far off they are, and where they are refused."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kd.errors import ConfigError
from kd.models.precision import pick_device
from kd.models.products.float8 import has_float8, multiply_in_float8, require_float8
from tests.support.kd.jobs import JOB, LORA, changed, problems
from tests.support.kd.quantizers import needs_torchao

SHAPE = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=40, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1,
)  # fmt: skip
TOKENS = torch.arange(64).reshape(2, 32)


def compute(student: LlamaForCausalLM) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    tokens = TOKENS.to(student.device)
    with torch.autocast(student.device.type, torch.bfloat16):
        logits = student(tokens).logits.float()
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    return logits.detach(), {name: p.grad for name, p in student.named_parameters()}


@needs_torchao
def test_layers_multiply_in_float8_at_its_error_and_keep_their_names() -> None:
    torch.manual_seed(0)
    student = LlamaForCausalLM(SHAPE)
    exact = LlamaForCausalLM(SHAPE)
    exact.load_state_dict(student.state_dict())
    names = list(student.state_dict())
    converted = multiply_in_float8(student, emulate=True)
    attention = [f"self_attn.{each}_proj" for each in "qkvo"]
    assert converted == [f"layer {n}: {name}" for n in (0, 1) for name in attention], (
        "the MLP is 40 wide, which is no multiple of 16"
    )
    assert list(student.state_dict()) == names
    (logits, gradients), (expected, references) = compute(student), compute(exact)
    assert not torch.equal(logits, expected)
    # e4m3 rounds to 1 in 16, e5m2, in which gradients come back, to 1 in 8.
    assert float((logits - expected).norm() / expected.norm()) < 0.05
    for name, reference in references.items():
        assert float((gradients[name] - reference).norm() / reference.norm()) < 0.2, name


@needs_torchao
def test_a_pass_may_have_any_number_of_tokens() -> None:
    """Products on the device meta have the rules of sizes that a GPU has."""
    with torch.device("meta"):
        student = LlamaForCausalLM(SHAPE).bfloat16()
        assert multiply_in_float8(student)
        layer = student.model.layers[0].self_attn.q_proj
        hidden = torch.zeros(1, 8, 32, dtype=torch.bfloat16, requires_grad=True)
    layer(hidden).sum().backward()
    assert layer.weight.grad.shape == layer.weight.shape


@pytest.mark.gpu
@needs_torchao
@pytest.mark.skipif(not has_float8(pick_device()), reason="needs a GPU with products in float8")
def test_a_gpu_multiplies_in_float8_as_it_is_emulated() -> None:
    """Both round their factors alike. Only sums differ: those of the GPU are less wide."""
    torch.manual_seed(0)
    students = {emulate: LlamaForCausalLM(SHAPE).cuda() for emulate in (False, True)}
    students[True].load_state_dict(students[False].state_dict())
    for emulate, student in students.items():
        assert multiply_in_float8(student, emulate=emulate)
    (logits, gradients), (expected, references) = compute(students[False]), compute(students[True])
    assert float((logits - expected).norm() / expected.norm()) < 0.02
    for name, reference in references.items():
        assert float((gradients[name] - reference).norm() / reference.norm()) < 0.1, name


def test_a_device_without_float8_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="needs a GPU of the Ada or Hopper") as caught:
        require_float8(torch.device("cpu"))
    (problem,) = caught.value.problems
    assert problem.pointer == "/train/fp8" and "cpu" in problem.detail


@pytest.mark.parametrize(
    ("capability", "served"), [((8, 0), False), ((8, 9), True), ((9, 0), True)]
)
def test_the_generation_of_a_gpu_decides(
    capability: tuple[int, int], served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    if served:
        require_float8(torch.device("cuda"))
        return
    with pytest.raises(ConfigError, match="a GPU"):
        require_float8(torch.device("cuda"))


def test_float8_needs_bfloat16_beside_it_and_no_adapters() -> None:
    (found,) = problems(changed("train.fp8", True, changed("train.precision", "fp32", JOB)))
    assert "train.precision is fp32: set it to auto or bf16" in found.detail
    (found,) = problems(changed("train.fp8", True, LORA))
    assert "student.lora trains adapters" in found.detail
