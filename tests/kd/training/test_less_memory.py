"""Settings that need less memory, each beside the same training in float32."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from cache.store import open_cache
from kd.config.fields.removed import restore_removed
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.errors import ConfigError
from kd.memory.model_memory import estimate_least_memory
from kd.models.adapters import list_trained_parameters
from kd.models.loading import build_student
from kd.models.saving import load_saved_student, save_student
from kd.preflight.problems import Machine, find_problems
from kd.progress import SILENT
from kd.stages.capture import run_precompute
from kd.tracking.metrics import read_metrics
from kd.training.loop import train
from kd.training.resume.identity import (
    FREE_FIELDS,
    NEWER_FIELDS,
    TEACHER_FREE_FIELDS,
    compute_resume_identity,
)
from tests.support.kd.zoo import build

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
STEPS = 30
#: Nats by which the loss of a step may differ from that of float32; training lowers it by 0.2.
CURVE_TOLERANCE = 0.02
BASES = ("float32", "bfloat16")


def make_job(teacher: Path, text: Path, base: str = "float32", **train: Any) -> JobConfig:
    return parse_config({
        "teacher": {"model": str(teacher), "batch_size": 8},
        "student": {"from_teacher": {"layers": 1}, "lora": {"rank": 4, "base": base}},
        "data": {
            "train": str(text), "validation_fraction": 0.1, "sequence_length": 32,
            "max_train_samples": 40, "max_eval_samples": 4,
        },
        "cache": {"profile": "hidden", "shard_sequences": 8},
        "train": {
            "max_steps": STEPS, "batch_size": 4, "eval_steps": STEPS, "save_steps": STEPS,
            "logging_steps": 1, "learning_rate": 1e-2, "precision": "bf16", **train,
        },
    })  # fmt: skip


@pytest.mark.long
def test_a_base_in_bfloat16_learns_as_one_in_float32(
    tiny_teacher: Path, tiny_text: Path, tokenizer: Any, tmp_path: Path
) -> None:
    losses: dict[str, list[float]] = {}
    for name, base, precision in (
        ("reference", "float32", "fp32"),
        ("float32", "float32", "bf16"),
        ("bfloat16", "bfloat16", "bf16"),
    ):
        config = make_job(tiny_teacher, tiny_text, base, precision=precision)
        summary = run_precompute(config, tmp_path, tmp_path, SILENT).cache
        source = open_cache(tmp_path / "caches" / summary["fingerprint"])
        torch.manual_seed(0)
        student = build_student(config.student, tokenizer, 32, config.teacher_files)
        dtypes = {each.dtype for each in student.parameters() if not each.requires_grad}
        assert dtypes == {getattr(torch, base)}
        assert {each.dtype for each in list_trained_parameters(student)} == {torch.float32}
        train(config, source, student, 2048, tmp_path / name, SILENT)
        lines = read_metrics(tmp_path / name / "metrics.jsonl")
        losses[name] = [line["loss"] for line in lines if line["type"] == "metrics"]
    assert losses["reference"][0] - losses["reference"][-1] > 0.1, "the student learns"
    for name in BASES:
        pairs = zip(losses["reference"], losses[name], strict=True)
        assert max(abs(one - other) for one, other in pairs) < CURVE_TOLERANCE, name


def test_adapters_are_merged_into_a_base_of_float32(
    tiny_teacher: Path, tiny_text: Path, tokenizer: Any, tmp_path: Path
) -> None:
    """Small adapters on a base in bfloat16 would be lost if they were rounded with it."""
    config = make_job(tiny_teacher, tiny_text, "bfloat16")
    student = build_student(config.student, tokenizer, 32, config.teacher_files)
    layer = student.get_submodule("model.layers.0.mlp.up_proj")
    base = layer.get_base_layer().weight.detach().float().clone()
    with torch.no_grad():
        for parameter in list_trained_parameters(student):
            parameter.fill_(1e-3)
    save_student(student, tokenizer, tmp_path / "saved", config.student, torch.float32)
    merged = load_saved_student(tmp_path / "saved").get_submodule("model.layers.0.mlp.up_proj")
    # alpha / rank times rank products of 1e-3 and 1e-3.
    torch.testing.assert_close(merged.weight - base, torch.full_like(base, 32e-6), rtol=0.1, atol=0)


def test_a_mixture_of_experts_takes_a_base_in_bfloat16(tmp_path: Path, tokenizer: Any) -> None:
    build("mixtral").save_pretrained(tmp_path)
    plan = parse_student(tmp_path)
    student = build_student(plan.student, tokenizer, 32)
    with torch.autocast("cpu", torch.bfloat16):
        found = student(input_ids=torch.arange(8)[None]).logits
    found.float().square().mean().backward()
    assert all(each.grad is not None for each in list_trained_parameters(student))


def parse_student(folder: Path) -> JobConfig:
    student = {"model": str(folder), "lora": {"rank": 2, "base": "bfloat16"}}
    return parse_config({
        "kind": "train", "student": student, "data": {"train": "text.txt"},
        "loss": {"alpha": 1.0}, "train": {"max_steps": 1, "precision": "bf16"},
    })  # fmt: skip


def test_a_base_in_bfloat16_is_refused_without_products_in_it(
    tiny_teacher: Path, tiny_text: Path
) -> None:
    with pytest.raises(ConfigError, match=r"train\.precision is fp32"):
        make_job(tiny_teacher, tiny_text, "bfloat16", precision="fp32")
    # "auto" is float32 on a CPU.
    job = make_job(tiny_teacher, tiny_text, "bfloat16", precision="auto")
    (problem,) = find_problems(job, machine=Machine(device=CPU))
    assert problem.pointer == "/student/lora/base" and "fp32 on this device" in problem.detail
    assert find_problems(make_job(tiny_teacher, tiny_text), machine=Machine(device=CPU)) == []


def test_a_base_in_bfloat16_takes_half_the_memory(tmp_path: Path) -> None:
    build("mixtral").save_pretrained(tmp_path)
    job = parse_student(tmp_path)
    assert job.student is not None and job.student.lora is not None
    lora = job.student.lora.model_copy(update={"base": "float32"})
    plain = job.model_copy(update={"student": job.student.model_copy(update={"lora": lora})})
    whole, half = (estimate_least_memory(each, Path()) for each in (plain, job))
    assert whole is not None and half == whole // 2


def test_checkpoints_from_before_the_field_are_resumed(tiny_teacher: Path, tiny_text: Path) -> None:
    jobs = [make_job(tiny_teacher, tiny_text, base) for base in BASES]
    plain, rounded = (compute_resume_identity(each, "source") for each in jobs)
    assert plain != rounded
    unknown: dict[str, Any] = {
        "student": {"lora": {"base"}},
        "loss": {"router_balance", "tail_control", "balance", "tokenizers"},
        "teacher": {"quantization", *TEACHER_FREE_FIELDS},
    }
    newer = NEWER_FIELDS.keys() - {"lm_head_floor"}
    sections = jobs[0].model_dump(
        mode="json", include={"student", "loss", "teacher"}, exclude=unknown
    )
    options = restore_removed(jobs[0].require_train().model_dump(mode="json"), "train.")
    for name in (newer | FREE_FIELDS) & options.keys():
        del options[name]
    content = [
        TypeAdapter(dict[str, Any]).dump_json(restore_removed(sections)).decode(),
        TypeAdapter(dict[str, Any]).dump_json(options).decode(),
        "source",
    ]
    assert plain == hashlib.sha256("\n".join(content).encode()).hexdigest()
