"""The table of real size: its teacher in parts, its limit of time, and a rehearsal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.gpu import table
from bench.gpu.parts import join_parts, split_file
from kd.errors import DataError
from tests.support.kd.students import make_llama
from tests.support.kd.zoo import write_gguf

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """The three parts of a file of 1,000 bytes."""
    whole = tmp_path / "model.Q4_1.gguf"
    whole.write_bytes(bytes(range(250)) * 4)
    return split_file(whole, tmp_path / "parts", 3)


def test_a_file_is_joined_from_its_parts(parts: list[Path], tmp_path: Path) -> None:
    assert [part.stat().st_size for part in parts] == [334, 334, 332]
    joined = join_parts(parts[0].parent)
    assert joined.name == "model.Q4_1.gguf"
    assert joined.read_bytes() == (tmp_path / joined.name).read_bytes()
    assert join_parts(parts[0].parent) == joined, "a second call finds the same parts"


def test_parts_that_are_missing_changed_or_mixed_are_refused(
    parts: list[Path], tmp_path: Path
) -> None:
    folder = parts[0].parent
    with pytest.raises(DataError, match="the parts of 0 files"):
        join_parts(tmp_path)
    content = parts[1].read_bytes()
    parts[1].unlink()
    with pytest.raises(DataError, match=r"has 2 of the 3 parts of model\.Q4_1\.gguf; missing: 2"):
        join_parts(folder)
    parts[1].write_bytes(content[::-1])
    with pytest.raises(DataError, match="were changed on the way"):
        join_parts(folder)
    other = tmp_path / "other.gguf"
    other.write_bytes(b"other")
    split_file(other, folder, 2)
    with pytest.raises(DataError, match="the parts of 2 files"):
        join_parts(folder)
    assert not (folder / "model.Q4_1.gguf").exists()


def test_the_flag_writes_three_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = tmp_path / "model.gguf"
    whole.write_bytes(b"12345678")
    assert table.main(["--split", str(whole), "--into", str(tmp_path / "parts")]) == 0
    names = capsys.readouterr().out.splitlines()
    assert [Path(name).read_bytes() for name in names] == [b"123", b"456", b"78"]


def test_a_rehearsal_from_parts_ends_in_time_and_goes_on_in_its_folder(
    tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_gguf(make_llama(len(tokenizer)), tokenizer, tmp_path / "tiny.gguf", np.float32)
    split_file(tmp_path / "tiny.gguf", tmp_path / "parts", 3)
    words = ["--quick", "--parts", str(tmp_path / "parts"), "--work", str(tmp_path)]
    words += ["--layers", "1", "--seeds", "1", "--steps", "2"]
    words += ["--set", "train.weight_decay=0.2", "--set", "train.precision=fp32"]
    assert table.main([*words, "--minutes", "0"]) == 1
    assert "CPU, torch" in (page := capsys.readouterr().out)
    assert f"0 of {len(table.ROWS)} students" in page
    assert table.main(words) == 0
    page = capsys.readouterr().out
    assert f"{len(table.ROWS)} of {len(table.ROWS)} students" in page
    assert page == (tmp_path / "table.md").read_text(encoding="utf-8")
    assert "Set: train.weight_decay=0.2, train.precision=fp32." in page
    for row in table.ROWS:
        (cells,) = [
            line.split(" | ") for line in page.splitlines() if line.startswith(f"| {row} |")
        ]
        kl, calibration, acceptance = map(float, cells[4:7])
        assert kl > 0 and 0 < calibration < 1 and 0 < acceptance < 1, row


def test_without_a_teacher_it_says_what_to_give(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert table.main(["--work", str(tmp_path)]) == 2
    assert "Give --teacher FOLDER, --parts FOLDER or --quick." in capsys.readouterr().err
