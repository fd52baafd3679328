"""The number of knots: the fewest that keep the tail's mass right at every temperature of the
range.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache.codec import Codec
from cache.rounding import PARTITION_STEP
from kd.capture.knots import (
    KNOT_COUNTS,
    LARGEST_HEAD_MASS_ERROR,
    LARGEST_LOG_MASS_ERROR,
    LEAST_LOG_MASS,
    choose_knots,
)
from kd.capture.sampling import compute_partition
from kd.errors import ModelError
from kd.loss.sparse_targets import interpolate_hermite
from kd.models.lm_head import LMHead

N = 64
V = 3000

pytestmark = pytest.mark.usefixtures("one_thread")


def make_codec(vocabulary: int = V, **options: Any) -> Codec:
    return Codec(
        "tempered", vocabulary, **{"threshold": 0.0155, "temperatures": (0.5, 2.0)} | options
    )


def make_logits(vocabulary: int = V, spread: float = 2.5) -> Tensor:
    return torch.randn(N, vocabulary, generator=torch.Generator().manual_seed(0)) * spread


def chosen(logits_NV: Tensor, codec: Codec, gold_N: Tensor | None = None) -> Any:
    """Run ``choose_knots`` on one-hot hidden states: the columns of the weight are the logits."""
    head = LMHead(logits_NV.T.contiguous(), None, 1.0, None, codec.vocabulary_size)
    return choose_knots(
        torch.eye(len(logits_NV)),
        torch.arange(len(logits_NV)) if gold_N is None else gold_N,
        head,
        codec,
    )


def errors(
    logits_NV: Tensor,
    codec: Codec,
    knots: int,
    gold_N: Tensor,
    space: Callable[..., NDArray[np.float64]] = np.geomspace,
    share: bool = True,
) -> tuple[float, float]:
    """Compute both errors again, in float64, by plain sums.

    They are means over temperatures in equal ratios, as those of the choice, but over others;
    ``space`` gives the values of 1/T. Without ``share`` a tail counts down to a fixed mass, and not
    down to a share of all probabilities.
    """
    logp = torch.log_softmax(logits_NV.double(), 1)
    sizes = torch.stack(
        [torch.softmax(logits_NV.double() * beta, 1) for beta in codec.proposal_betas]
    ).mean(0)
    explicit = sizes > codec.threshold
    explicit[torch.arange(len(logp)), gold_N] = True
    explicit[:, list(codec.always_keep)] = True
    tail = logp.masked_fill(explicit, -1e4)
    stored = (compute_partition(tail, codec.nodes(knots)) / PARTITION_STEP).round().clamp(
        -32768, 32767
    ) * PARTITION_STEP
    found = []
    for beta in space(1 / codec.temperatures[1], 1 / codec.temperatures[0], 50).tolist():
        floor = (beta * logp).logsumexp(1).clamp(max=0.0) * share + LEAST_LOG_MASS
        exact = (beta * tail).logsumexp(1).clamp(min=floor)
        got = interpolate_hermite(stored, codec.nodes(knots), beta)[0].clamp(min=floor)
        head = (beta * logp).masked_fill(~explicit, -1e4).logsumexp(1)
        apart = torch.sigmoid(head - got) - torch.sigmoid(head - exact)
        found.append(((got - exact).abs().mean(), apart.abs().mean()))
    log_mass, head_mass = np.mean(found, axis=0)
    return float(log_mass), float(head_mass)


@pytest.mark.long
@pytest.mark.parametrize("span", [(0.5, 2.0), (1.0, 2.0), (0.8, 1.25), (0.25, 4.0)])
@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_the_number_keeps_both_errors_in_bounds_and_fewer_would_not(
    span: tuple[float, float], spread: float
) -> None:
    codec = make_codec(temperatures=span, always_keep=(7,))
    logits = make_logits(spread=spread)
    gold = torch.arange(N)
    found = chosen(logits, codec, gold)
    log_mass, head_mass = errors(logits, codec, found.count, gold)
    assert log_mass <= LARGEST_LOG_MASS_ERROR * 1.02, "other temperatures differ a little"
    assert head_mass <= LARGEST_HEAD_MASS_ERROR * 1.02
    assert log_mass == pytest.approx(found.log_mass_error, rel=0.02)
    # In equal steps of 1/T low temperatures count for more.
    log_mass, head_mass = errors(logits, codec, found.count, gold, space=np.linspace, share=False)
    assert log_mass <= LARGEST_LOG_MASS_ERROR * 1.25
    assert head_mass <= LARGEST_HEAD_MASS_ERROR * 1.25
    assert found.log_mass_error <= LARGEST_LOG_MASS_ERROR
    assert found.head_mass_error <= LARGEST_HEAD_MASS_ERROR
    if found.count > KNOT_COUNTS[0]:
        fewer = errors(logits, codec, KNOT_COUNTS[KNOT_COUNTS.index(found.count) - 1], gold)
        assert fewer[0] > LARGEST_LOG_MASS_ERROR or fewer[1] > LARGEST_HEAD_MASS_ERROR


def test_a_wider_range_needs_more_nodes() -> None:
    counts = [
        chosen(make_logits(), make_codec(temperatures=span)).count
        for span in [(0.9, 1.1), (0.5, 2), (0.2, 8)]
    ]
    assert counts == sorted(counts)
    assert counts[0] < counts[2]


@pytest.mark.parametrize("peak", [15.0, 25.0, 32.0, 40.0, 60.0, 200.0])
def test_a_teacher_that_is_certain_now_and_then_needs_no_more(peak: float) -> None:
    """The tails of a certain teacher are e^-25 and less, below anything that is stored, and need no
    knots.
    """
    logits = make_logits()
    plain = chosen(logits, make_codec())
    logits[torch.arange(0, N, 4), torch.arange(0, N, 4)] += peak
    assert chosen(logits, make_codec()).count <= plain.count + 1


def test_positions_without_a_tail_are_no_reason_for_nodes() -> None:
    """All three tokens of a tiny vocabulary are explicit entries, so no tail is left."""
    found = chosen(make_logits(3, 0.5), make_codec(3), torch.zeros(N, dtype=torch.int64))
    assert (found.count, found.log_mass_error) == (KNOT_COUNTS[0], 0.0)


@pytest.mark.parametrize("positions", [1, 5, 200])
def test_any_number_of_positions_will_do(positions: int) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(positions, 500, generator=generator) * 2
    assert chosen(logits, make_codec(500)).count in KNOT_COUNTS


def test_a_range_that_no_number_of_nodes_covers_is_refused_with_what_to_do() -> None:
    with pytest.raises(
        ModelError, match=r"Temperatures 0.002 to 500 cannot be covered: 32 temperature knots"
    ) as refusal:
        chosen(make_logits(), make_codec(temperatures=(0.002, 500.0)))
    assert "Narrow cache.temperatures" in refusal.value.remedy


def test_what_was_found_is_said_in_words() -> None:
    found = chosen(make_logits(), make_codec())
    assert str(found) == (
        f"{found.count} temperature knots: mean error {found.log_mass_error:.1e} "
        f"of the tail's log-mass and {found.head_mass_error:.1e} of the head's mass"
    )


@pytest.mark.parametrize(("lowest", "spread"), [(0.05, 0.05), (0.1, 0.1), (0.15, 0.2)])
def test_a_temperature_at_which_a_flat_teacher_s_tail_cannot_be_stored_is_refused(
    lowest: float, spread: float
) -> None:
    """At T = 0.1 the tail of 3,000 equal tokens has the log-partition -72; records end at -32."""
    logits = make_logits(spread=spread)
    with pytest.raises(ModelError, match="cannot be covered"):
        chosen(logits, make_codec(temperatures=(lowest, 1.0)))
    assert chosen(logits, make_codec(temperatures=(0.4, 1.0))).count == KNOT_COUNTS[0]
