"""The command ``kd eval``: its output, its files and its exit code."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.support.paths import ROOT
from tests.support.commands import kd


@pytest.fixture
def job_file(tiny_teacher: Path, tiny_text: Path, tmp_path: Path) -> Path:
    job = {
        "kind": "precompute",
        "name": "tiny",
        "teacher": {"model": str(tiny_teacher)},
        "data": {
            "train": str(tiny_text),
            "validation_fraction": 0.1,
            "sequence_length": 32,
            "max_eval_samples": 3,
        },
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    return tmp_path / "job.yaml"


@pytest.mark.long
def test_a_model_is_measured_and_the_report_printed(
    job_file: Path, tiny_teacher: Path, tmp_path: Path
) -> None:
    done = kd(
        "eval",
        tiny_teacher,
        job_file,
        "--home",
        tmp_path / "home",
        "--set",
        "evaluation.prompts=[She was]",
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "home" / "evaluations" / "tiny"
    assert (folder / "report.md").read_text(encoding="utf-8").strip() in done.stdout
    assert f"report: {folder / 'report.md'}" in done.stdout and "loading the teacher" in done.stderr
    assert {path.name for path in folder.glob("*.png")} == {"reliability.png", "kl_by_context.png"}


@pytest.mark.long
def test_as_json_into_a_folder_of_ones_own(
    job_file: Path, tiny_teacher: Path, tmp_path: Path
) -> None:
    target = os.path.relpath(tiny_teacher, ROOT)
    done = kd(
        "eval",
        target,
        job_file,
        "--home",
        tmp_path / "home",
        "--out",
        tmp_path / "out",
        "--json",
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found == json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert found["model"] == str(tiny_teacher.resolve())
    # As a student it pays for the mass of the rows of its LM head that no token has.
    student, teacher = (found["evaluation"]["models"][each] for each in ("student", "teacher"))
    assert student["kl"] == pytest.approx(student["loss"] - teacher["loss"], rel=1e-6)
    assert 0.0 < student["kl"] < 0.1
    # The text is kept there, tokenised; the report is not.
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["texts"]


def test_a_wrong_job_is_refused_before_anything_is_loaded(
    job_file: Path, tiny_teacher: Path, tmp_path: Path
) -> None:
    done = kd(
        "eval",
        tiny_teacher,
        job_file,
        "--home",
        tmp_path,
        "--set",
        "data.train=nowhere.txt",
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 2 and "no file matches" in done.stderr
