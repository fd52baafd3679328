"""Models whose weights are stored quantised: read, or refused by name before a capture begins."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel, TorchAoConfig

from kd.config.extras import NO_QUANTIZER
from kd.config.jobfile import parse_config
from kd.config.student import StudentConfig
from kd.config.teacher import TeacherConfig
from kd.errors import ModelError
from kd.models.folder import ModelFolder
from kd.models.lm_head import find_lm_head
from kd.models.loading import build_student, load_model, load_teacher
from kd.models.teacher_files import TeacherFiles
from kd.preflight.problems import Folders, Machine, find_problems
from tests.support.kd.quantizers import needs_torchao

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


@pytest.fixture
def mark(copied_teacher: Path) -> Callable[[str], Path]:
    """Mark a teacher's folder as quantised in some way."""

    def write(method: str) -> Path:
        path = copied_teacher / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        config["quantization_config"] = {"quant_method": method, "bits": 4}
        path.write_text(json.dumps(config), encoding="utf-8")
        return copied_teacher

    return write


def check(folder: Path, student: dict[str, Any] | None = None, **teacher: Any) -> list[Any]:
    job = {
        "teacher": {"model": str(folder), **teacher},
        "student": student or {"init": {"layers": 1, "hidden_size": 32}},
        "data": {"train": str(folder / "config.json"), "format": "text"},
        "train": {"max_steps": 1},
    }
    home = folder.parent / "home"
    return find_problems(parse_config(job), Folders(Path(), home), Machine(device=CPU))


def test_weights_that_are_stored_quantised_are_not_spread_over_devices(mark):
    folder = mark("bitsandbytes")
    found = check(folder, parallel="device_map")
    (own,) = (each for each in found if each.pointer == "/teacher/parallel")
    assert "stored quantised by bitsandbytes, but teacher.parallel spreads" in own.detail
    spread = TeacherConfig(model=str(folder), parallel="device_map")
    with pytest.raises(ModelError, match="stored quantised by bitsandbytes"):
        load_teacher(TeacherFiles(spread, folder), CPU)


@pytest.mark.parametrize(
    "method, package",
    [("gptq", "gptqmodel"), ("awq", "gptqmodel"), ("compressed-tensors", "compressed-tensors")],
)
def test_the_library_that_a_teacher_needs_is_named(mark, monkeypatch, method, package):
    folder = mark(method)
    monkeypatch.setattr("kd.models.folder.find_spec", lambda _: None)
    (problem,) = check(folder)
    assert problem.pointer == "/teacher/model" and method in problem.detail
    assert f"pip install {package}" in problem.remedy
    with pytest.raises(ModelError, match=f"stored quantised by {method}, which needs"):
        load_teacher(TeacherFiles(TeacherConfig(model=str(folder)), folder), CPU)


def test_an_unknown_form_is_refused_by_name(mark):
    folder = mark("spqr")
    (problem,) = check(folder)
    assert problem.pointer == "/teacher/model" and "'spqr'" in problem.detail
    with pytest.raises(ModelError, match="'spqr', which cannot be read"):
        load_model(folder, torch.float32)


def test_quantised_weights_are_not_trained_cut_or_rounded_again(mark, tiny_teacher, tokenizer):
    folder = mark("bitsandbytes")
    wrong = {
        "/student/model": check(tiny_teacher, {"model": str(folder)}),
        "/student/from_teacher": check(folder, {"from_teacher": {"layers": 1}}),
        "/teacher/quantization": check(folder, quantization="int8"),
    }
    for pointer, problems in wrong.items():
        # Where torchao is missing, that is a problem of the field, too.
        known = [each for each in problems if each != NO_QUANTIZER]
        (found,) = [each for each in known if each.pointer == pointer]
        assert "stored quantised by bitsandbytes, but" in found.detail
    with pytest.raises(ModelError, match="but a student has weights in float32"):
        build_student(StudentConfig(model=str(folder)), tokenizer, 64)


def test_the_mark_of_an_unpacked_gguf_file_is_no_quantisation(mark):
    folder = mark("gguf")
    assert ModelFolder(folder).stored_quantization is None
    assert check(folder, {"model": str(folder)}) == []


def test_a_quantised_lm_head_is_refused(tiny_teacher):
    model = load_model(tiny_teacher, torch.float32)
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ModelError, match="LM head of LlamaForCausalLM is quantised"):
        find_lm_head(model, 2048)


def save_quantised(source: Path, folder: Path, how: Any) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=how, dtype=torch.float32, device_map={"": CPU}
    )
    model.save_pretrained(folder)
    return model


def assert_read_as_saved(folder: Path, saved: PreTrainedModel) -> None:
    model = load_teacher(TeacherFiles(TeacherConfig(model=str(folder)), folder), CPU)
    find_lm_head(model, 2048)
    tokens_BL = torch.arange(32)[None]
    with torch.no_grad():
        assert torch.equal(model(tokens_BL).logits, saved(tokens_BL).logits)
    assert not any(each.pointer == "/teacher/model" for each in check(folder))


@needs_torchao
def test_a_teacher_that_torchao_quantised_is_read(tiny_teacher, tmp_path):
    from torchao.quantization import Int8WeightOnlyConfig

    saved = save_quantised(tiny_teacher, tmp_path, TorchAoConfig(Int8WeightOnlyConfig()))
    assert_read_as_saved(tmp_path, saved)


@pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)
@pytest.mark.parametrize("bits", ["load_in_8bit", "load_in_4bit"])
def test_a_teacher_that_bitsandbytes_quantised_is_read(tiny_teacher, tmp_path, bits):
    saved = save_quantised(tiny_teacher, tmp_path, BitsAndBytesConfig(**{bits: True}))
    assert_read_as_saved(tmp_path, saved)
