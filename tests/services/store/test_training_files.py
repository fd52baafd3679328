"""The folder of uploaded files: whole or not at all, and what a dead process left behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.store.training_files import CONTENT, NameTaken, TrainingFiles


@pytest.fixture
def files(tmp_path: Path) -> TrainingFiles:
    return TrainingFiles(tmp_path / "files")


def receive(
    files: TrainingFiles, team: str, content: bytes = b"{}\n", name: str = "a.jsonl"
) -> str:
    with files.receiving(team) as pending:
        pending.write(content)
        return pending.publish(name, 1, "jsonl", lambda: None).id


def test_a_file_appears_with_its_record_or_not_at_all(files: TrainingFiles, tmp_path: Path) -> None:
    with files.receiving("novels") as pending:
        pending.write(b"half")
        assert files.list_files("novels") == []
    assert [*(tmp_path / "files" / "novels").iterdir()] == []
    made = receive(files, "novels")
    assert [file.id for file in TrainingFiles(tmp_path / "files").list_files("novels")] == [made]
    assert files.locate("novels", made).read_bytes() == b"{}\n"


def test_a_file_has_a_name_and_never_changes(files: TrainingFiles) -> None:
    made = receive(files, "novels")
    assert receive(files, "novels") == made
    with pytest.raises(NameTaken):
        receive(files, "novels", b"[]\n")
    assert receive(files, "poems", b"[]\n") != made
    (file,) = files.list_files("novels")
    assert files.find("novels", "a.jsonl") == files.find("novels", made) == file
    assert files.locate("novels", made).read_bytes() == b"{}\n"


def test_files_of_earlier_versions_that_share_a_name_are_told_by_their_ids(
    files: TrainingFiles, tmp_path: Path
) -> None:
    ids = [receive(files, "novels", name=name) for name in ("a.jsonl", "b.jsonl")]
    record = tmp_path / "files" / "novels" / ids[1] / "record.json"
    record.write_text(record.read_text().replace("b.jsonl", "a.jsonl"))
    assert [file.filename for file in files.list_files("novels")] == ["a.jsonl"] * 2
    assert [files.find("novels", each).id for each in (*ids, "a.jsonl")] == [*ids, max(ids)]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["../poems/{}", "{}/", "{}/../{}", "", ".", "file-", "FILE-{}"])
def test_no_path_is_taken_for_a_name(files: TrainingFiles, name: str) -> None:
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
