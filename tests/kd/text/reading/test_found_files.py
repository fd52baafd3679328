"""Which files of a folder, a pattern and a bucket are read, and what is said of the others."""

import os
import socket
import tempfile
from collections import deque
from pathlib import Path

import pytest

from kd.config.data import DatasetSpec
from kd.errors import DataError
from kd.text.reading.notes import TextNotes
from kd.text.sources import find_documents
from kd.text.text_files import find_files, find_source_files, list_stored_texts
from tests.support.kd.text import config, documents, write
from tests.support.users import not_as_root

#: Names in a folder, and why each is left out of the training text; nothing if it is read.
HIDDEN, KIND, ABOUT, SPLIT = (
    "hidden files and folders",
    "files without an ending of text",
    "files about the data",
    "files of other splits",
)
NAMES = {
    "a.txt": "",
    "B.TXT": "",
    "c.JSONL.GZ": "",
    "deep/d.md": "",
    "train-00000-of-00002.txt": "",
    "trainingday.txt": "",
    "latest.txt": "",
    "test.txt": SPLIT,
    "test-00000-of-00001.txt": SPLIT,
    "deep/corpus_val.txt": SPLIT,
    "dev/e.txt": SPLIT,
    "corpus.eval.jsonl": "",  # a word within other words of a name tells nothing
    "README.md": ABOUT,
    "LICENSE-MIT.txt": ABOUT,
    "dataset_info.json": ABOUT,
    "a.txt.json": ABOUT,
    ".hidden.txt": HIDDEN,
    ".ipynb_checkpoints/a-checkpoint.txt": HIDDEN,
    "_SUCCESS": HIDDEN,
    "__MACOSX/a.txt": HIDDEN,
    "a.txt~": KIND,
    "a.csv": KIND,
    "no_ending": KIND,
}


@pytest.fixture
def folder(tmp_path) -> Path:
    for name in NAMES:
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {name}", encoding="utf-8")
    return tmp_path / "data"


def list_names(found, folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in found.files)


@pytest.mark.parametrize("pattern", ["", "**"])
def test_each_name_is_read_or_named_with_its_reason(folder, pattern):
    found = find_files(str(folder / pattern))
    assert list_names(found, folder) == sorted(name for name in NAMES if not NAMES[name])
    for reason in (HIDDEN, KIND, ABOUT, SPLIT):
        expected = {name for name in NAMES if NAMES[name] == reason}
        if reason == HIDDEN:  # a hidden folder is named itself
            expected = {name.split("/")[0] for name in expected}
        assert set(found.left_out[reason]) == expected
    notices = {notice.what: notice.count for notice in found.list_notices()}
    assert notices[f"{SPLIT}, left out"] == 4


def test_a_bucket_has_the_rule_of_a_folder(folder, monkeypatch):
    listing = type("Listing", (), {"objects": dict.fromkeys(NAMES)})
    monkeypatch.setattr("kd.text.text_files.list_stored", lambda url: listing)
    names, left_out = list_stored_texts("s3://bucket/data")
    assert sorted(names) == list_names(find_files(str(folder)), folder)
    assert {name for each in left_out.values() for name in each} == {
        name for name in NAMES if NAMES[name]
    }


def test_a_path_of_a_folder_has_the_rule_of_the_folder(folder):
    found = find_source_files(DatasetSpec(path=str(folder)))
    assert found == find_files(str(folder))
    notes = TextNotes()
    source = DatasetSpec(path=str(folder))
    read = find_documents([source], "train", config(format="text"), notes=notes)
    assert len(list(read)) == len(found.files)
    counts = {each.what.removesuffix(", left out"): each.count for each in notes.list_notices()}
    assert counts == {reason: len(names) for reason, names in found.left_out.items()}


def test_a_split_that_a_job_names_is_read_alone_and_must_be_there(folder, tmp_path):
    for split, expected in {
        "validation": ["deep/corpus_val.txt", "dev/e.txt"],
        "test": ["test-00000-of-00001.txt", "test.txt"],
    }.items():
        found = find_source_files(DatasetSpec(path=str(folder), split=split))
        assert list_names(found, folder) == expected
    (tmp_path / "plain").mkdir()
    write(tmp_path / "plain", "a.jsonl")
    with pytest.raises(DataError, match=r"no file of the split 'validation'.* 1 files of other"):
        documents(DatasetSpec(path=str(tmp_path / "plain"), split="validation"))


