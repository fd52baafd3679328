"""Feature matching: draw the student's last hidden states to those of the teacher.

    mse      mean over the width of (P x / rms(P x) - h / rms(h))^2
    cosine   1 - cos(P x, h)

with x the student's states and h the teacher's, which profile hidden keeps. The mse compares
normalised states, because a norm precedes most LM heads. P is the identity if both have one
width. Else P is a linear map, learned with the student and discarded after training: two bases of
different widths have no known correspondence. Attention maps are not matched: fused attention never
builds them.

Shapes: N positions that have a target, D the student's width, W the teacher's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kd.config.loss import FeatureConfig
from kd.loss.targets import Targets
from kd.loss.whole_targets import HiddenTarget


class FeatureLoss(nn.Module):
    """The weighted matching term; if the widths differ, with a projection (float32)."""

    def __init__(self, config: FeatureConfig, width: int, teacher_width: int) -> None:
        """Make the term for a student of ``width``.

        A projection is drawn from torch's current random state. It keeps lengths and angles as far
        as the widths allow.
        """
        super().__init__()
        self.kind = config.kind
        self.weight = config.weight
        self.projection = None
        if width != teacher_width:
            self.projection = nn.Linear(width, teacher_width, bias=False)
            nn.init.orthogonal_(self.projection.weight)

    def forward(self, hidden_ND: Tensor, targets: Targets) -> Tensor:
        """The sum of the term over N positions, times its weight.

        It is differentiable in the states and in the projection. Raises ``ValueError`` if the
        targets are not hidden states.
        """
        if not isinstance(targets.teacher, HiddenTarget):
            raise ValueError(
                "loss.features needs the teacher's hidden states: use cache.profile hidden"
            )
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        theirs_NW = targets.teacher.decode_states(slice(0, len(targets)), wide)
        # Autocast would run the projection in 16 bits.
        with torch.autocast(hidden_ND.device.type, enabled=False):
            ours_NW = hidden_ND.to(wide)
            if self.projection is not None:
                ours_NW = self.projection(ours_NW)
        if self.kind == "cosine":
            distance_N = 1.0 - F.cosine_similarity(ours_NW, theirs_NW, dim=1)
        else:
            distance_N = (_normalise(ours_NW) - _normalise(theirs_NW)).square().mean(1)
        return self.weight * distance_N.sum(dtype=torch.float64)


def _normalise(x_NW: Tensor) -> Tensor:
    """x / rms(x)."""
    return F.rms_norm(x_NW, (x_NW.shape[1],), eps=1e-12)
