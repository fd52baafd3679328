"""The bounds within which a faithful cache differs from its teacher."""

from __future__ import annotations

import math
from dataclasses import dataclass

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


@dataclass(frozen=True)
class FidelityBounds:
    """The bounds of a faithful cache; other weights or shifted positions exceed them by far."""

    codec: Codec
    noise: float

    def find_problems(self, row: FidelityRow) -> list[str]:
        """Return one line for each value of ``row`` that is out of bounds."""
        # Where p is small the next token's error is larger for dense and hidden, and the normaliser
        # of tempered adds the rounding of its head tokens.
        gold_step = KNOWN_STEP + self.codec.rules.gold_steps * self._step
        kept = math.expm1((self._step + self.noise) / row.temperature)
        gold = math.expm1((gold_step + self.noise) / row.temperature)
        limits = {
            "kept_error": kept + self._partition_error,
            "kl": self._kl(row),
            "bias_z": LARGEST_Z,
            "stored_z": LARGEST_Z,
            "gold_error": gold + self._partition_error,
            "entropy_error": self._entropy_error(row),
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

    def _kl(self, row: FidelityRow) -> float:
        """Bound KL by E_p[delta^2] / 2 for errors delta in log p."""
        step = self._step / row.temperature
        noise = self.noise / row.temperature
        return (step**2 + noise**2) / 2 + 1e-6

    def _entropy_error(self, row: FidelityRow) -> float:
        """Bound the error of the mean entropy.

        A stored entropy is rounded stochastically: the bound is Hoeffding's for a probability of
        1e-9. Other profiles compute it, so it changes with the log-probabilities.
        """
        if not self.codec.rules.any_temperature:
            return ENTROPY_STEP * math.sqrt(math.log(2e9) / (2 * row.positions)) + 5 * self.noise
        return 5 * (self._step + self.noise) / row.temperature + 5 * self._partition_error

    @property
    def _step(self) -> float:
        """The largest error of a stored log-probability, in nats."""
        return self.codec.rules.find_step(self.codec)

    @property
    def _partition_error(self) -> float:
        return PARTITION_ERROR if self.codec.rules.keeps_partition else 0.0


def find_tie_width(codec: Codec) -> float:
    """Return the difference in nats within which rounding may swap two tokens."""
    return 2 * codec.rules.find_step(codec) * (4 if codec.rules.needs_lm_head else 1)
