"""Whole jobs on the simulated GPU: capture, training, evaluation, report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.support.paths import AUSTEN, ROOT
from bench.support.waiting import PATIENCE_SECONDS
from kd.config.job import JobConfig
from kd.errors import Interrupted
from kd.pipeline import run_stages
from kd.progress import Event, Monitor
from tests.support.simulated_gpu.losses import list_losses, run_job

# Libraries warn on a GPU of what they do not on a CPU.
pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 4
#: Each is a job's difference from ``BASE``; the first is not marked long.
JOBS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "float16": {"train": {"precision": "fp16"}},
    "bfloat16 alone": {"train": {"precision": "bf16_pure"}},
    "float32": {"teacher": {"dtype": "float32"}, "train": {"precision": "fp32"}},
    "tempered": {"cache": {"profile": "tempered"}, "loss": {"temperature": 2.0}},
    "look-ahead": {
        "cache": {"profile": "tempered"},
        "loss": {"temperature": {"mode": "lookahead", "interval": 2}},
    },
    "topk": {"cache": {"profile": "topk"}},
    "dense": {"cache": {"profile": "dense"}},
    "jsd": {"cache": {"profile": "hidden"}, "loss": {"divergence": "jsd"}},
    "features": {"cache": {"profile": "hidden"}, "loss": {"features": {"weight": 1.0}}},
    "levers": {"loss": {"alpha": 0.3, "label_smoothing": 0.1}},
    "one document a row": {"data": {"packing": False}},
    "less memory": {
        "train": {"activation_offload": True, "gradient_checkpointing": "sqrt", "auto_batch": True},
    },
    "adapters": {
        "student": {"model": str(AUSTEN / "teacher"), "from_teacher": None, "lora": {"rank": 4}},
    },
    "muon": {"train": {"optim": "muon", "ema_decay": 0.9, "gradient_accumulation_steps": 2}},
    "curriculum": {"train": {"order": "curriculum"}},
    "evaluation": {"evaluation": {"baseline": True, "continuations": 2, "prompts": ["It was"]}},
}
BASE: dict[str, Any] = {
    "kind": "distill",
    "name": "simulated",
    "teacher": {"model": str(AUSTEN / "teacher")},
    "student": {"from_teacher": {"layers": 1}},
    "data": {
        "train": str(AUSTEN / "text/sensesensibility.txt"),
        "sequence_length": 48,
        "max_train_samples": 16,
    },
    "train": {"max_steps": STEPS, "batch_size": 4, "warmup_steps": 1, "logging_steps": 1},
}


def make_job(**changes: Any) -> JobConfig:
    fields = {
        name: {**value, **changes.get(name, {})} if isinstance(value, dict) else value
        for name, value in BASE.items()
    }
    return JobConfig.model_validate(changes | fields)


@pytest.mark.parametrize(
    "name",
    [name if name == "defaults" else pytest.param(name, marks=pytest.mark.long) for name in JOBS],
)
def test_a_job_runs_to_its_report(name: str, tmp_path: Path) -> None:
    losses = run_job(make_job(**JOBS[name]), tmp_path)
    report = json.loads((tmp_path / "run/report.json").read_text(encoding="utf-8"))
    assert report["device"] == torch.cuda.get_device_name() and report["steps"] == STEPS
    assert len(losses) >= STEPS
    # The student with adapters is the teacher itself, which has learned all there is.
    if name != "adapters":
        assert report["student_perplexity"] < report["student_perplexity_before"]


@pytest.mark.long
@pytest.mark.parametrize("profile", ["threshold", "hidden"])
def test_in_float32_the_losses_are_those_of_a_cpu(profile: str, tmp_path: Path) -> None:
    config = make_job(
        teacher={"dtype": "float32"}, train={"precision": "fp32"}, cache={"profile": profile}
    )
    there = run_job(config, tmp_path / "there")
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.simulated_gpu.losses", str(tmp_path / "here")],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        input=config.model_dump_json(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert there == pytest.approx(json.loads(done.stdout.splitlines()[-1]), rel=1e-6)


@pytest.mark.long
def test_a_job_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    config = make_job(train={"precision": "fp32", "save_steps": 1})
    whole = run_job(config, tmp_path / "whole")
    parts: list[Event] = []

    def stops() -> bool:
        return any(each.type == "checkpoint" and each.data["step"] == 2 for each in parts)

    with pytest.raises(Interrupted):
        run_stages(config, tmp_path / "home", tmp_path / "run", Monitor(parts.append, stops))
    run_stages(config, tmp_path / "home", tmp_path / "run", Monitor(parts.append))
    assert list_losses(parts) == whole
