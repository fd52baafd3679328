"""``kd init`` writes job files that are valid, and asks on a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from bench.support.paths import ROOT
from kd.config.jobfile import load_config
from kd.config.routing.parts import list_members
from kd.config.templates.filling import fill_template, list_templates
from kd.errors import ConfigError
from tests.support.commands import kd

ANSWERS = {"teacher": "org/teacher", "student": "org/student", "train": "texts/*.txt"}


@pytest.mark.parametrize("template", list_templates())
@pytest.mark.parametrize("validation", [None, "held out: it's.txt"])
def test_every_template_is_a_valid_job_with_the_answers(
    template: str, validation: str | None, tmp_path: Path
) -> None:
    text = fill_template(template, "my-job", {**ANSWERS, "validation": validation})
    (tmp_path / "job.yaml").write_text(text, encoding="utf-8")
    job = load_config(tmp_path / "job.yaml")
    assert job.name == "my-job"
    member = list_members(job)[-1]  # of several teachers that of the text
    assert member.job.teacher is not None and member.job.teacher.model == "org/teacher"
    assert job.student is not None and job.student.model == "org/student"
    assert member.job.data.train == ("texts/*.txt",)
    held_out = validation if template != "teachers" else None
    assert job.data.validation == ((held_out,) if held_out else ())
    assert "# " in text


@pytest.mark.parametrize("template", ["distill", "teachers"])
def test_a_gguf_file_stands_below_its_model(template: str, tmp_path: Path) -> None:
    text = fill_template(template, "job", ANSWERS | {"gguf_file": "a.gguf"})
    (tmp_path / "job.yaml").write_text(text, encoding="utf-8")
    teacher = list_members(load_config(tmp_path / "job.yaml"))[-1].job.teacher
    assert teacher is not None and teacher.gguf_file == "a.gguf"


def test_a_number_of_layers_is_a_student_of_the_teacher_s_layers() -> None:
    text = fill_template("distill", "job", {**ANSWERS, "student": "4 layers"})
    assert "from_teacher: {layers: 4}" in text


def test_a_name_that_no_job_may_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="name"):
        fill_template("distill", "My Job", ANSWERS)


def test_the_help_names_every_template() -> None:
    shown = kd("init", "--help").stdout
    assert all(template in shown for template in list_templates())


def test_options_make_a_file_and_never_replace_one(tmp_path: Path) -> None:
    options = [f"--{name}={value}" for name, value in ANSWERS.items()]
    done = kd("init", "job.yaml", *options, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "kd validate job.yaml" in done.stderr
    assert load_config(tmp_path / "job.yaml").name == "job"
    again = kd("init", "job.yaml", *options, folder=tmp_path)
    assert again.returncode == 1
    assert "File exists" in again.stderr


def test_a_teacher_in_one_gguf_file_alone_is_named_by_it(tmp_path: Path) -> None:
    folder = tmp_path / "smol"
    folder.mkdir()
    (folder / "a-Q4.gguf").touch()
    options = [f"--{name}={value}" for name, value in {**ANSWERS, "teacher": "smol"}.items()]
    assert kd("init", "job.yaml", *options, folder=tmp_path).returncode == 0
    teacher = load_config(tmp_path / "job.yaml").teacher
    assert teacher is not None and (teacher.model, teacher.gguf_file) == ("smol", "a-Q4.gguf")
    (folder / "config.json").touch()  # its own weights are the model
    assert kd("init", "other.yaml", *options, folder=tmp_path).returncode == 0
    assert "gguf_file" not in (tmp_path / "other.yaml").read_text(encoding="utf-8")


def test_without_a_terminal_missing_answers_are_named(tmp_path: Path) -> None:
    done = kd("init", "--teacher=org/teacher", folder=tmp_path)
    assert done.returncode == 2
    assert "--student, --train" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_terminal_is_asked(tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    program = subprocess.Popen(
        [sys.executable, "-m", "services.terminal.cli", "init", "asked.yaml"],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    os.close(follower)
    os.write(leader, b"org/teacher\n2 layers\ntexts\n\n")
    assert program.wait(timeout=120) == 0
    os.close(leader)
    job = load_config(tmp_path / "asked.yaml")
    assert job.student is not None and job.student.from_teacher is not None
    assert job.data is not None and job.data.train == ("texts",)
