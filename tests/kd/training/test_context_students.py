"""A student that is its own teacher learns a context, which it does not read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kd.config.jobfile import parse_config
from kd.files import read_json
from kd.pipeline import run_stages
from kd.progress import Monitor
from kd.tracking.metrics import read_metrics

ROWS = [
    {"prompt": f"Number {number}:", "completion": f" {number} is a number, and so is {number}."}
    for number in range(40)
]


def make_job(teacher: Path, folder: Path, **student: Any) -> dict[str, Any]:
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return {
        "kind": "distill",
        "name": "context",
        "teacher": {"model": str(teacher), "context": "Say that all is well. {prompt}"},
        "student": {"model": str(teacher), **student},
        "data": {
            "train": str(rows), "format": "prompt_completion", "sequence_length": 40,
            "validation_fraction": 0.2,
        },
        "cache": {"shard_sequences": 16},
        "loss": {"alpha": 0.0},
        "train": {
            "max_steps": 40, "batch_size": 8, "learning_rate": 1e-2, "eval_steps": 8,
        },
        "evaluation": {"continuations": 1, "max_new_tokens": 4},
    }  # fmt: skip


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("student", [{}, {"lora": {"rank": 4}}], ids=["whole", "lora"])
def test_the_held_out_kl_to_the_teacher_that_was_told_more_falls(
    tiny_teacher: Path, tmp_path: Path, student: dict[str, Any]
) -> None:
    if student:
        pytest.importorskip("peft")
    job = make_job(tiny_teacher, tmp_path, **student)
    run = tmp_path / "home" / "runs" / "context"
    run_stages(parse_config(job), tmp_path / "home", run, Monitor())
    measured = [
        line["validation_kl"]
        for line in read_metrics(run / "metrics.jsonl")
        if "validation_kl" in line
    ]
    assert measured[0] > 0.1 and measured[-1] < 0.8 * measured[0], measured
    found = read_json(run / "report.json")["evaluation"]
    assert "reads a context" in found["without_teacher"]
