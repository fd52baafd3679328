"""Choose the number of knots of a tempered cache: the fewest that keep the error of the tail's mass
small.

Between knots the tail's log-partition B(b) is interpolated by a cubic. Its error is at most h^4 /
384 times the largest fourth cumulant of the tail, with h the distance of knots. That depends on the
teacher, so the error is measured on the first sequence, before anything is written.

Shapes: N positions, D hidden width, V vocabulary, J knots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cache.codec import Codec
from cache.rounding import PARTITION_STEP, round_to_fixed_point
from kd.capture.sampling import LOWEST, Sampler, compute_partition, compute_tail_logprobs
from kd.errors import ModelError
from kd.loss.sparse_targets import interpolate_hermite
from kd.models.lm_head import LMHead

#: The largest mean, over positions and temperatures, of |error of the tail's log-mass|.
LARGEST_LOG_MASS_ERROR = 2e-3
#: The largest mean, over positions and temperatures, of |error of the head's mass|.
LARGEST_HEAD_MASS_ERROR = 1e-3
#: Log-masses are compared down to this one, a mass of 5e-5. Beside an almost certain token the tail
#: is far smaller; its relative error then affects no loss, and is no reason for more knots. Below
#: T = 1 all probabilities together have a sum below 1, and it is compared down to this share of it.
LEAST_LOG_MASS = -10.0
#: Numbers of knots that are tried, in this order.
KNOT_COUNTS = (3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
#: Positions that errors are measured at.
_POSITIONS = 64
#: Temperatures that errors are measured at.
_TEMPERATURES = 33


@dataclass(frozen=True)
class KnotChoice:
    """A number of knots, with its mean errors of the tail's log-mass and of the head's mass."""

    count: int
    log_mass_error: float
    head_mass_error: float

    def __str__(self) -> str:
        return (
            f"{self.count} temperature knots: mean error {self.log_mass_error:.1e} "
            f"of the tail's log-mass and {self.head_mass_error:.1e} of the head's mass"
        )


def choose_knots(hidden_ND: Tensor, gold_N: Tensor, lm_head: LMHead, codec: Codec) -> KnotChoice:
    """Choose the smallest number of knots that keeps both mean errors within their bounds.

    Errors are means over temperatures in equal ratios in the codec's range. Raises ``ModelError``
    where no number of knots is enough.
    """
    every = max(len(gold_N) // _POSITIONS, 1)
    logits_NV = lm_head.compute_logits(hidden_ND[::every])
    # The tail, and all other tokens: each has ``LOWEST`` in the places of the other.
    sampler = Sampler(codec)
    sizes, _ = sampler.split(logits_NV, sampler.list_known(gold_N[::every]))
    tail_NV = compute_tail_logprobs(logits_NV, sizes, slice(None))
    explicit_NV = torch.log_softmax(logits_NV, -1).masked_fill_(tail_NV > LOWEST, LOWEST)
    betas = codec.nodes(_TEMPERATURES)
    # Here J counts the temperatures that errors are measured at.
    exact_NJ = compute_partition(tail_NV, betas)[..., 0]
    explicit_NJ = compute_partition(explicit_NV, betas)[..., 0]
    floor_NJ = torch.logaddexp(explicit_NJ, exact_NJ).clamp(max=0.0) + LEAST_LOG_MASS
    for count in KNOT_COUNTS:
        knots = codec.nodes(count)
        # Round the knots as the cache will: the error of interpolation includes this rounding.
        partition = compute_partition(tail_NV, knots).cpu().numpy()
        stored = round_to_fixed_point(partition)
        stored_NJ2 = torch.from_numpy(stored).to(tail_NV.device).double() * PARTITION_STEP
        got_NJ = torch.stack([interpolate_hermite(stored_NJ2, knots, beta)[0] for beta in betas], 1)
        error = (got_NJ.clamp(min=floor_NJ) - exact_NJ.clamp(min=floor_NJ)).abs().mean()
        head_NJ = torch.sigmoid(explicit_NJ - got_NJ) - torch.sigmoid(explicit_NJ - exact_NJ)
        found = KnotChoice(count, float(error), float(head_NJ.abs().mean()))
        if (
            found.log_mass_error <= LARGEST_LOG_MASS_ERROR
            and found.head_mass_error <= LARGEST_HEAD_MASS_ERROR
        ):
            return found
    raise ModelError(
        f"Temperatures {codec.temperatures[0]:g} to {codec.temperatures[1]:g} "
        f"cannot be covered: {found}.",
        "Narrow cache.temperatures, or use cache.profile hidden, "
        "which is exact at any temperature.",
    )
