"""Layers are taken out of every kind of decoder: what is left computes what it computed before."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from kd.config.student import StudentFromTeacher
from kd.errors import ModelError
from kd.models import depth
from kd.models.inheritance import cut_hollow_student, cut_student
from kd.models.layers import find_body, find_decoder_layers
from tests.support.kd.zoo import DECODERS, build, some_tokens

pytestmark = pytest.mark.usefixtures("one_thread")


def plan(layers: int, pick: str = "last", **fields: Any) -> StudentFromTeacher:
    return StudentFromTeacher.model_validate({"layers": layers, "pick": pick} | fields)


@torch.no_grad()
def logits_of(model: PreTrainedModel) -> Tensor:
    return model.eval()(input_ids=some_tokens(), use_cache=False).logits


def take_out(teacher: PreTrainedModel, kept: list[int]) -> PreTrainedModel:
    """Return ``teacher`` with the layers ``kept`` alone, by hand."""
    model = copy.deepcopy(teacher)
    layers = find_decoder_layers(model)
    body = find_body(model)
    (name,) = (
        name for name, each in body.named_children()
        if isinstance(each, nn.ModuleList) and len(each) == len(layers)
    )  # fmt: skip
    setattr(body, name, nn.ModuleList([layers[layer] for layer in kept]))
    kinds = getattr(model.config, "layer_types", None)
    # Not through setattr of the configuration, which compares the length with the number of layers.
    model.config.__dict__["num_hidden_layers"] = len(kept)
    if kinds is not None:
        model.config.__dict__["layer_types"] = [kinds[layer] for layer in kept]
    return model


@pytest.mark.parametrize("kind", DECODERS)
def test_all_the_layers_are_the_teacher_and_some_are_what_is_left(
    kind: str, tmp_path: Path
) -> None:
    teacher = build(kind)
    whole = cut_student(teacher, plan(4))
    assert torch.equal(logits_of(whole), logits_of(teacher))
    # Layers 1 and 3: both shift, and their neighbours of another kind are taken out.
    student = cut_student(teacher, plan(3))
    assert len(find_decoder_layers(student)) == 3
    if kind != "gemma4":  # it has parts of the layers outside of them
        assert torch.equal(logits_of(student), logits_of(take_out(teacher, [1, 2, 3])))
    student.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits_of(again), logits_of(student))


def test_layers_that_the_class_would_build_in_another_way_are_refused() -> None:
    """Gemma 4 makes its last layer see everything, whatever the configuration says."""
    teacher = build("gemma4")
    with pytest.raises(ModelError, match=r"layers 0 of the teacher alone: layer 0 would differ"):
        cut_hollow_student(teacher, plan(1, "first"))


def test_a_field_without_a_rule_is_an_error_and_no_other_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    teacher = build("qwen3 moe")
    monkeypatch.setattr(depth, "_NUMBERS", ())
    monkeypatch.setattr(depth, "_cut_counts", lambda *_: {})
    with pytest.raises(ModelError, match=r"layer 1 would differ in mlp"):
        cut_student(teacher, plan(3))


def test_layers_that_are_in_no_list_are_refused() -> None:
    teacher = build("gpt2")
    teacher.config.n_layer = 7
    with pytest.raises(ModelError, match="GPT2LMHeadModel: its layers are not in one list"):
        cut_student(teacher, plan(1))
