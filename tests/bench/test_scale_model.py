"""docs/scale.md has what scale_model.py prints, and the table follows its formulas."""

from __future__ import annotations

from typing import Any

import pytest

from bench.devices.scale_model import (
    COLUMNS,
    KINDS,
    LENGTH,
    MODELS,
    PASSES,
    Case,
    compute_time,
    describe_step,
    list_rows,
    render_links,
    render_table,
)
from bench.support.paths import ROOT
from kd.memory.devices import DEVICE_KINDS
from kd.memory.parallel import LINK_SHARE


def test_the_page_has_what_the_command_prints() -> None:
    page = (ROOT / "docs/scale.md").read_text(encoding="utf-8")
    assert render_links() in page
    assert render_table(list(MODELS), list(KINDS)) in page


def read(**wanted: str) -> dict[str, Any]:
    """The only row of the table that has these cells."""
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in list_rows(list(MODELS), list(KINDS))]
    (found,) = [row for row in rows if all(row[name] == cell for name, cell in wanted.items())]
    return found


def test_the_bytes_of_a_row_are_those_of_the_formulas() -> None:
    """8.03 billion parameters: Llama 3.1 8B."""
    _, step, _ = describe_step(Case("8B", "h100", 64, "fsdp"))
    numbers = step.student.numbers
    assert numbers == pytest.approx(8.03e9, rel=0.001)
    row = read(student="8B", device="h100", devices="64", strategy="fsdp")
    sent = PASSES * (2 * 2 + 4) * numbers * 63 / 64
    assert float(row["sends GB"]) == pytest.approx(sent / 1e9, abs=0.06)
    seconds = sent / (LINK_SHARE * DEVICE_KINDS["h100"].network)
    assert float(row["links s"]) == pytest.approx(seconds, abs=0.006)
    one = read(student="1B", device="l40s", devices="8", strategy="ddp")
    _, step, _ = describe_step(Case("1B", "l40s", 8, "ddp"))
    assert float(one["sends GB"]) == pytest.approx(
        2 * 7 / 8 * 4 * step.student.numbers / 1e9, abs=0.06
    )


def test_the_work_of_a_device_is_the_same_on_any_number() -> None:
    times = [compute_time(Case("1B", "h100", count, "ddp"))[0].work for count in (8, 64, 1024)]
    assert times[0] == pytest.approx(times[1]) == pytest.approx(times[2])
    # 8 N FLOP a token with every layer's forward pass twice, and attention beside it.
    _, step, _ = describe_step(Case("1B", "h100", 8, "ddp"))
    flops = 8 * step.student.numbers * PASSES * LENGTH
    assert times[0] == pytest.approx(flops / (0.4 * 989e12), rel=0.15)


def test_no_time_is_told_of_what_does_not_fit() -> None:
    row = read(student="8B", device="h100", devices="8", strategy="ddp")
    assert row["fits"] == "no" and row["step s"] == row["tokens/s"] == "-"
