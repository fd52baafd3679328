"""Tables that fit the terminal without losing ids, and lines that programs can split in a pipe."""

from __future__ import annotations

import io
import json
import sys
from io import StringIO

import pytest
from rich.console import Console

from services.terminal import console
from services.terminal.console import (
    NO_TERMINAL_WIDTH,
    format_time,
    format_value,
    print_facts,
    print_page,
    print_table,
)

COLUMNS = ["ID", "NAME", "KIND", "STATUS", "STAGE", "CREATED", "DONE"]
JOB = "job_01kc8v0h4t2m6w9x3y5z7a1b2c"
SPARE = ("KIND", "STAGE")


def rows(name: str = "austen-with-a-name-that-is-long") -> list[list[str]]:
    made = format_time("2026-11-22T06:46:37.123456Z")
    return [
        [JOB, name, "precompute", "succeeded", "precompute", made, "100%"],
        [JOB, "b", "train", "", "", made, ""],
    ]


def printed(
    monkeypatch: pytest.MonkeyPatch, width: int, columns: list[str], name: str = ""
) -> list[str]:
    screen = StringIO()
    monkeypatch.setattr(console, "out", Console(file=screen, width=width, color_system=None))
    print_table(columns, rows(name) if name else rows(), spare=SPARE)
    return screen.getvalue().splitlines()


def test_on_a_narrow_terminal_ids_times_and_numbers_stay_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head, first, *more = printed(monkeypatch, 80, COLUMNS)
    assert head.split() == ["ID", "NAME", "STATUS", "CREATED", "DONE"]
    assert first.startswith(JOB) and "2026-11-22 06:46:37  100%" in first
    assert max(map(len, [head, first, *more])) <= 80
    assert "".join([first, *more]).count(JOB) == 2 and "…" not in first
    pieces = [line[32:44].strip() for line in [first, *more[:-1]]]
    assert "".join(pieces) == "austen-with-a-name-that-is-long"


def test_a_report_is_laid_out_in_a_terminal_and_plain_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page = "# small\n\n| held-out text | perplexity |\n|---|---:|\n| student | 31.25 |\n"
    for terminal in (True, False):
        screen = Console(file=StringIO(), width=60, force_terminal=terminal, color_system=None)
        monkeypatch.setattr(console, "out", screen)
        print_page(page)
        assert ("|---|" in screen.file.getvalue()) is not terminal
        assert "31.25" in screen.file.getvalue()


def test_a_wide_terminal_gets_every_column(monkeypatch: pytest.MonkeyPatch) -> None:
    assert printed(monkeypatch, 160, COLUMNS)[0].split() == COLUMNS


def test_an_id_is_whole_even_on_a_tiny_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert JOB in printed(monkeypatch, 24, COLUMNS)[1]


def test_in_a_pipe_every_row_is_a_line_of_as_many_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed(monkeypatch, NO_TERMINAL_WIDTH, COLUMNS, name="n" * 20_000)
    lines = capsys.readouterr().out.splitlines()
    assert [len(line.split()) for line in lines] == [7, 7, 7]
    assert all(line == line.rstrip() for line in lines)
    assert lines[2].split()[-2:] == ["2026-11-22T06:46:37", "-"]


@pytest.mark.parametrize(
    "name, value, text",
    [
        ("bytes", 612290, "598 KiB"),
        ("free_bytes", 81318391808, "75.7 GiB"),
        ("bytes", 1048575, "1.0 MiB"),
        ("bytes", 12, "12 bytes"),
        ("bytes_per_token", 23.1, "23.1"),
        ("seconds", 7.24, "7.24 s"),
        ("eta_seconds", 59.9, "59.9 s"),
        ("seconds", 7384, "2 h 3 min"),
        ("fits", True, "yes"),
        ("progress", {"done": 2, "eta_seconds": 90, "total": None}, "done 2, eta 2 min"),
        ("started_at", "2026-11-22T06:46:37.5Z", "2026-11-22T06:46:37"),
        ("began", "2026-11-29T08:00:06.615523+00:00", "2026-11-29T08:00:06"),
        ("stage", None, ""),
    ],
)
def test_values_are_formatted_for_people(name: str, value: object, text: str) -> None:
    assert format_value(value, name) == text


def test_facts_have_names_and_no_empty_lines(capsys: pytest.CaptureFixture[str]) -> None:
    print_facts({"free_bytes": 2048, "device": None, "fits": False})
    assert capsys.readouterr().out == "free  2.0 KiB\nfits  no\n"


def test_a_locale_without_a_letter_gets_escapes_or_question_marks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for encoding, shown in (("ascii", "text ?"), ("latin-1", "text ?"), ("utf-8", "text 茶")):
        written = io.BytesIO()
        stream = io.TextIOWrapper(written, encoding=encoding)
        monkeypatch.setattr(sys, "stdout", stream)
        console.write_any_letters()
        console.print_json({"name": "茶🍵"})
        stream.write("text 茶")
        stream.flush()
        text = written.getvalue().decode(encoding)
        assert text.endswith(shown)
        assert json.loads(text.removesuffix(shown)) == {"name": "茶🍵"}
