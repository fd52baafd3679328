"""A small real job, and a service that runs it in real children."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.support.harness import Parts


def make_body(teacher: Path, text: Path, name: str, resources: dict[str, int]) -> dict[str, Any]:
    """Make a job of 60 steps, by ddp, with a checkpoint every 10 steps."""
    return {
        "name": name,
        "max_attempts": 100,
        "resources": resources,
        "teacher": {"model": str(teacher), "batch_size": 2},
        "student": {"init": {"layers": 1, "hidden_size": 32}},
        "data": {"train": str(text), "sequence_length": 32, "max_eval_samples": 8},
        "cache": {"shard_sequences": 8},
        "train": {
            "max_steps": 60, "batch_size": 4, "save_steps": 10, "eval_steps": 30,
            "logging_steps": 5, "strategy": "ddp",
        },
    }  # fmt: skip


def start_service(new_parts: Callable[..., Parts], teacher: Path) -> Parts:
    """Start a store and an API whose jobs may read ``teacher`` and its neighbours."""
    roots = (teacher.parent.parent,)
    parts = new_parts(
        child_module="services.worker.stage_child", data_roots=roots, silence_seconds=300.0
    )
    parts.start_api()
    return parts


def post(parts: Parts, body: dict[str, Any]) -> str:
    """Submit a job over HTTP; returns its id."""
    answer = parts.http.post("/jobs", json=body)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])
