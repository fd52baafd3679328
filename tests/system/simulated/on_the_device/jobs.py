"""Whole jobs on the simulated GPU: capture, training, evaluation, report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.support.paths import AUSTEN
from kd.config.job import JobConfig
from kd.errors import Interrupted
from kd.pipeline import run_stages
from kd.progress import Event, Monitor

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
    "levers": {"loss": {"alpha": 0.3, "label_smoothing": 0.1, "z_loss": 1e-4}},
    "one document a row": {"data": {"packing": False}},
    "less memory": {
        "train": {"activation_offload": True, "gradient_checkpointing": "sqrt", "auto_batch": True},
    },
    "adapters": {
        "student": {"model": str(AUSTEN / "teacher"), "from_teacher": None, "lora": {"rank": 4}},
    },
    "muon": {"train": {"optim": "muon", "ema_decay": 0.9, "gradient_accumulation_steps": 2}},
    "curriculum": {"train": {"order": "curriculum", "adaptive_clipping": 0.1}},
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


def list_losses(events: list[Event]) -> list[float]:
    return [each.data["loss"] for each in events if "loss" in each.data]


@pytest.mark.parametrize(
    "name",
    [name if name == "defaults" else pytest.param(name, marks=pytest.mark.long) for name in JOBS],
)
def test_a_job_runs_to_its_report(name: str, tmp_path: Path) -> None:
    events: list[Event] = []
    run = tmp_path / "run"
    run_stages(make_job(**JOBS[name]), tmp_path / "home", run, Monitor(events.append))
    report = json.loads((run / "report.json").read_text(encoding="utf-8"))
    assert report["device"] == torch.cuda.get_device_name() and report["steps"] == STEPS
    assert report["student_perplexity"] < report["student_perplexity_before"]
    assert len(list_losses(events)) >= STEPS


@pytest.mark.long
def test_a_job_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    config = make_job(train={"precision": "fp32", "save_steps": 1})
    whole: list[Event] = []
    run_stages(config, tmp_path / "home", tmp_path / "whole", Monitor(whole.append))
    parts: list[Event] = []

    def stops() -> bool:
        return any(each.type == "checkpoint" and each.data["step"] == 2 for each in parts)

    with pytest.raises(Interrupted):
        run_stages(config, tmp_path / "home", tmp_path / "run", Monitor(parts.append, stops))
    again = Monitor(parts.append)
    run_stages(config, tmp_path / "home", tmp_path / "run", again)
    assert list_losses(parts) == list_losses(whole)
