"""The bench of served teachers prints its table, and its records are unbiased."""

from __future__ import annotations

import pytest

from bench.teachers import served


@pytest.mark.long
def test_the_table_has_a_row_for_each_proposal_and_one_of_a_local_teacher(
    capsys: pytest.CaptureFixture[str],
) -> None:
    served.main(["--quick"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert [row[0] for row in rows] == [
        "counts of the text", "8 tokens of context", "32 tokens of context", "a local teacher",
    ]  # fmt: skip
    noises = [float(row[3]) for row in rows]
    assert noises[0] > noises[1] > noises[2]
    assert all(abs(float(cell)) < 6.0 for row in rows for cell in row[5:10])
    assert rows[-1][10] == "1.0000 ± 0.000"
