"""The bounds within which a faithful cache differs from its teacher."""

from __future__ import annotations

import math

from cache.codec import Codec
from cache.manifest import FidelityRow
from cache.rounding import ENTROPY_STEP, KNOWN_STEP

#: The largest |z| of a faithful cache; sums.py derives it.
LARGEST_Z = 8.5
#: The largest error of a tempered log-partition between its knots, as a share of the mass;
#: kd.capture.knots bounds its mean.
PARTITION_ERROR = 5e-3
#: The smallest share of positions at which cache and teacher agree on the most probable token.
LEAST_AGREEMENT = 0.9


def find_problems(codec: Codec, noise: float, row: FidelityRow) -> list[str]:
    """Return one line for each value of ``row`` that is out of the bounds of a faithful cache.

    Other weights or shifted positions exceed them by far. ``noise`` is what the teacher is allowed,
    in nats.
    """
    rules = codec.rules
    step = rules.find_step(codec)  # the largest error of a stored log-probability, in nats
    partition = PARTITION_ERROR if rules.keeps_partition else 0.0
    # Where p is small the next token's error is larger for dense and hidden, and the normaliser of
    # tempered adds the rounding of its head tokens.
    gold_step = KNOWN_STEP + rules.gold_steps * step
    if rules.any_temperature:
        # The entropy is computed, so it changes with the log-probabilities.
        entropy = 5 * (step + noise) / row.temperature + 5 * partition
    else:
        # It is rounded stochastically, or the mean of a sequence stands for that of a position: the
        # bound is Hoeffding's for a probability of 1e-9.
        width = math.log(codec.vocabulary_size) if codec.spreads_entropy else ENTROPY_STEP
        entropy = width * math.sqrt(math.log(2e9) / (2 * row.positions)) + 5 * noise
    limits = {
        "kept_error": math.expm1((step + noise) / row.temperature) + partition,
        # E_p[delta^2] / 2 for errors delta in log p.
        "kl": ((step / row.temperature) ** 2 + (noise / row.temperature) ** 2) / 2 + 1e-6,
        "bias_z": LARGEST_Z,
        "stored_z": LARGEST_Z,
        "gold_error": math.expm1((gold_step + noise) / row.temperature) + partition,
        "entropy_error": entropy,
    }
    measured = {name: getattr(row, name) for name in limits}
    lines = [
        f"{name} at temperature {row.temperature:g} is {value:.3g}, "
        f"but must be at most {limits[name]:.3g}"
        for name, value in measured.items()
        if value is not None and not abs(value) <= limits[name]
    ]
    if row.top1_agreement is not None and not row.top1_agreement >= LEAST_AGREEMENT:
        got = f"top1_agreement at temperature {row.temperature:g} is {row.top1_agreement:.3g}"
        lines.append(f"{got}, but must be at least {LEAST_AGREEMENT:g}")
    return lines


def find_tie_width(codec: Codec) -> float:
    """Return the difference in nats within which rounding may swap two tokens."""
    return 2 * codec.rules.find_step(codec) * (4 if codec.rules.needs_lm_head else 1)
