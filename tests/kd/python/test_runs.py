"""The list of runs: what their folders say of them, and their removal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kd
from cache.disk import locked
from kd.errors import ModelError
from kd.files import LOCK, write_json
from kd.python.runs import find_makers, remove_run
from tests.support.commands import kd as kd_command

REPORT = {
    "teacher": "Qwen/Big",
    "parameters": 1000,
    "student_bits_per_byte": 1.25,
    "validation_kl": 0.5,
    "train_seconds": 60.0,
}


def make_run(home: Path, name: str, job: dict[str, Any], **files: Any) -> Path:
    folder = home / "runs" / name
    for file, content in {"config": job, **files}.items():
        write_json(folder / f"{file}.json", content)
    return folder


def test_all_runs_are_one_list_with_what_they_measured(tmp_path: Path) -> None:
    distill = {"kind": "distill", "student": {"init": {}}, "teacher": {"model": "here"}}
    make_run(tmp_path, "done", distill, report=REPORT)
    make_run(tmp_path, "job_" + "0" * 26, distill | {"student": {"model": "Qwen/Small"}})
    make_run(tmp_path, "sealed", {"kind": "precompute"}, cache={})
    (tmp_path / "runs" / "bad").mkdir()
    (tmp_path / "runs" / "bad" / "report.json").write_text("[")
    found = {run.name: run for run in kd.list_runs(tmp_path)}
    assert [found[name].state for name in ("done", "job_" + "0" * 26, "sealed", "bad")] == [
        "finished", "stopped", "finished", "finished",
    ]  # fmt: skip
    done = found["done"]
    assert (done.teacher, done.student, done.parameters) == ("Qwen/Big", "new", 1000)
    assert (done.bits_per_byte, done.kl, done.seconds) == (1.25, 0.5, 60.0)
    assert done.bytes == sum(path.stat().st_size for path in done.folder.iterdir())
    assert found["job_" + "0" * 26].student == "Qwen/Small"
    shown = kd_command("runs", "ls", "--home", str(tmp_path)).stdout
    assert "Qwen/Big" in shown and "1.25" in shown
    listed = json.loads(kd_command("runs", "ls", "--home", str(tmp_path), "--json").stdout)
    assert {each["name"] for each in listed} == found.keys()


def test_a_run_that_is_removed_while_it_is_read_is_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        make_run(tmp_path, name, {"kind": "train"})

    def remove(folder: Path) -> int:
        if folder.name == "a":
            remove_run(folder)
        return 0

    monkeypatch.setattr("kd.python.runs.sum_file_sizes", remove)
    assert [run.name for run in kd.list_runs(tmp_path)] == ["b"]


@pytest.mark.parametrize("record", ["{", "[1]", "{}", '{"reused": false}'])
def test_a_run_that_names_no_cache_made_none(tmp_path: Path, record: str) -> None:
    folder = make_run(tmp_path, "a", {"kind": "precompute"})
    (folder / "cache.json").write_text(record)
    assert find_makers(folder.parent) == {}


def test_of_a_run_that_is_a_link_the_link_is_removed(tmp_path: Path) -> None:
    elsewhere = make_run(tmp_path / "disk", "moved", {"kind": "train"})
    link = tmp_path / "runs" / "moved"
    link.parent.mkdir()
    link.symlink_to(elsewhere)
    remove_run(link)
    assert list(link.parent.iterdir()) == [] and elsewhere.is_dir()


def test_runs_are_removed_by_name_and_never_under_a_process_or_a_record(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "done", {"kind": "train"}, report=REPORT)
    job = make_run(tmp_path, "job_" + "0" * 26, {"kind": "train"})
    home = ("--home", str(tmp_path), "--yes")
    with locked(folder / LOCK), pytest.raises(ModelError, match="in use"):
        remove_run(folder)
    refused = kd_command("runs", "rm", "done", job.name, *home)
    assert refused.returncode == 1 and f"kd jobs rm {job.name}" in refused.stderr
    assert folder.is_dir() and job.is_dir()
    assert "1 removed" in kd_command("runs", "rm", "don", *home).stdout
    assert not folder.exists() and job.is_dir()
    assert "kd runs ls" in kd_command("runs", "rm", "done", *home).stderr
