"""``kd validate`` shows what is learned of chats, and finds rows that a run would refuse."""

from __future__ import annotations

import json
import shutil
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import ByT5Tokenizer, CTRLTokenizer

from bench.support.paths import AUSTEN
from kd.config.jobfile import parse_config
from kd.errors import Problem
from kd.preflight import learned_rows
from kd.preflight.learned_rows import LearnedRow, RowPiece, find_row_problems
from kd.progress import Notice, ignore_notice

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A teacher with a chat template, and one without; a busy machine has time for all rows."""
    monkeypatch.setattr(learned_rows, "_SECONDS", 60.0)
    for name in ("teacher", "plain"):
        (tmp_path / name).mkdir()
        for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(AUSTEN / "teacher" / file, tmp_path / name)
    (tmp_path / "teacher" / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


def make_row(number: int, answer: str = "In 1815.", **more: Any) -> str:
    question = {"role": "user", "content": f"Question {number}?"}
    return json.dumps({"messages": [question, {"role": "assistant", "content": answer}]} | more)


def look(
    root: Path, lines: list[str], teacher: str = "teacher", **told: Any
) -> tuple[list[Problem], list[LearnedRow], list[Notice]]:
    (root / "a.jsonl").write_text("\n".join(lines) + "\n")
    data = {"train": "a.jsonl", "validation": "a.jsonl", "format": "messages"}
    job = {
        "teacher": {"model": teacher, **told},
        "student": {"init": {"layers": 1, "hidden_size": 64}},
        "data": data,
    }
    rows, notices = list[LearnedRow](), list[Notice]()
    config = parse_config(job | {"train": {"max_steps": 1}})
    return list(find_row_problems(config, root, notices.append, rows.append)), rows, notices


def test_the_first_rows_are_shown_with_what_is_learned(root: Path) -> None:
    problems, rows, notices = look(root, [make_row(n, source="web") for n in range(9)])
    assert problems == [] and len(rows) == 3
    assert rows[1].where == "a.jsonl: row 2"
    assert rows[1].pieces == [
        RowPiece("[user]Question 1?<|endoftext|>[assistant]", learned=False),
        RowPiece("In 1815.<|endoftext|>", learned=True),
    ]
    (notice,) = notices
    assert notice.what == "rows with the column 'source', which is not read"
    (long,) = look(root, [make_row(1, "word " * 1000)])[1]
    assert len(long.pieces[1].text) < 500 and " … " in long.pieces[1].text


def test_rows_are_shown_as_student_and_teacher_read_them(root: Path) -> None:
    lines = [make_row(n, fact=f"It is {n}.") for n in range(9)]
    told = {"system": "You know.", "context": "{fact} {prompt}"}
    problems, rows, notices = look(root, lines, **told)
    assert problems == notices == [] and len(rows) == 6
    student, teacher = rows[2:4]
    assert (student.where, teacher.where) == (
        "a.jsonl: row 2", "a.jsonl: row 2, as the teacher reads it",
    )  # fmt: skip
    assert student.pieces[0].text == "[user]Question 1?<|endoftext|>[assistant]"
    asked = "[user]It is 1. Question 1?<|endoftext|>[assistant]"
    assert teacher.pieces[0].text == f"[system]You know.<|endoftext|>{asked}"
    assert student.pieces[1] == teacher.pieces[1]
    # The last row and every other is looked at: one without the column is found before the run.
    lines[8] = make_row(8)
    (train, _), _, _ = look(root, lines, **told)
    assert train.pointer == "/data/train/0" and "row 9 has no 'fact'" in train.detail


@pytest.mark.parametrize("place", [1, 150, 899])
def test_a_broken_row_is_found_wherever_it_stands(root: Path, place: int) -> None:
    lines = [make_row(n) for n in range(900)]
    lines[place] = '{"messages": ['
    train, _ = look(root, lines)[0]
    assert train.pointer == "/data/train/0" and f"row {place + 1} cannot be read" in train.detail


def test_the_last_row_of_a_file_that_is_long_to_read_is_looked_at(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learned_rows, "_SECONDS", 0.0)
    lines = [make_row(n) for n in range(150)]
    assert look(root, lines)[0] == []
    train, _ = look(root, [*lines, '{"messages": 3}'])[0]
    assert "a.jsonl: the last row: 'messages' must be a list" in train.detail
    train, _ = look(root, [*lines, '{"messages'])[0]
    assert "a.jsonl: the last row cannot be read" in train.detail


@pytest.mark.parametrize(
    "ending",
    ['{"messages": null}', make_row(1, "long " * 300_000), "[" + make_row(1) + "\n]"],
    ids=["a row without a chat", "a row that is longer than what is read", "an array"],
)
def test_a_last_row_that_a_run_reads_or_leaves_out_is_no_problem(
    root: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setattr(learned_rows, "_SECONDS", 0.0)
    lines = [] if ending.startswith("[") else [make_row(n) for n in range(150)]
    assert look(root, [*lines, ending])[0] == []


def test_a_tokenizer_that_cannot_be_read_is_a_problem_of_its_own_field(root: Path) -> None:
    (root / "plain" / "tokenizer.json").write_text("{}")
    job = {
        "kind": "train",
        "student": {"init": {"layers": 1, "hidden_size": 64, "tokenizer": "plain"}},
        "data": {"train": "a.txt"}, "loss": {"alpha": 1.0}, "train": {"max_steps": 1},
    }  # fmt: skip
    (problem,) = find_row_problems(parse_config(job), root, ignore_notice, pytest.fail)
    assert problem.pointer == "/student/init/tokenizer"
    assert "tokenizer.json cannot be read" in problem.detail


@pytest.mark.parametrize("kind", ["words", "bytes"])
def test_a_tokenizer_of_python_is_refused_by_its_name_or_read(root: Path, kind: str) -> None:
    """Only of one whose tokens are bytes the tokens of an answer are known."""
    folder = root / "python"
    folder.mkdir()
    if kind == "bytes":
        made: Any = ByT5Tokenizer()
    else:
        pieces = [letter + more for letter in string.printable for more in ("", "@@")]
        vocabulary = {piece: number for number, piece in enumerate(["<unk>", *pieces])}
        (root / "vocab.json").write_text(json.dumps(vocabulary))
        (root / "merges.txt").write_text("#version\n")
        made = CTRLTokenizer(str(root / "vocab.json"), str(root / "merges.txt"))
    made.chat_template = TEMPLATE.replace("{{ eos_token }}", "</s>")
    made.save_pretrained(folder)
    assert not (folder / "tokenizer.json").exists()
    problems, rows, _ = look(root, [make_row(1)], "python")
    if kind == "bytes":
        assert problems == []
        assert RowPiece("In 1815.</s>", True) in rows[0].pieces
    else:
        assert {each.pointer for each in problems} == {"/data/train/0", "/data/validation/0"}
        assert "CTRLTokenizer does not tell which characters a token holds" in problems[0].detail


def test_rows_that_are_refused_are_counted_and_the_first_is_named(root: Path) -> None:
    train, _ = look(root, [make_row(n, "" if n % 2 else "Yes.") for n in range(8)], "plain")[0]
    assert "row 1 cannot be tokenized" in train.detail and "chat_template" in train.detail
    assert train.detail.endswith("Of 8 rows that were looked at 8 are refused.")


def test_rows_are_shown_before_torch_is_imported(root: Path) -> None:
    """Also of a teacher whose tensors are compared, which needs torch."""
    look(root, [make_row(1)])
    (root / "teacher" / "model.safetensors").symlink_to(AUSTEN / "teacher" / "model.safetensors")
    script = (
        "import sys; from pathlib import Path; from kd.config.jobfile import parse_config;"
        "from kd.preflight.problems import Folders, find_problems;"
        "job = {'teacher': {'model': 'teacher'},"
        " 'student': {'init': {'layers': 1, 'hidden_size': 64}},"
        " 'data': {'train': 'a.jsonl', 'format': 'messages'}, 'train': {'max_steps': 1}};"
        f"root = Path({str(root)!r});"
        "show = lambda row: print('torch' in sys.modules);"
        "folders = Folders(root, root / 'home', opened=True, show=show);"
        "print(find_problems(parse_config(job), folders), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.PIPE)
    assert done.stdout.decode().splitlines() == ["False", "[] True"]


def test_a_job_of_whole_texts_has_no_rows_to_show(root: Path) -> None:
    (root / "a.txt").write_text("It was a dark night. " * 1000)
    job = {"teacher": {"model": "teacher"}, "data": {"train": "a.txt"}, "kind": "precompute"}
    assert list(find_row_problems(parse_config(job), root, ignore_notice, pytest.fail)) == []
