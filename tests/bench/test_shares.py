"""Shares of the gap and their intervals, against plain formulas in loops."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bench.support.quality.shares import (
    DECADES,
    FREQUENCIES,
    Ratio,
    Share,
    split_difference,
)

#: Targets of three held-out sequences: blocks of 64, 36, then 10, then 64, 64, 1.
TARGETS = np.array([100, 10, 129])
BLOCKS = [64, 36, 10, 64, 64, 1]
#: 97.5 % points of Student's t from a table.
POINTS = {1: 12.706, 2: 4.303, 5: 2.571}


def make_losses(seeds: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    common = rng.gamma(2.0, 2.0, TARGETS.sum())
    plain, full, row = (
        common + shift + 0.2 * rng.normal(size=(seeds, len(common))) for shift in (0.4, 0.0, 0.1)
    )
    return plain, full, row


@pytest.mark.parametrize("seeds", [2, 3])
def test_both_intervals_are_those_of_their_formula(seeds: int) -> None:
    plain, full, row = make_losses(seeds)
    found = Share.of(plain, full, row, TARGETS)
    assert found is not None

    gains = [plain[k].mean() - row[k].mean() for k in range(seeds)]
    gaps = [plain[k].mean() - full[k].mean() for k in range(seeds)]
    share = sum(gains) / sum(gaps)
    spread = sum((a - share * b) ** 2 for a, b in zip(gains, gaps, strict=True))
    error = math.sqrt(seeds / (seeds - 1) * spread) / sum(gaps)
    assert found.over_seeds.value == pytest.approx(share)
    assert found.over_seeds.reach == pytest.approx(POINTS[seeds - 1] * error, rel=1e-3)

    spread = 0.0
    start = 0
    for size in BLOCKS:
        block = slice(start, start + size)
        a = sum((plain[k, block] - row[k, block]).sum() for k in range(seeds))
        b = sum((plain[k, block] - full[k, block]).sum() for k in range(seeds))
        spread += (a - share * b) ** 2
        start += size
    error = math.sqrt(6 / 5 * spread) / (plain - full).sum()
    assert found.over_text.value == pytest.approx(share)
    assert found.over_text.reach == pytest.approx(POINTS[5] * error, rel=0.01)


def test_the_ends_of_the_gap_have_no_interval() -> None:
    plain, full, _ = make_losses(2)
    for row, value in ((plain, 0.0), (full, 1.0)):
        found = Share.of(plain, full, row, TARGETS)
        assert found is not None
        assert found.over_seeds == Ratio(value, 0.0)
        assert found.over_text.value == pytest.approx(value)
        assert found.over_text.reach == pytest.approx(0.0, abs=1e-12)


def test_one_seed_has_an_interval_over_text_alone() -> None:
    found = Share.of(*make_losses(1), TARGETS)
    assert found is not None
    assert found.over_seeds.reach is None
    assert found.over_text.reach is not None


def test_there_is_no_share_without_a_gap() -> None:
    plain, full, row = make_losses(2)
    assert Share.of(full, plain, row, TARGETS) is None


def test_parts_of_a_difference_sum_to_it_and_every_target_is_in_one() -> None:
    _, full, row = make_losses(2)
    rng = np.random.default_rng(5)
    count = row.shape[1]
    for values, ranges in (
        (10.0 ** rng.uniform(-6, 0, count), DECADES),
        (rng.choice([0.0, 1.0, 9.0, 10.0, 500.0], count), FREQUENCIES),
    ):
        parts = split_difference(row, full, values, ranges)
        assert sum(part.targets for part in parts) == count
        assert sum(part.added for part in parts) == pytest.approx((row - full).mean())
        for part, (name, low), high in zip(
            parts, ranges, [math.inf, *(low for _, low in ranges)], strict=False
        ):
            chosen = [n for n in range(count) if low <= values[n] < high]
            expected = np.mean([(row[:, n] - full[:, n]).mean() for n in chosen]) if chosen else 0
            assert (part.name, part.targets) == (name, len(chosen))
            assert math.isnan(part.within) if not chosen else part.within == pytest.approx(expected)
