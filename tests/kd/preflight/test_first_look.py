"""Opening the files of a job shows errors before a run would meet them."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.constants
import pyarrow as pa
import pytest
from pyarrow import parquet

from bench.support.paths import AUSTEN
from bench.support.small.caches import make_cache
from kd.config.jobfile import parse_config
from kd.errors import Problem
from kd.preflight.problems import Folders, find_problems
from kd.progress import Notice, ignore_notice


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher, a student with the same tokenizer, one with none, one with another; and rows."""
    folder = tmp_path_factory.mktemp("root")
    for name in ("teacher", "same", "none", "other"):
        (folder / name).mkdir()
        shutil.copy(AUSTEN / "teacher" / "config.json", folder / name)
        (folder / name / "model.safetensors").symlink_to(AUSTEN / "teacher" / "model.safetensors")
        for file in ("tokenizer.json", "tokenizer_config.json") if name != "none" else ():
            shutil.copy(AUSTEN / "teacher" / file, folder / name)
    swap_ids(folder / "other" / "tokenizer.json", "the", "and")
    (folder / "text.txt").write_text("It was a dark night. " * 200)
    (folder / "text.jsonl").write_text('{"text": "It was a dark night."}\n' * 200)
    (folder / "body.jsonl").write_text('{"body": "It was a dark night."}\n')
    return folder


def swap_ids(file: Path, first: str, second: str) -> None:
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(tokenizer), encoding="utf-8")


def look(
    root: Path, opened: bool = True, note: Callable[[Notice], None] = ignore_notice, **changes: Any
) -> list[Problem]:
    job = {
        "teacher": {"model": "teacher"},
        "student": {"model": "same"},
        "data": {"train": "text.txt"},
        "train": {"max_steps": 1},
    }
    folders = Folders(root, root / "home", opened=opened, note=note)
    return find_problems(parse_config(job | changes), folders)


def test_a_job_whose_files_fit_has_no_problem(root: Path) -> None:
    assert look(root) == []
    assert look(root, data={"train": ["text.jsonl", "text.txt"]}) == []


def test_a_saved_dataset_is_looked_at_like_a_file(root: Path) -> None:
    for name, column in (("saved", "text"), ("wrong", "body")):
        datasets.Dataset.from_dict({column: ["It was a dark night."] * 200}).save_to_disk(
            root / name
        )
    assert look(root, data={"train": "saved"}) == []
    (problem,) = look(root, data={"train": ["saved", "wrong"]})
    assert problem.pointer == "/data/train/1" and "row 1 has no 'text'" in problem.detail


@pytest.mark.parametrize(
    ("changes", "pointer", "words"),
    [
        ({"student": {"model": "none"}}, "/student/model", "'none' holds no tokenizer."),
        ({"teacher": {"model": "none"}}, "/teacher/model", "'none' holds no tokenizer."),
        ({"student": {"model": "other"}}, "/student/model", "tokenizer"),
        ({"data": {"train": "body.jsonl"}}, "/data/train/0", "body.jsonl: row 1"),
        ({"data": {"train": "text.jsonl", "format": "messages"}}, "/data/train/0", "row 1"),
        ({"data": {"train": "text.txt", "validation": "body.jsonl"}}, "/data/validation/0", "row"),
    ],
    ids=["student", "teacher", "other", "column", "messages", "held out"],
)
def test_a_job_whose_files_do_not_fit_is_told_before_it_runs(
    root: Path, changes: dict[str, Any], pointer: str, words: str
) -> None:
    (problem,) = look(root, **changes)
    assert problem.pointer == pointer
    assert words in problem.detail
    assert problem.remedy
    assert look(root, opened=False, **changes) == [], "the API opens no file"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"caf\xe9 " * 5000, "is not UTF-8 text"),
        ("text".encode("utf-16-le") * 5000, "many zero bytes"),
        (b"Too short.", "tokens, fewer than one sequence of 64"),
    ],
)
def test_a_text_that_a_run_would_refuse_is_told(root: Path, content: bytes, words: str) -> None:
    (root / "bad.txt").write_bytes(content)
    (problem,) = look(root, data={"train": "bad.txt", "sequence_length": 64, "packing": True})
    assert problem.pointer.startswith("/data/train") and words in problem.detail


def test_a_short_text_is_named_where_the_models_decide_whether_documents_share_rows(
    root: Path,
) -> None:
    (root / "short.txt").write_text("Too short.")
    notices: list[Notice] = []
    assert look(root, note=notices.append, data={"train": "short.txt", "sequence_length": 64}) == []
    assert [each.what for each in notices] == [
        "tokens of data.train, too few for rows that documents share"
    ]


def test_rows_without_text_and_special_tokens_are_noted(root: Path) -> None:
    rows = [{"text": "It was a dark night. " * 40}, {"text": None}, {"text": "a<|endoftext|>b"}]
    parquet.write_table(pa.Table.from_pylist([*rows, *rows[:1] * 5]), root / "a.parquet")
    notices: list[Notice] = []
    data = {"train": "a.parquet"}
    assert look(root, note=notices.append, data=data) == []
    found = {each.what: each.count for each in notices}
    assert found["rows without text, left out"] == 1
    assert found["end tokens in plain text, at which documents end"] == 1
    parquet.write_table(pa.Table.from_pylist([*rows[:1] * 2, *rows[1:2] * 9]), root / "a.parquet")
    (problem,) = look(root, data=data)
    assert "9 of 11 rows have no 'text'" in problem.detail


def test_a_model_folder_without_a_tokenizer_is_not_loaded(root: Path) -> None:
    from kd.errors import ModelError
    from kd.models.tokenizers import load_tokenizer

    with pytest.raises(ModelError, match="none holds no tokenizer"):
        load_tokenizer(root / "none")


@pytest.mark.parametrize(
    ("loss", "pointer"),
    [({"temperature": 2.0}, "/loss"), ({"divergence": "reverse_kl"}, "/loss")],
)
def test_a_cache_that_cannot_serve_the_loss_is_a_problem(
    tmp_path: Path, loss: dict[str, Any], pointer: str
) -> None:
    name = make_cache(tmp_path / "home" / "caches").name
    job = {
        "kind": "train",
        "student": {"init": {"layers": 1, "hidden_size": 32, "tokenizer": "org/some"}},
        "cache": {"fingerprint": name},
        "train": {"max_steps": 1},
    }
    folders = Folders(tmp_path, tmp_path / "home")
    assert find_problems(parse_config(job), folders) == []
    (problem,) = find_problems(parse_config(job | {"loss": loss}), folders)
    assert (problem.pointer, "cache.profile" in problem.detail) == (pointer, True)


class Hub(BaseHTTPRequestHandler):
    """Knows the model org/known only."""

    def do_GET(self) -> None:
        known = self.path.startswith("/api/models/org/known")
        self.send_response(200 if known else 404)
        self.send_header("Content-Type", "application/json")
        if not known:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        self.wfile.write(b'{"id": "org/known"}' if known else b"{}")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    yield address
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_missing_folder_that_looks_like_a_hub_id_is_told_from_a_model(
    root: Path, hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert look(root, student={"model": "org/known"}) == []
    (problem,) = look(root, student={"model": "students/one"})
    assert problem.detail == (
        "there is no folder 'students/one', and the hub has no model of that name."
    )
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    (problem,) = look(root, student={"model": "students/one"})
    assert "the hub does not answer (ConnectError)" in problem.detail
