"""A teacher whose weights are rounded as they are read: which, how much, where it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
)

from kd.capture.plan import plan_capture
from kd.config.extras import NO_QUANTIZER
from kd.config.jobfile import parse_config
from kd.config.teacher import TeacherConfig
from kd.errors import ConfigError, ModelError
from kd.memory.model_work import count_weight_bytes
from kd.models.layers import compute_hidden_states
from kd.models.lm_head import find_lm_head
from kd.models.loading import load_model, load_teacher
from kd.models.teacher_files import TeacherFiles
from kd.preflight.problems import Machine, find_problems
from tests.support.kd.quantizers import needs_torchao
from tests.support.kd.students import save_teacher

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")


def load(folder: Path, **changes: Any) -> PreTrainedModel:
    return load_teacher(TeacherFiles(TeacherConfig(model=str(folder), **changes), folder), CPU)


def unpack(layer: nn.Linear) -> Tensor:
    """The rounded weight as plain numbers."""
    weight: Any = layer.weight
    return weight.dequantize()


def list_layers(model: PreTrainedModel) -> list[tuple[str, nn.Linear]]:
    """The linear layers that are not the LM head."""
    head = model.get_output_embeddings()
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    ]


@needs_torchao
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_layers_are_rounded_and_the_rest_is_not(tiny_teacher, dtype):
    rounded = load(tiny_teacher, quantization="int8", dtype=dtype)
    plain = load(tiny_teacher, dtype=dtype)
    theirs = dict(plain.named_parameters())
    layers = {f"{name}.weight" for name, _ in list_layers(rounded)}
    assert len(layers) >= 7
    for name, parameter in rounded.named_parameters():
        assert parameter.dtype == getattr(torch, dtype) and not parameter.requires_grad
        assert type(parameter.data) is not Tensor if name in layers else True
        if name not in layers:
            assert torch.equal(parameter, theirs[name]), name
    assert rounded.get_output_embeddings().weight is rounded.get_input_embeddings().weight


@needs_torchao
def test_each_weight_moves_by_half_a_step_at_most(tiny_teacher):
    """A row has 255 steps from minus its largest number to that number."""
    plain = dict(list_layers(load(tiny_teacher)))
    for name, layer in list_layers(load(tiny_teacher, quantization="int8")):
        weight_OD = plain[name].weight.double()
        half_O1 = weight_OD.abs().amax(1, keepdim=True) / 127 / 2
        moved_OD = (unpack(layer).double() - weight_OD).abs()
        assert (moved_OD <= half_O1 * 1.001).all() and moved_OD.max() > 0, name


@needs_torchao
def test_the_memory_is_what_an_estimate_counts(tiny_teacher):
    model = load(tiny_teacher, quantization="int8")
    parts = [
        part
        for weight in model.parameters()
        for part in ([weight.qdata, weight.scale] if hasattr(weight, "qdata") else [weight])
    ]
    plain = load_model(tiny_teacher, torch.float32)
    assert count_weight_bytes(plain, 4, "int8") == sum(each.nbytes for each in parts)


@needs_torchao
def test_the_hidden_states_are_those_of_the_rounded_weights_in_float64(tiny_teacher):
    rounded = load(tiny_teacher, quantization="int8")
    reference = load_model(tiny_teacher, torch.float32).double().eval()
    weights = {name: unpack(layer) for name, layer in list_layers(rounded)}
    for name, layer in list_layers(reference):
        layer.weight.data = weights[name].double()
    tokens_BL = torch.arange(96).reshape(2, 48) * 19 % 2048
    with torch.no_grad():
        ours = compute_hidden_states(rounded, tokens_BL).double()
        theirs = compute_hidden_states(reference, tokens_BL)
        plain = compute_hidden_states(load(tiny_teacher), tokens_BL).double()
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-5
    assert float((plain - theirs).norm() / theirs.norm()) > 1e-3


@needs_torchao
def test_the_language_model_inside_another_model_is_rounded(tmp_path):
    shape = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }  # fmt: skip
    text = shape | {"vocab_size": 99, "num_key_value_heads": 2, "head_dim": 16}
    images = shape | {"image_size": 28, "patch_size": 14, "model_type": "siglip_vision_model"}
    whole = Gemma3Config(text_config=text, vision_config=images, mm_tokens_per_image=4)
    Gemma3ForConditionalGeneration(whole).save_pretrained(tmp_path)
    rounded = load(tmp_path, quantization="int8")
    kinds = {type(layer.weight.data) is Tensor for _, layer in list_layers(rounded)}
    assert type(rounded).__name__ == "Gemma3ForCausalLM" and kinds == {False}
    find_lm_head(rounded, 99)


@needs_torchao
def test_a_model_without_linear_layers_is_refused(tmp_path):
    shape = GPT2Config(vocab_size=99, n_embd=32, n_layer=1, n_head=2, n_positions=64)
    GPT2LMHeadModel(shape).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="GPT2LMHeadModel has no linear layers"):
        load(tmp_path, quantization="int8")


def test_a_quantised_teacher_is_another_teacher(tiny_teacher, tmp_path):
    (tmp_path / "a.txt").write_text("It was a dark night. " * 400, encoding="utf-8")

    def identify(**changes: Any) -> Any:
        job = {
            "kind": "precompute",
            "teacher": {"model": str(tiny_teacher), **changes},
            "data": {"train": str(tmp_path / "a.txt"), "sequence_length": 64},
        }
        return plan_capture(parse_config(job)).identity

    plain = identify()
    rounded = identify(quantization="int8")
    assert "quantization" not in plain.to_json()["teacher"]
    assert rounded.to_json()["teacher"]["quantization"] == "int8"
    assert rounded.fingerprint != plain.fingerprint
    assert identify(quantization=None).fingerprint == plain.fingerprint
    assert identify(quantization="int4").teacher.dtype == "bfloat16"


# ---------------------------------------------------------------------- refused


def make_job(**changes: Any) -> Any:
    teacher = {"model": "teacher", "quantization": "int8"}
    job = {"kind": "precompute", "teacher": teacher, "data": {"train": "a.txt"}}
    return parse_config(job | changes)


def test_a_missing_library_is_named_before_the_capture(tiny_teacher, monkeypatch):
    monkeypatch.setattr("kd.config.extras.find_spec", lambda _: None)
    assert find_problems(make_job(), machine=Machine(device=CPU)) == [NO_QUANTIZER]
    with pytest.raises(ConfigError, match=r"torchao is not installed.*potstill\[quantization\]"):
        load(tiny_teacher, quantization="int8")
    sealed = {
        "kind": "train", "cache": {"fingerprint": "0" * 32}, "train": {"max_steps": 1},
        "student": {"model": "x"},
    }  # fmt: skip
    assert find_problems(make_job(**sealed), machine=Machine(device=CPU)) == []


@needs_torchao
def test_int4_is_refused_where_no_gpu_computes_with_it(tiny_teacher):
    teacher = {"model": "teacher", "quantization": "int4"}
    (problem,) = find_problems(make_job(teacher=teacher), machine=Machine(device=CPU))
    assert problem.pointer == "/teacher/quantization"
    assert "int4 needs a GPU" in problem.detail and "int8" in problem.remedy
    with pytest.raises(ConfigError, match="int4 needs a GPU"):
        load(tiny_teacher, quantization="int4")


@needs_torchao
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("width", [128, 576, 96])
@pytest.mark.parametrize("quantization, bound", [("int8", 0.05), ("int4", 0.5)])
def test_a_gpu_computes_nearly_what_plain_weights_do(
    tokenizer, tmp_path, quantization, bound, width
):
    shape = {"max_position_embeddings": 512, "num_attention_heads": width // 32}
    teacher = save_teacher(tmp_path, tokenizer, width, **shape)
    device = torch.device("cuda")
    config = TeacherConfig(model=str(teacher), dtype="bfloat16")
    tokens_BL = torch.arange(48, device=device)[None]
    found = [
        compute_hidden_states(load_teacher(TeacherFiles(each, teacher), device), tokens_BL).float()
        for each in (config.model_copy(update={"quantization": quantization}), config)
    ]
    assert 0 < float((found[0] - found[1]).norm() / found[1].norm()) < bound
