"""Students as their files describe them, against the models themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.config.student import LoraConfig
from kd.memory.model_work import count_model_work
from kd.memory.phases import measure_saved_bytes
from kd.memory.step_memory import describe_student
from kd.models.adapters import add_adapters
from kd.models.attention.isolation import isolate_documents
from kd.planning.shapes import StudentPlan, describe_student_files, shorten
from kd.planning.students import measure_fake_passes
from tests.support.kd.zoo import ROWS, build
from tests.support.packed_zoo import make_random

PRECISIONS = ("fp32", "bf16", "bf16_pure")


def make_job(student: dict[str, Any], teacher: Path) -> JobConfig:
    return parse_config({
        "teacher": {"model": str(teacher)},
        "student": student,
        "data": {"train": "a.txt"},
        "train": {"max_steps": 1},
    })  # fmt: skip


def describe(student: dict[str, Any], folder: Path) -> StudentPlan:
    found = describe_student_files(make_job(student, folder), Path("/"), lambda: ROWS)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        # Of what a real pass keeps, the share that the shapes tell.
        ("llama tied", 0.97, 1.05),
        ("llama untied", 0.97, 1.05),
        ("qwen2", 0.97, 1.05),
        ("mistral", 0.97, 1.05),
        ("mixtral", 0.85, 1.05),
        ("gemma2 soft cap", 0.65, 1.0),
        ("gpt2", 0.75, 1.25),
        ("opt", 1.0, 1.4),
    ],
)
def test_a_student_is_what_its_files_say(
    name: str, least: float, most: float, tmp_path: Path
) -> None:
    student = build(name)
    student.save_pretrained(tmp_path)
    found = describe({"model": str(tmp_path)}, tmp_path)
    real = describe_student(student)
    assert (found.shape.head, found.shape.width) == (real.head, real.width)
    assert found.shape.numbers == real.numbers
    numbers = [[each.numbers for each in shape.layers] for shape in (found.shape, real)]
    assert numbers[0] == numbers[1]
    work = count_model_work(student, ROWS)
    assert (found.work.products, found.work.stored) == (work.products, work.stored)
    assert (found.work.attention, found.work.head) == (work.attention, work.head)
    isolate_documents(student)
    for precision in PRECISIONS:
        told = found.saved[precision].at(2, 48)
        kept = measure_saved_bytes(student, 48, precision).at(2, 48)
        assert least < told.layers / kept.layers < most, precision
        assert told.boundary == kept.boundary


@pytest.mark.parametrize(
    ("kind", "width"),
    # 4 heads in each of two layers; values of 6 numbers; heads of 16 and of 24; half is recurrent.
    [("llama", 2 * 64), ("deepseek_v3", 2 * 24), ("gemma4_text", 64 + 96), ("qwen3_next", 64)],
)
def test_attention_is_as_wide_as_the_layers_are(kind: str, width: int, tmp_path: Path) -> None:
    """A configuration names one width of heads, but layers have others, or no attention."""
    student = make_random(kind)
    student.save_pretrained(tmp_path)
    assert count_model_work(student, ROWS).attention == width
    assert describe({"model": str(tmp_path)}, tmp_path).work.attention == width


def test_adapters_are_told_as_peft_adds_them(tmp_path: Path) -> None:
    student = build("llama tied")
    student.save_pretrained(tmp_path)
    lora = {"rank": 4, "base": "float32"}
    found = describe({"model": str(tmp_path), "lora": lora}, tmp_path).shape
    real = describe_student(add_adapters(student, LoraConfig(rank=4)))
    assert found.head == real.head and found.outside == real.outside
    for told, kept in zip(found.layers, real.layers, strict=True):
        assert (told.frozen, told.frozen_bytes) == (kept.frozen, kept.frozen_bytes)
        assert sorted(each.shape for each in told.trained) == sorted(
            each.shape for each in kept.trained
        )


def test_a_student_cut_out_of_its_teacher_has_its_layers(tmp_path: Path) -> None:
    build("llama untied", num_hidden_layers=4).save_pretrained(tmp_path)
    found = describe({"from_teacher": {"layers": 3}}, tmp_path)
    real = describe_student(build("llama untied", num_hidden_layers=3))
    assert found.shape.numbers == real.numbers and len(found.shape.layers) == 3
    assert shorten(found, 2).shape.numbers == describe_student(build("llama untied")).numbers
    narrow = make_job({"from_teacher": {"layers": 3, "hidden_size": 16}}, tmp_path)
    assert describe_student_files(narrow, Path("/"), lambda: ROWS) is None


def make_hollow(name: str) -> PreTrainedModel:
    student = build(name)
    with torch.device("meta"):
        return type(student)(student.config)


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama tied", "gpt2", "qwen2", "gemma2 soft cap"])
def test_passes_without_memory_keep_what_real_ones_keep(name: str) -> None:
    hollow = make_hollow(name)
    found = measure_fake_passes(hollow, 48)
    for precision in PRECISIONS:
        real = measure_saved_bytes(build(name), 48, precision)
        assert found[precision] == real
    assert describe_student(hollow) == describe_student(build(name))


def test_experts_without_memory_are_told_from_bfloat16() -> None:
    found = measure_fake_passes(make_hollow("mixtral"), 48)
    half = measure_saved_bytes(build("mixtral"), 48, "bf16_pure")
    assert found["bf16_pure"] == half
    for precision in ("fp32", "bf16"):
        real = measure_saved_bytes(build("mixtral"), 48, precision).at(2, 48).layers
        assert real < found[precision].at(2, 48).layers < 1.25 * real
