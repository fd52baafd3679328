"""The bench of a teacher's context: the own row's is learned; another row's gains less."""

import re

import pytest


@pytest.mark.long
def test_the_own_instruction_gains_more_than_that_of_another_row(print_page):
    pytest.importorskip("peft")
    text = print_page("bench/text/context.py", "--quick", "--seeds", "1")
    (row,) = [line for line in text.splitlines() if re.match(r"\| instruction \| \d", line)]
    before, own, other = (float(cell) for cell in row.strip("| ").split(" | ")[2:])
    assert own < 0.9 * before and other > 0.95 * before
    for context in ("instruction", "reference"):
        assert f"The {context} of the own row: the held-out KL falls by" in text