@pytest.mark.parametrize("slice", ["[:3]", "[2:5]", "[-2:]", "[:50%]", "[4:4]", "[:90%]", "[50%:]"])
def test_a_slice_counts_the_rows_of_the_files_in_their_order(tmp_path, slice):
    for name, first in (("a.jsonl", 0), ("b.JSONL", 3), ("c.jsonl.json", 9)):
        write(tmp_path, name.lower(), [{"text": str(first + row)} for row in range(3)])
    (tmp_path / "b.jsonl").rename(tmp_path / "b.JSONL")
    (tmp_path / "c.jsonl").touch()
    begin, end = slice[1:-1].split(":")
    begin, end = ((each and (int(each[:-1]) * 6 // 100 if "%" in each else int(each))) or None
                  for each in (begin, end))  # fmt: skip
    expected = list(map(str, range(6)))[begin:end]
    spec = DatasetSpec(path=str(tmp_path), split=f"train{slice}")
    assert documents(spec) == expected
    found = list(find_documents([spec], "train", config()))
    for each in found:  # as an interrupted reading goes on
        rest = find_documents([spec], "train", config(), start=each.place)
        assert list(rest) == found[found.index(each) :]


@pytest.mark.parametrize("name", ["README.md", ".huggingface.yaml"])
def test_a_folder_that_only_the_library_understands_is_left_to_it(tmp_path, hub_caches, name):
    write(tmp_path, "a.jsonl")
    for left in ({"name": "small"}, {"split": "train+test"}, {"split": "fresh"}):
        assert find_source_files(DatasetSpec(path=str(tmp_path), **left)) is None
    own = DatasetSpec(path=str(tmp_path))
    (tmp_path / name).write_text("---\nlicense: mit\n---\n# Text\n", encoding="utf-8")
    assert [each.name for each in find_source_files(own).files] == ["a.jsonl"]
    card = "configs:\n- config_name: default\n  data_files: other.txt\n"
    card = f"---\n{card}---\n# Text\n" if name == "README.md" else card
    (tmp_path / name).write_text(card, encoding="utf-8")
    (tmp_path / "other.txt").write_text("One.\nTwo.", encoding="utf-8")
    assert documents(own) == ["One.", "Two."]
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / "a.csv").write_text("text\nThree.\n", encoding="utf-8")
    assert documents(DatasetSpec(path=str(tmp_path / "csv"))) == ["Three."]


def test_the_splits_of_a_folder_are_told_apart_only_where_there_are_several(folder):
    held_out = find_files(str(folder), split="validation")
    assert list_names(held_out, folder) == ["deep/corpus_val.txt", "dev/e.txt"]
    assert list_names(find_files(str(folder / "test*")), folder) == [
        "test-00000-of-00001.txt",
        "test.txt",
    ]


def test_a_pattern_names_what_it_matches_and_does_not_read(folder):
    assert find_files(f"{folder}/de*").left_out == {"folders and devices": ["deep", "dev"]}
    assert list_names(find_files(f"{folder}/*.TXT"), folder) == ["B.TXT"]
    assert list_names(find_files(f"{folder}/README.md"), folder) == ["README.md"]
    with pytest.raises(DataError, match=r"no file matches .* Left out: 1 files about the data"):
        documents(f"{folder}/READ*")


def test_a_linked_folder_is_read_once_and_a_link_to_nowhere_is_refused(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "other").mkdir()
    write(tmp_path / "other", "a.jsonl")
    for name in ("linked", "again"):
        (tmp_path / "data" / name).symlink_to(tmp_path / "other")
    (tmp_path / "other" / "loop").symlink_to(tmp_path / "data")
    (found,) = find_files(str(tmp_path / "data")).files
    assert found.resolve() == (tmp_path / "other" / "a.jsonl").resolve()
    (tmp_path / "data" / ".#lock.txt").symlink_to("nowhere")  # an editor's
    assert len(find_files(str(tmp_path / "data")).files) == 1
    (tmp_path / "data" / "b.txt").symlink_to("nowhere")
    for source in ("data", "data/*.txt", "data/b.txt"):
        with pytest.raises(DataError, match=r"b\.txt is a link to 'nowhere'"):
            find_files(source, tmp_path)


@pytest.mark.parametrize("source", ["data", "data/**/*.txt", "data/closed/*.txt"])
def test_a_folder_that_may_not_be_read_is_refused(source):
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        closed = Path(name) / "data" / "closed"
        closed.mkdir(parents=True)
        (closed.parent / "a.txt").write_text("text", encoding="utf-8")
        closed.chmod(0)
        with not_as_root(), pytest.raises(DataError, match=r"closed.* may not be read") as refused:
            find_files(source, Path(name))
    assert "65534" in refused.value.remedy or os.geteuid() != 0


def test_what_is_left_out_is_noted_when_the_text_is_read(folder):
    notes = TextNotes()
    deque(find_documents([str(folder)], "train", config(format="text"), notes=notes), 0)
    assert {each.what.removesuffix(", left out") for each in notes.list_notices()} == {
        HIDDEN, KIND, ABOUT, SPLIT,
    }  # fmt: skip


def test_a_socket_is_named(tmp_path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "a.txt"))
        assert find_files(str(tmp_path)).left_out == {"folders and devices": ["a.txt"]}
