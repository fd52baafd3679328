"""The bench of another tokenizer: what is projected helps more than the text alone."""

import re

import pytest


@pytest.mark.long
def test_a_teacher_with_another_tokenizer_helps(print_page):
    text = print_page("bench/text/other_tokenizer.py", "--quick", "--seeds", "1")
    (row,) = [line for line in text.splitlines() if re.match(r"\| \d", line)]
    alone, _, projected, teacher = (float(cell) for cell in row.strip("| ").split(" | ")[1:])
    assert teacher < projected < alone
