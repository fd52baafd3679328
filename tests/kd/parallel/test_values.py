"""Ranks whose students are hollow get the values of rank 0, to the bit, and hold no more."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.support.ranks import run_ranks
from kd.config.jobfile import parse_config
from kd.evaluation.baseline import build_first_student
from kd.models.layers import find_decoder_layers, is_hollow
from kd.models.tokenizers import load_tokenizer
from kd.parallel.group import ALONE, Group
from kd.parallel.strategies import WholeLoss, collect_weights, replicate, shard
from kd.parallel.values import allocate, require_same_parameters
from tests.support.kd.shared_training import hash_tensors, make_shared_job

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.long]

CPU = torch.device("cpu")
STUDENTS: dict[str, dict[str, Any]] = {
    "tied": {"init": {"layers": 2, "hidden_size": 16}},
    "untied": {"init": {"layers": 3, "hidden_size": 16, "tie_word_embeddings": False}},
    "read": {"model": ""},
    "adapted": {"model": "", "lora": {"rank": 4, "base": "bfloat16"}},
    "cut": {"from_teacher": {"layers": 1}},
    "narrow": {"from_teacher": {"layers": 1, "intermediate_size": 16}},
}


def begin(group: Group, job: dict[str, Any], strategy: str) -> dict[str, Any]:
    """Build the student, spread it, and tell what each rank holds and what all hold together."""
    config = parse_config(job)
    assert config.teacher is not None
    student = build_first_student(config, load_tokenizer(Path(config.teacher.model)), group)
    hollow = is_hollow(student)
    require_same_parameters(student, group)
    module = WholeLoss([student])
    if strategy == "ddp":
        allocate(student, CPU)
        replicate(module)
    elif strategy == "fsdp":
        groups = [[layer] for layer in find_decoder_layers(student)]
        shard(module, groups, torch.float32, CPU, (group.size,))
    parts = [getattr(each, "to_local", lambda each=each: each)() for each in student.parameters()]
    return {
        "hollow": hollow,
        "held": sum(each.numel() for each in parts),
        "buffers": hash_tensors(student.buffers()),
        "tied": student.get_output_embeddings().weight is student.get_input_embeddings().weight,
        "weights": {
            name: hash_tensors([each]) for name, each in collect_weights(student, group).items()
        },
    }


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", STUDENTS)
def test_ranks_begin_with_the_student_of_one_process(
    tiny_teacher: Path, tiny_text: Path, name: str, strategy: str
) -> None:
    job = make_shared_job(tiny_teacher, tiny_text, max_steps=1)
    job["student"] = copy.deepcopy(STUDENTS[name])
    if "model" in job["student"]:
        job["student"]["model"] = str(tiny_teacher)
    alone = begin(ALONE, job, "single")
    first, second = run_ranks(2, begin, job, strategy)
    assert (first["hollow"], second["hollow"]) == (False, True)
    assert first["weights"] == alone["weights"]
    for each in (first, second):
        assert each["buffers"] == alone["buffers"]
        assert each["tied"] == alone["tied"]
    whole = alone["held"]
    held = first["held"] + second["held"]
    assert held == (2 * whole if strategy == "ddp" else whole)
