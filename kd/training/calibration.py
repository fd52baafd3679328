"""The expected calibration error (ECE): how far a model's confidence is from its accuracy.

    ECE = sum_i (n_i / N) |accuracy_i - confidence_i|

Guo et al., "On Calibration of Modern Neural Networks", 2017.

Confidence is the probability of the model's best token. Accuracy is the share of positions where
that token is the next token of the text.

Shapes: N positions that have a target, I bins of equal width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

#: The usual number of bins, so that the error compares with published ones.
BINS = 15


@dataclass(frozen=True)
class Calibration:
    """Sums of each bin, float64: positions, confidences, and positions with a right answer."""

    count_I: Tensor
    confidence_I: Tensor
    right_I: Tensor

    @classmethod
    def of(cls, confidence_N: Tensor, right_N: Tensor, bins: int = BINS) -> Calibration:
        """Sort positions into ``bins``; bin i holds the confidences in (i / I, (i + 1) / I]."""
        bin_N = (confidence_N.double() * bins).ceil().long().sub_(1).clamp_(0, bins - 1)
        # A matrix product: a scattered sum on a GPU adds in another order in each run.
        member_IN = nn.functional.one_hot(bin_N, bins).double().T
        sums = (confidence_N.double(), right_N.double())
        return cls(member_IN.sum(1), *(member_IN @ each for each in sums))

    @classmethod
    def none(cls, bins: int, device: torch.device) -> Calibration:
        """The calibration of no positions."""
        return cls(*torch.zeros(3, bins, dtype=torch.float64, device=device))

    def to_json(self) -> list[list[float]]:
        """Return the three sums, for another rank."""
        return [each.tolist() for each in (self.count_I, self.confidence_I, self.right_I)]

    @classmethod
    def from_json(cls, sums: list[list[float]]) -> Calibration:
        """Rebuild the sums that ``to_json`` returned, on the CPU."""
        return cls(*torch.tensor(sums, dtype=torch.float64))

    def __add__(self, other: Calibration) -> Calibration:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Calibration(*(own + others for own, others in pairs))

    @property
    def error(self) -> float | None:
        """ECE, 0 to 1; None without positions."""
        total = float(self.count_I.sum())
        return float((self.right_I - self.confidence_I).abs().sum()) / total if total else None

    def curve(self) -> list[dict[str, float]]:
        """The reliability diagram: share, confidence and accuracy of each bin that is not empty."""
        total = float(self.count_I.sum())
        rows = zip(*self.to_json(), strict=True)
        return [
            {"share": count / total, "confidence": confidence / count, "accuracy": right / count}
            for count, confidence, right in rows
            if count
        ]
