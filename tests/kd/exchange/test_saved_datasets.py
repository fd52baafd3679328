"""Records in folders that ``save_to_disk`` of datasets wrote, compared with the rows in them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, DatasetDict

from kd.errors import DataError
from kd.exchange import axolotl, distillkit, foreign_files
from kd.exchange.distillkit import Compression, encode_entries
from kd.exchange.foreign_files import find_foreign_files

SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow")
COMPRESSION = Compression(d=300, k=4, exact_k=4, residual_bins=(), delta_encoding=False)


def make_rows(count: int) -> tuple[Dataset, list[np.ndarray]]:
    """Return rows of unequal length in DistillKit's form, and the ids (N, K) of each."""
    rng = np.random.default_rng(0)
    rows: list[dict[str, object]] = []
    ids: list[np.ndarray] = []
    for length in rng.integers(2, 9, count):
        ids.append(np.stack([rng.choice(300, 4, replace=False) for _ in range(length)]))
        logprobs = -np.sort(rng.exponential(2.0, (length, 4)), axis=1) - 1.0
        stored = encode_entries(COMPRESSION, ids[-1], logprobs)
        names = (distillkit.LOGPROBS, distillkit.INDICES)
        columns = {name: each.tolist() for name, each in zip(names, stored, strict=True)}
        rows.append({"input_ids": rng.integers(0, 300, length + 1).tolist()} | columns)
    return Dataset.from_list(rows), ids


def test_the_rows_are_those_of_the_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, ids = make_rows(11)
    rows.save_to_disk(tmp_path / "saved", num_shards=2)
    # Less than the rows of a file, so that its batches are cut.
    monkeypatch.setattr(foreign_files, "BATCH_ROWS", 4)
    files, held_out = find_foreign_files((tmp_path / "saved",), SUFFIXES)
    assert (len(files), held_out) == (2, [])
    found = [row for file in files for row in distillkit.read_rows(file, COMPRESSION)]
    assert [row.tokens.tolist() for row in found] == rows["input_ids"][:]
    for row, expected in zip(found, ids, strict=True):
        np.testing.assert_array_equal(row.ids, expected)
    assert found[4].where.endswith("data-00000-of-00002.arrow: row 5")


def test_the_rows_of_axolotl_too(tmp_path: Path) -> None:
    lists = [[{"token": "token_id:7", "logprob": -0.1}], [{"token": "token_id:9", "logprob": -0.2}]]
    Dataset.from_list([{"input_ids": [5, 7, 9], "logprobs": lists}]).save_to_disk(tmp_path)
    (file,), _ = find_foreign_files((tmp_path,), SUFFIXES)
    (row,) = axolotl.read_rows(file, None)
    assert (row.positions.tolist(), row.ids.tolist()) == ([0, 1], [[7], [9]])


def test_splits_named_validation_are_held_out(tmp_path: Path) -> None:
    rows, _ = make_rows(3)
    DatasetDict(train=rows, validation_1=rows).save_to_disk(tmp_path)
    # datasets keeps what it can make again beside the rows.
    (tmp_path / "train" / "cache-0123.arrow").write_bytes(b"not to be read")
    files, held_out = find_foreign_files((tmp_path,), SUFFIXES)
    assert [file.parent.name for file in files] == ["train"]
    assert [file.parent.name for file in held_out] == ["validation_1"]


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    make_rows(3)[0].save_to_disk(tmp_path)
    (file,), _ = find_foreign_files((tmp_path,), SUFFIXES)
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(DataError, match=r"data-00000-of-00001\.arrow cannot be read"):
        list(distillkit.read_rows(file, COMPRESSION))
    Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "text")
    (file,), _ = find_foreign_files((tmp_path / "text",), SUFFIXES)
    with pytest.raises(DataError, match="has no column input_ids"):
        list(distillkit.read_rows(file, COMPRESSION))
