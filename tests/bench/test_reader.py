"""The bench of the reader prints its whole tables. Measured times are not judged: they vary."""

import pytest

from bench.reader import COLUMNS, OTHERS
from bench.support.paths import AUSTEN


@pytest.mark.slow
def test_every_row_is_there_with_rates_above_zero(print_page):
    text = print_page("bench/reader.py", "--quick", "--rounds", "1")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    lengths, others = rows[:3], rows[3:]
    assert tuple(lengths[0]) == COLUMNS and [row[0] for row in lengths[1:]] == ["32", "64"]
    assert [row[0] for row in others] == ["profile", *OTHERS]
    for row in lengths[1:]:
        assert all(float(cell.replace(",", "")) > 0 for cell in row[:-1]), row
    assert "against a full shuffle" in text.splitlines()[-1]


@pytest.mark.slow
def test_the_records_of_a_given_teacher_are_read(print_page):
    """Their clusters are those of a job of as many tokens."""
    options = ("--tokens", "131072", "--rounds", "1", "--sequences", "40", "--length", "1024")
    text = print_page("bench/reader.py", "--teacher", AUSTEN / "teacher", *options)
    assert "Records of teacher at 0.04, 4 clusters" in text
    row = text.splitlines()[-1].strip("| ").split(" | ")
    assert row[:2] == ["1,024", "130,944"]
    assert all(float(cell.replace(",", "")) > 0 for cell in row[2:-1])
