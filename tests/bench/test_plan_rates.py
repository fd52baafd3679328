"""The bench of a plan's rates prints its three tables. Times are not judged: they vary."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cache.profiles.table import PROFILES


@pytest.mark.long
def test_every_row_is_there_with_a_number_above_zero(print_page: Callable[..., str]) -> None:
    text = print_page("bench/devices/plan_rates.py", "--quick")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    names = ["tokenizer", "teacher", "profile", *PROFILES, "store", "beats"]
    assert [row[0] for row in rows] == names
    for row in rows:
        if row[0] in ("teacher", "beats", *PROFILES):
            assert all(int(cell.replace(",", "")) > 0 for cell in row[1:])
