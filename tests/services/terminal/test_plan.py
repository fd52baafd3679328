"""``kd plan``: what it prints, its JSON, its exit codes, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

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


def write_runs(folder: Path, count: int) -> Path:
    for number in range(count):
        run = folder / f"run{number}"
        run.mkdir(parents=True)
        tokens = 10**6 * 2**number
        report = {
            "parameters": 10**6, "tokens": tokens, "held_out_tokens": 900,
            "student_perplexity": 8 + 2e4 / tokens**0.5,
        }  # fmt: skip
        (run / "report.json").write_text(json.dumps(report))
    return folder


def test_kd_plan_prints_the_best_settings_and_why(job_file: Path, tmp_path: Path) -> None:
    asked = ("plan", job_file, "--home", tmp_path / "home", "--devices", "2xh100", "--price", "3")
    done = kd(*asked)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("2 x h100 with 79.6 GiB each, by the maker's figures; all numbers")
    assert re.search(r"^1 +fsdp +4 +2 +none +bf16 ", done.stdout, re.MULTILINE)
    assert "1: the fastest of the" in done.stdout and "buffers" in done.stdout
    assert not (tmp_path / "home").exists()
    found: dict[str, Any] = json.loads(kd(*asked, "--json").stdout)
    assert found["budget"]["flops"] == 6 * found["budget"]["parameters"] * found["budget"]["tokens"]
    best = found["candidates"][0]
    assert best["memory_bytes"] == sum(best["memory"].values()) + best["process"]
    assert best["cost"] is not None and found["expected_loss"] is None


def test_kd_plan_says_what_to_change_where_nothing_fits(job_file: Path, tmp_path: Path) -> None:
    large = "student.init={layers: 2, hidden_size: 32768, num_attention_heads: 256}"
    asked = ("plan", job_file, "--home", tmp_path / "home", "--devices", "t4", "--set", large)
    done = kd(*asked)
    assert done.returncode == 1, done.stderr
    assert "Nothing fits. The least (strategy single" in done.stdout
    assert re.search(r"^student\.lora \{rank: 16\} +[\d.]+ GiB", done.stdout, re.MULTILINE)


def test_finished_runs_tell_the_loss_to_expect(job_file: Path, tmp_path: Path) -> None:
    asked = ("plan", job_file, "--home", tmp_path / "home", "--devices", "h100")
    done = kd(*asked, "--runs", write_runs(tmp_path / "runs", 6))
    assert done.returncode == 0, done.stderr
    assert "Expected held-out loss: " in done.stdout and "by E + B / D^b" not in done.stderr
    assert "Law: E + B / D^b" in done.stdout and "Beyond the runs: " in done.stdout
    few = kd(*asked, "--runs", write_runs(tmp_path / "few", 4))
    assert few.returncode == 2 and "a law needs 5 finished runs, but there are 4" in few.stderr
    none = kd(*asked, "--runs", tmp_path / "nowhere")
    assert none.returncode == 2 and "has no report.json" in none.stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--devices", "8xh1000"), "'h1000', which is not known"),
        (("--devices", "0xh100"), "asks for 0 devices"),
        (("--devices", "5xh100"), "cannot be split evenly over 5 devices"),
        (("--set", "kind=precompute", "--set", "student=null", "--set", "train=null"),
         "kind precompute trains no student"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_refused(
    arguments: tuple[str, ...], why: str, job_file: Path, tmp_path: Path
) -> None:
    done = kd("plan", job_file, "--home", tmp_path / "home", *arguments)
    assert done.returncode == 2 and why in done.stderr, done.stderr
