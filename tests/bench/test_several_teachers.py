"""The bench of several teachers: its table has a row for each student."""

import re

import pytest


@pytest.mark.long
def test_every_student_has_a_row_with_its_kl_by_domain(print_page):
    text = print_page("bench/teachers/several.py", "--quick", "--seeds", "1")
    rows = [line for line in text.splitlines() if re.match(r"\| (by|mix|one)", line)]
    assert len(rows) == 4
    for row in rows:
        novels, docs, mean = (float(cell) for cell in re.findall(r"\| ([0-9.]+) \(", row))
        assert mean == pytest.approx((novels + docs) / 2, abs=1e-4)
