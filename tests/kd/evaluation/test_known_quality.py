"""What is said about students of sampled records: where it was measured, and what is beyond."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cache.codec import Codec
from kd.evaluation.known_quality import KNOWN_SHARES, describe_known_quality

PAGE = Path(__file__).parents[3] / "docs/benchmarks/quality.md"


def describe(
    threshold: float = 0.04, vocabulary: int = 49_152, targets: int = 2_040, steps: int = 82
) -> str:
    codec = Codec("threshold", vocabulary, threshold=threshold)
    return describe_known_quality(codec, vocabulary, steps, targets) or ""


def test_a_training_like_those_that_were_measured_needs_nothing_else() -> None:
    said = describe()
    assert "97%" in said and "a vocabulary of 49,152 and 82 steps of 2,040 targets." in said
    assert "cache.threshold" not in said
    assert "cache.threshold" not in describe(vocabulary=2_048, steps=400)


@pytest.mark.parametrize(
    ("changes", "beyond"),
    [
        ({"threshold": 0.1}, "a larger threshold"),
        ({"vocabulary": 128_256}, "a larger vocabulary"),
        ({"steps": 400}, "more steps"),
        ({"targets": 512}, "smaller steps"),
    ],
)
def test_what_lies_beyond_is_named_with_a_remedy(changes: dict[str, float], beyond: str) -> None:
    said = describe(**changes)  # type: ignore[arg-type]
    assert f": {beyond} than in the measurement. A lower cache.threshold" in said


def test_only_records_of_a_sample_at_temperature_1_were_measured() -> None:
    assert describe_known_quality(None, 2_048, 10, 10) is None
    for profile in ("hidden", "dense", "topk", "tempered"):
        assert describe_known_quality(Codec(profile, 2_048), 2_048, 10, 10) is None


def test_the_shares_are_those_of_the_page() -> None:
    rows = re.findall(r"\| threshold 0\.04 \|.*\| *([\d.]+) ?% *\|", PAGE.read_text("utf-8"))
    assert [round(float(each) / 100, 2) for each in rows] == [each.share for each in KNOWN_SHARES]
