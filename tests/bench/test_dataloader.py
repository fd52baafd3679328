"""The bench of the data loaders prints its whole table. Times are not judged: they vary."""

import pytest

from bench.loops.dataloader import COLUMNS, WORKERS


@pytest.mark.long
def test_every_row_is_there_with_rates_above_zero(print_page):
    text = print_page("bench/loops/dataloader.py", "--quick", "--rounds", "1")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert tuple(rows[0]) == COLUMNS
    loaders = [
        [f"{kind}, {form}", str(workers)]
        for form in ("records", "entries")
        for kind in ("stream", "sequences")
        for workers in (0, WORKERS)
    ]
    assert [row[:2] for row in rows[1:]] == [["reader", "0"], *loaders]
    for row in rows[1:]:
        assert all(float(cell.replace(",", "")) > 0 for cell in row[2:4]), row
    assert text.splitlines()[-1].startswith("Goal: more than 200,000 tokens/s per core")
