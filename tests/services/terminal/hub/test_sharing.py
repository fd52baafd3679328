"""The commands ``kd report`` and ``kd export``; those of the hub are in tests/kd/exchange/hub."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kd.files import MARK, RUN_FORMAT, write_json
from tests.support.caches import content
from tests.support.commands import kd

#: The least that a report of a training holds.
REPORT = {
    "name": "small",
    "teacher": "teacher",
    "steps": 20,
    "kept_step": 20,
    "tokens": 4096,
    "alpha": 1.0,
    "temperature": 1.0,
    "parameters": 5,
    "student_perplexity": 31.25,
    "held_out_tokens": 5000,
}


@pytest.fixture
def run(tiny_teacher: Path, tmp_path: Path) -> Path:
    """A finished run in a data folder: its report and its student."""
    folder = tmp_path / "home" / "runs" / "my-run"
    write_json(folder / "report.json", REPORT)
    (folder / "student").mkdir()
    for path in tiny_teacher.iterdir():
        (folder / "student" / path.name).write_bytes(path.read_bytes())
    return folder


def test_a_report_is_shown_printed_as_json_and_written_as_a_page(run: Path, tmp_path: Path) -> None:
    home = ("--home", tmp_path / "home")
    assert "31.25" in kd("report", "last", *home).stdout
    assert json.loads(kd("report", "my", "--json", *home).stdout) == REPORT
    done = kd("report", run, "--html")
    assert done.stdout.strip() == str(run / "report.html")
    assert "31.25" in (run / "report.html").read_text(encoding="utf-8")
    missing = kd("report", "other", *home)
    assert (missing.returncode, missing.stdout) == (1, "")
    assert "no run" in missing.stderr


def test_a_student_is_exported_beside_itself(run: Path, tmp_path: Path) -> None:
    done = kd("export", "last", "--to", "merged", "--json", "--home", tmp_path / "home")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["path"] == str(run / "student-merged")
    assert content(run / "student-merged") == content(run / "student")
    for wrong in (("--to", "onnx"), ("--to", "gguf", "--outtype", "q1")):
        assert kd("export", run, *wrong).returncode == 2


def test_a_run_that_has_no_student_is_named_so(tmp_path: Path) -> None:
    folder = tmp_path / "home" / "runs" / "begun"
    write_json(folder / MARK, {"format": RUN_FORMAT})
    for named in ("last", folder):
        done = kd("export", named, "--to", "merged", "--home", tmp_path / "home")
        assert done.returncode == 1
        assert f"the run {folder} has no student." in done.stderr
