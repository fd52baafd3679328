"""Sampled records are unbiased for tokens of every probability, at every temperature served."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from bench.support.bias import BiasRow, bound_rounding, measure_bias
from cache.codec import Codec

pytestmark = pytest.mark.usefixtures("one_thread")

#: Tokens of each decade of probability, from 1e-2 down, in every row.
COUNTS = (8, 50, 300, 2500, 14_000)
ROWS = 16
KNOTS = 8
CODECS = {
    "threshold": (Codec("threshold", sum(COUNTS), threshold=0.0155, clusters=2), (1.0,)),
    "tempered from 1 to 4": (
        Codec("tempered", sum(COUNTS), threshold=0.0155, draws=64, temperatures=(1.0, 4.0)),
        (1.0, 1.5, 2.0, 4.0),
    ),
    "tempered from 0.5 to 2": (
        Codec("tempered", sum(COUNTS), threshold=0.0155, draws=64, temperatures=(0.5, 2.0)),
        (0.5, 1.0, 1.5, 2.0),
    ),
}


def make_teacher() -> tuple[Tensor, Tensor]:
    """Logits (N, V) with many tokens in each decade from 1e-2 to 1e-6, in random places."""
    generator = torch.Generator().manual_seed(11)
    rows = []
    for _ in range(ROWS):
        exponents = [
            torch.rand(count, generator=generator, dtype=torch.float64) + decade + 1
            for decade, count in enumerate(COUNTS)
        ]
        logits_V = -torch.cat(exponents) * math.log(10)
        rows.append(logits_V[torch.randperm(len(logits_V), generator=generator)])
    gold_N = torch.randint(0, sum(COUNTS), (ROWS,), generator=generator)
    return torch.stack(rows).float(), gold_N


def require_no_bias(row: BiasRow) -> None:
    seen = row.error_D > 0
    assert seen.sum() >= 5, "every decade of the teacher must be in the tail"
    assert row.error_D[seen].max() <= 0.003
    assert row.rms_z <= 1.2
    assert row.largest_z <= 4.0


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.long
def test_weights_are_unbiased_in_every_decade_at_every_temperature(name: str) -> None:
    codec, temperatures = CODECS[name]
    logits_NV, gold_N = make_teacher()
    knots = 0 if codec.profile == "threshold" else KNOTS
    for row in measure_bias(
        codec, logits_NV, gold_N, temperatures, rounds=40, draws=64, knots=knots
    ):
        require_no_bias(row)


def test_the_rounding_of_a_ratio_has_a_small_bound() -> None:
    assert bound_rounding(CODECS["threshold"][0], 1.0) == 0.0
    narrow = Codec("tempered", 10, threshold=0.1, temperatures=(1.0, 2.0))
    assert 0.0 < bound_rounding(narrow, 1.0) < 4e-4
    assert bound_rounding(narrow, 2.0) == pytest.approx(0.5 * 1.5 / 2 * 0.125**2 / 6)
