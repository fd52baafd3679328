"""``kd convert``: what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from tests.support.commands import kd

GKD = """
model_name_or_path: {model}
teacher_model_name_or_path: {model}
dataset_name: org/chats
lmbda: 0.5
max_steps: 10
max_length: 128
output_dir: out
"""


def test_kd_convert_prints_a_job_that_kd_validate_accepts(
    tmp_path: Path, tiny_teacher: Path
) -> None:
    file, job = tmp_path / "gkd.yaml", tmp_path / "job.yaml"
    file.write_text(GKD.format(model=tiny_teacher))
    done = kd("convert", file, "--from", "trl")
    assert done.returncode == 0, done.stderr
    assert "# lmbda: the student writes no texts here" in done.stdout
    job.write_text(done.stdout)
    checked = kd("validate", job, "--home", tmp_path / "home")
    assert checked.returncode == 0, checked.stderr
    found = json.loads(kd("convert", file, "--from", "trl", "--json").stdout)
    assert found["job"] == yaml.safe_load(done.stdout)
    written = tmp_path / "written.yaml"
    assert kd("convert", file, "--from", "trl", "--out", written).stdout == ""
    assert written.read_text() == done.stdout
    again = kd("convert", file, "--from", "trl", "--out", written)
    assert again.returncode == 1 and "File exists" in again.stderr
    assert {"field", "text"} == set(found["remarks"][0])


def test_kd_convert_gives_fine_tuning_a_teacher(tmp_path: Path) -> None:
    file = tmp_path / "sft.yaml"
    file.write_text("model_name_or_path: org/student\ndataset_name: org/chats\n")
    refused = kd("convert", file, "--from", "trl")
    assert refused.returncode == 2
    assert "names no teacher" in refused.stderr and "--teacher MODEL" in refused.stderr
    done = kd("convert", file, "--from", "trl", "--teacher", "org/teacher")
    assert yaml.safe_load(done.stdout)["teacher"] == {"model": "org/teacher"}


def test_kd_convert_refuses_a_file_of_another_tool(tmp_path: Path) -> None:
    file = tmp_path / "gkd.yaml"
    file.write_text(GKD)
    done = kd("convert", file, "--from", "axolotl")
    assert done.returncode == 2
    assert "base_model is missing.\nremedy: Give a job file of axolotl." in done.stderr
