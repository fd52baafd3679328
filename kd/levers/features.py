"""Feature matching: the student's last hidden states near the teacher's, which profile hidden keeps.

    mse      mean over the width of (P x / rms(P x) - h / rms(h))^2    what the norms before the heads leave of them
    cosine   1 - cos(P x, h)

with x the student's states and h the teacher's. P is the identity where both have one width, else a linear map that is
learned with the student and left behind with the teacher: of two bases of a width nobody knows how they correspond.
Attention maps are no part of it: fused attention never builds them.

Shapes: N positions that have a target, D the student's width, W the teacher's.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kd.config.loss import FeatureConfig
from kd.targets import HiddenTarget, Targets

Kind = Literal["mse", "cosine"]


class Features(nn.Module):
    """The weighted matching term, with the projection's parameters where the widths differ (float32)."""

    def __init__(self, kind: Kind, weight: float, width: int, teacher_width: int) -> None:
        super().__init__()
        self.kind, self.weight = kind, weight
        self.projection = None if width == teacher_width else _projection(width, teacher_width)

    @classmethod
    def of(cls, config: FeatureConfig, width: int, teacher_width: int) -> Features:
        """As configured, for a student of ``width``; a projection is drawn from torch's current random state."""
        return cls(config.kind, config.weight, width, teacher_width)

    def forward(self, hidden_ND: Tensor, targets: Targets) -> Tensor:
        """The term summed over N positions, times its weight; differentiable in the states and in the projection.

        Raises ``ValueError`` where the targets are not hidden states.
        """
        if not isinstance(targets.teacher, HiddenTarget):
            raise ValueError("loss.features needs the teacher's hidden states: use cache.profile hidden")
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        theirs_NW = targets.teacher.states(slice(0, len(targets)), wide)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            ours_NW = hidden_ND.to(wide) if self.projection is None else self.projection(hidden_ND.to(wide))
        return self.weight * self._distance_N(ours_NW, theirs_NW).sum(dtype=torch.float64)

    def _distance_N(self, ours_NW: Tensor, theirs_NW: Tensor) -> Tensor:
        if self.kind == "cosine":
            return 1.0 - F.cosine_similarity(ours_NW, theirs_NW, dim=1)
        return (_normalised(ours_NW) - _normalised(theirs_NW)).square().mean(1)


def _projection(width: int, teacher_width: int) -> nn.Linear:
    """A map that keeps lengths and angles as far as the widths allow."""
    layer = nn.Linear(width, teacher_width, bias=False)
    nn.init.orthogonal_(layer.weight)
    return layer


def _normalised(x_NW: Tensor) -> Tensor:
    """x / rms(x)."""
    return F.rms_norm(x_NW, (x_NW.shape[1],), eps=1e-12)
