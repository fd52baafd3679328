"""The plan of a job against the real student, its optimiser's state and its files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from kd.config.jobfile import parse_config
from kd.models.loading import build_student
from kd.models.tokenizers import load_tokenizer
from services.api.answers.views import MemoryEstimate
from services.api.planning import plan_job
from services.settings import Settings
from tests.support.kd.optimizers import measure_optimizer_bytes
from tests.support.kd.zoo import build

INIT = {
    "layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
OPTIMIZERS = ["adamw", "adafactor", "muon", "lion", "lars", "schedule_free"]


def make_job(student: dict[str, Any], teacher: Path, optim: str) -> dict[str, Any]:
    train = {"max_steps": 1, "optim": optim}
    if optim == "schedule_free":
        train |= {"lr_scheduler_type": "constant"}
    return {
        "kind": "distill",
        "name": "planned",
        "teacher": {"model": str(teacher)},
        "student": student,
        "data": {"train": "a.txt", "sequence_length": 32},
        "train": train,
    }


def plan_memory(job: dict[str, Any], home: Path) -> MemoryEstimate:
    return plan_job(parse_config(job), Settings(home=home, data_roots=["/"]), []).memory


def require_real_state(found: MemoryEstimate, student: PreTrainedModel, job: Any) -> None:
    """The plan's bytes are the weights, their gradients and what the optimiser really keeps."""
    numbers = student.num_parameters()
    state = measure_optimizer_bytes(student, parse_config(job).require_train())
    assert found.student_parameters == numbers
    assert found.student_bytes == 2 * 4 * numbers + state


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_the_plan_of_a_fresh_student_counts_the_real_optimiser_s_state(
    optim: str, tied: bool, tiny_teacher: Path, tmp_path: Path
) -> None:
    job = make_job({"init": INIT | {"tie_word_embeddings": tied}}, tiny_teacher, optim)
    config = parse_config(job)
    student = build_student(config.student, load_tokenizer(tiny_teacher), 32, config.teacher)
    require_real_state(plan_memory(job, tmp_path), student, job)


@pytest.mark.parametrize("family", ["llama tied", "gpt2"])
@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_the_plan_of_a_saved_student_counts_the_real_optimiser_s_state(
    optim: str, family: str, tiny_teacher: Path, tmp_path: Path
) -> None:
    student = build(family)
    student.save_pretrained(tmp_path / "student")
    job = make_job({"model": str(tmp_path / "student")}, tiny_teacher, optim)
    require_real_state(plan_memory(job, tmp_path), student, job)


def test_adapters_and_a_moving_average_change_the_plan(tiny_teacher: Path, tmp_path: Path) -> None:
    build("llama tied").save_pretrained(tmp_path / "student")
    job = make_job({"model": str(tmp_path / "student")}, tiny_teacher, "adamw")
    numbers = plan_memory(job, tmp_path).student_parameters or 0
    averaged = job | {"train": job["train"] | {"ema_decay": 0.9}}
    assert plan_memory(averaged, tmp_path).student_bytes == 5 * 4 * numbers
    adapted = job | {"student": job["student"] | {"lora": {}}}
    assert plan_memory(adapted, tmp_path).student_bytes == 4 * numbers


def test_planning_imports_no_torch() -> None:
    code = "import sys, services.api.planning; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
