"""Whether a model is right as often as it is sure: expected calibration error over bins of its confidence.

    ECE = sum_b (n_b / N) |accuracy_b - confidence_b|     (Guo et al., "On Calibration of Modern Neural Networks", 2017)

Confidence is the probability of the model's best token, accuracy how often that is the next token of the text.

Shapes: N positions that have a target, B bins of equal width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

BINS = 15


@dataclass(frozen=True)
class Calibration:
    """Per bin, float64: positions, the sum of their confidences, and how many of them were right."""

    count_B: Tensor
    confidence_B: Tensor
    right_B: Tensor

    @classmethod
    def of(cls, confidence_N: Tensor, right_N: Tensor, bins: int = BINS) -> Calibration:
        """Bin b holds the confidences in (b / B, (b + 1) / B]."""
        bin_N = (confidence_N.double() * bins).ceil().long().sub_(1).clamp_(0, bins - 1)
        # A product with one row for each bin, and no scattered sum: it is the same in every run on a GPU too.
        member_BN = nn.functional.one_hot(bin_N, bins).double().T
        return cls(member_BN.sum(1), member_BN @ confidence_N.double(), member_BN @ right_N.double())

    @classmethod
    def none(cls, bins: int, device: torch.device) -> Calibration:
        """That of no positions."""
        zeros_3B = torch.zeros(3, bins, dtype=torch.float64, device=device)
        return cls(*zeros_3B)

    def __add__(self, other: Calibration) -> Calibration:
        return Calibration(
            self.count_B + other.count_B, self.confidence_B + other.confidence_B, self.right_B + other.right_B
        )

    @property
    def error(self) -> float | None:
        """ECE, 0 to 1; None without positions."""
        total = float(self.count_B.sum())
        return float((self.right_B - self.confidence_B).abs().sum()) / total if total else None

    def curve(self) -> list[dict[str, float]]:
        """The reliability diagram: of every bin that has positions its share of them, confidence and accuracy."""
        total = float(self.count_B.sum())
        rows = zip(self.count_B.tolist(), self.confidence_B.tolist(), self.right_B.tolist(), strict=True)
        return [
            {"share": count / total, "confidence": confidence / count, "accuracy": right / count}
            for count, confidence, right in rows
            if count
        ]
