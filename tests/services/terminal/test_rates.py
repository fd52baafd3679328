"""``kd lr``: the table, the plot, its JSON, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.support.commands import kd


@pytest.fixture
def job_file(tiny_teacher: Path, tiny_text: Path, tmp_path: Path) -> Path:
    job = {
        "kind": "distill",
        "teacher": {"model": str(tiny_teacher)},
        "student": {"init": {"layers": 2, "hidden_size": 16}},
        "data": {"train": str(tiny_text), "sequence_length": 64, "max_train_samples": 20},
        "train": {
            "epochs": 5, "batch_size": 4, "warmup_steps": 5, "learning_rate": 0.02,
        },
    }  # fmt: skip
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def test_kd_lr_shows_the_rates_of_the_whole_run(job_file: Path, tmp_path: Path) -> None:
    asked = ("lr", job_file, "--home", tmp_path / "home")
    done = kd(*asked, "--out", tmp_path / "rates.png")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1].split() == ["steps", "25"] and lines[3].split() == ["peak", "0.02"]
    rows = [line.split() for line in lines if line.endswith("%")]
    assert rows[0] == ["1", "0", "0.0%"] and ["6", "0.02", "100.0%"] in rows
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads(kd(*asked, "--json").stdout)
    assert len(found["rates"]) == found["steps"] == 25 and max(found["rates"]) == 0.02


def test_kd_lr_refuses_a_schedule_that_cannot_be_made(job_file: Path) -> None:
    done = kd(
        "lr", job_file, "--set", "train.lr_scheduler_type=multistep",
        "--set", "train.lr_scheduler_kwargs={milestones: [10, 100]}",
    )  # fmt: skip
    assert done.returncode == 1
    assert "must be steps after the 5 of the warm-up" in done.stderr
