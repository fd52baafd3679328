"""The folder of uploaded files: whole or not at all, and what a dead process left behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.store.training_files import CONTENT, TrainingFiles


@pytest.fixture
def files(tmp_path: Path) -> TrainingFiles:
    return TrainingFiles(tmp_path / "files")


def receive(files: TrainingFiles, team: str, content: bytes = b"{}\n") -> str:
    with files.receiving(team) as pending:
        pending.write(content)
        return pending.publish("a.jsonl", 1, "jsonl", lambda: None).id


def test_a_file_appears_with_its_record_or_not_at_all(files: TrainingFiles, tmp_path: Path) -> None:
    with files.receiving("novels") as pending:
        pending.write(b"half")
        assert files.list_files("novels") == []
    assert [*(tmp_path / "files" / "novels").iterdir()] == []
    made = receive(files, "novels")
    assert [file.id for file in TrainingFiles(tmp_path / "files").list_files("novels")] == [made]
    assert files.locate("novels", made).read_bytes() == b"{}\n"


def test_a_path_tells_its_file(files: TrainingFiles) -> None:
    made = receive(files, "novels")
    path = files.locate("novels", made)
    assert files.identify(str(path)) == made
    assert files.identify(str(path.parent / "other")) is None
    assert files.identify(f"/elsewhere/novels/{made}/{CONTENT}") is None


@pytest.mark.parametrize("name", ["../poems/{}", "{}/", "{}/../{}", "", ".", "file-", "FILE-{}"])
def test_no_path_is_taken_for_an_id(files: TrainingFiles, name: str) -> None:
    made = receive(files, "poems")
    assert files.find("novels", name.format(made, made)) is None
    assert files.find("poems", made) is not None


def test_what_a_dead_process_left_is_removed_after_a_day(
    files: TrainingFiles, tmp_path: Path
) -> None:
    receive(files, "novels")
    old, new = (tmp_path / "files" / "novels" / f".tmp-{name}" for name in ("old", "new"))
    for folder in (old, new):
        folder.mkdir()
        (folder / CONTENT).write_bytes(b"half")
    os.utime(old, (0, 0))
    receive(files, "novels")
    assert (old.exists(), new.exists()) == (False, True)


def test_bytes_are_counted_for_each_team(files: TrainingFiles) -> None:
    assert files.measure() == {}
    first = receive(files, "novels", b" " * 1000)
    receive(files, "poems")
    sizes = files.measure()
    assert set(sizes) == {"novels", "poems"}
    assert 1000 < sizes["novels"] < 2000
    files.remove("novels", first)
    files.remove("novels", first)  # twice does no harm
    assert files.measure()["novels"] == 0
