"""The law of the page about quality: fitted to its own rows, and stated as it is printed."""

from __future__ import annotations

import re

import pytest

from bench.support.paths import ROOT
from bench.support.quality import law
from bench.support.quality.law import Law, Row, describe_law, read_rows


def make_row(noise: float, behind: float) -> Row:
    return Row(
        threshold=noise, entries=1 / noise, bytes=2 / noise, noise=noise, behind=behind, share=0.9
    )


def test_a_line_in_log_log_is_found_exactly() -> None:
    rows = [make_row(noise, 0.5 * noise**0.8) for noise in (0.02, 0.01, 0.001)]
    found = Law.fit(rows, gap=0.5 * 0.005**0.8 / (1 - law.WANTED))
    assert (found.factor, found.power) == pytest.approx((0.5, 0.8))
    assert found.noise == pytest.approx(0.005)
    assert (found.threshold, found.entries) == pytest.approx((0.005, 200))
    assert found.bytes == pytest.approx(400)


def test_the_rows_of_the_page_agree_with_each_other() -> None:
    rows, gap = read_rows()
    assert [row.threshold for row in rows] == [0.04, 0.02, 0.01]
    for row in rows:
        assert row.share == pytest.approx(1 - row.behind / gap, abs=0.001)


def test_the_page_states_the_law_as_it_is_printed() -> None:
    page = law.PAGE.read_text(encoding="utf-8")
    assert f"```text\n{describe_law()}\n```" in page


def test_records_in_units_are_those_of_the_page_about_coding() -> None:
    page = (ROOT / "docs/benchmarks/coding.md").read_text(encoding="utf-8")
    rows = re.findall(r"\| 256 clusters \| [\d.]+ \| ([\d.]+) \| [\d.]+ \| ([\d.]+) \|", page)
    known = zip(law.UNIT_BYTES, law.UNIT_NOISE, strict=True)
    assert sorted((float(size), float(noise)) for size, noise in rows) == sorted(known)
    tokens = re.search(r"without tokens \(([\d.]+) bytes\)", page)
    assert tokens is not None and float(tokens[1]) == law.TOKEN_BYTES
