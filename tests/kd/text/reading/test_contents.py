"""What stands in a file of text: whatever it is called, however large, whole or broken."""

import gzip
import io
import json
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from kd.text.reading import contents
from kd.text.reading.tables import count_null_texts
from tests.support.kd.text import config, documents, refusal, write

POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4355a46b19d348dc2f57c046f8ef63d4538ebb936000f3c9ee954a27460dd865\nsize 115784\n"
)


@pytest.mark.parametrize("name", ["r[1].parquet", "x*y.parquet", "q?.parquet", "a::b.parquet"])
def test_a_file_is_itself_whatever_its_name_would_match(tmp_path, name):
    for other in ("r1", "xay", "qa", "b"):
        write(tmp_path, f"{other}.parquet", [{"text": "wrong"}])
    path = write(tmp_path, name, [{"text": "right"}])
    assert documents(path) == ["right"]


def test_of_a_table_only_the_column_of_the_text_is_decoded(tmp_path):
    odd = pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64()))
    names = ["text", "map", "twice", "twice"]
    table = pa.table([pa.array(["fine"]), odd, pa.array([1]), pa.array([2])], names=names)
    foreign = {b"huggingface": json.dumps({"info": {"features": {"map": {"_type": "Odd"}}}})}
    parquet.write_table(table.replace_schema_metadata(foreign), tmp_path / "a.parquet")
    assert documents(tmp_path / "a.parquet") == ["fine"]
    assert "2 columns of the name 'twice'" in refusal(tmp_path / "a.parquet", text_column="twice")


def test_a_table_with_cells_of_json_is_decoded(tmp_path):
    from datasets import Dataset, Features, Json, List

    chat = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Anne."}]
    features = Features({"messages": List(Json())})
    Dataset.from_dict({"messages": [chat]}, features=features).to_parquet(tmp_path / "a.parquet")
    (found,) = documents(tmp_path / "a.parquet", format="messages")
    assert found.messages == chat


def test_the_statistics_of_a_table_count_its_rows_without_text(tmp_path):
    table = pa.table({"text": ["a", None, "b", None, "c"], "other": [None] * 5})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    assert count_null_texts(tmp_path / "a.parquet", config()) == (2, 5)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_is_read_in_chunks_of_any_size(monkeypatch, chunk, indent):
    monkeypatch.setattr(contents, "_CHUNK", chunk)
    rows = [{"text": 'a "quoted" \\ ]}, [{', "n": [1.5, -2e3, None, True]}, {}, {"é": "\u2028"}]
    written = json.dumps(rows, indent=indent) + " \n"
    assert list(contents._read_array(io.StringIO(written.lstrip()[1:]))) == rows
    for broken in ('{"a": 1} {"b": 2}]', '{"a": 1},]', '{"a": nope}]', '{"a": 1}', '{"a": 1}] x'):
        with pytest.raises(json.JSONDecodeError):
            list(contents._read_array(io.StringIO(broken)))


def test_a_large_array_takes_little_memory(tmp_path):
    rows = [{"text": "word " * 200}] * 20_000
    path = write(tmp_path, "a.json", rows)
    tracemalloc.start()
    count = sum(1 for _ in contents.open_rows(path, config()))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == len(rows) and most < path.stat().st_size / 8


def zstd(data: bytes) -> bytes:
    return bytes(pa.compress(data, codec="zstd", asbytes=True))


@pytest.mark.parametrize(
    "name, data, words",
    [
        ("a.txt", POINTER.encode(), "pointer of Git LFS"),
        ("a.txt", POINTER.encode(), "git lfs pull"),
        ("a.jsonl", POINTER.encode(), "pointer of Git LFS"),
        ("a.parquet", POINTER.encode(), "pointer of Git LFS"),
        ("a.txt", "caf\xe9".encode("latin-1"), "is not UTF-8 text"),
        ("a.txt", "text".encode("utf-16"), "begins as UTF-16"),
        ("a.txt", "text".encode("utf-16-le"), "many zero bytes"),
        ("a.txt", gzip.compress(b"text", mtime=0), "begins as gzip"),
        ("a.jsonl", zstd(b"text"), "begins as zstd"),
        ("a.txt.gz", zstd(b"text"), "it is not gzip, although its name ends in .gz"),
        ("a.jsonl.ZST", b"{}", "it is not zstd, although its name ends in .ZST"),
        ("a.txt.gz", gzip.compress(b"text" * 99, mtime=0)[:-9], "it is cut short"),
        ("a.jsonl.zst", zstd(b'{"text": "a"}\n' * 9999)[:-9], "cannot be read"),
        (
            "a.parquet.gz",
            gzip.compress(b"PAR1", mtime=0),
            "Parquet compresses what it holds itself",
        ),
        # A frame whose header asks for a window of 2 GiB.
        ("a.txt.zst", b"\x28\xb5\x2f\xfd\x00\xa8\x01\x00\x00", "larger than 128 MiB"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path, name, data, words):
    (tmp_path / name).write_bytes(data)
    found = refusal(tmp_path / name)
    assert words in found and name in found
