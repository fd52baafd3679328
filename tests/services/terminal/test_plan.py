"""``kd plan``: what it prints, its JSON, its exit codes, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kd.memory.devices import DEVICE_KINDS
from services.terminal.commands.before import forecast
from tests.support.commands import kd


@pytest.fixture
def job_file(tiny_teacher: Path, tiny_text: Path, tmp_path: Path) -> Path:
    job = {
        "kind": "distill",
        "teacher": {"model": str(tiny_teacher)},
        "student": {"init": {"layers": 4, "hidden_size": 32}},
        "data": {"train": str(tiny_text), "sequence_length": 64},
        "train": {"max_steps": 100, "batch_size": 8},
    }
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def test_the_help_names_every_kind_of_device() -> None:
    assert ", ".join(DEVICE_KINDS) == forecast._KINDS


def test_kd_plan_prints_the_strategies_that_fit(job_file: Path, tmp_path: Path) -> None:
    asked = ("plan", job_file, "--home", tmp_path / "home", "--devices", "2xh100", "--price", "3")
    done = kd(*asked)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("2 x h100 with 79.6 GiB each, by the maker's figures; all numbers")
    # One GPU is offered beside both.
    assert re.search(r"^single +1 +8 +1 +none +bf16 ", done.stdout, re.MULTILINE)
    assert re.search(r"^ddp +2 +4 +2 +none +bf16 ", done.stdout, re.MULTILINE)
    assert "fsdp, resources: {hosts: 1, gpus: 2}: weights " in done.stdout
    assert "buffers" in done.stdout
    assert "A capture of these tokens: " in done.stdout
    assert not (tmp_path / "home").exists()
    found: dict[str, Any] = json.loads(kd(*asked, "--json").stdout)
    best = found["strategies"][0]
    assert best["cost"] is not None and best["memory_bytes"] > sum(best["memory"].values())
    longer: dict[str, Any] = json.loads(kd(*asked, "--tokens", "1e9", "--json").stdout)
    assert longer["tokens"] == pytest.approx(1e9, rel=1e-3)
    ratio = longer["tokens"] / found["tokens"]
    assert longer["strategies"][0]["cost"] == pytest.approx(ratio * best["cost"], rel=0.1)


def test_kd_plan_says_what_to_change_where_nothing_fits(job_file: Path, tmp_path: Path) -> None:
    large = "student.init={layers: 2, hidden_size: 32768, num_attention_heads: 256}"
    asked = ("plan", job_file, "--home", tmp_path / "home", "--devices", "t4", "--set", large)
    done = kd(*asked)
    assert done.returncode == 1, done.stderr
    assert "Nothing fits. This needs least: " in done.stdout
    assert "- train.optim adamw_8bit, adafactor or lion" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--devices", "8xh1000"), "'8xh1000' is no number and kind"),
        (("--devices", "0xh100"), "'0xh100' is no number and kind"),
        (("--devices", "cpu"), "'cpu' is no number and kind"),
        (("--devices", "5xh100"), "cannot be split evenly over 5 devices"),
        (("--devices", "h100", "--set", "kind=precompute", "--set", "student=null",
          "--set", "train=null"), "kind precompute trains no student"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_refused(
    arguments: tuple[str, ...], why: str, job_file: Path, tmp_path: Path
) -> None:
    done = kd("plan", job_file, "--home", tmp_path / "home", *arguments)
    assert done.returncode == 2 and why in done.stderr, done.stderr
