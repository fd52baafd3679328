"""Values that move while a run goes on, as pure functions of the step: a resumed run has them without any state."""

from __future__ import annotations

import math

from kd.config.loss import Ramp


def ramp_value(value: float | Ramp, step: int, steps: int) -> float:
    """The value at optimiser step ``step`` (from 0) of a run of ``steps``; a number is itself at every step.

    A ramp has its ``start`` at step 0 and its ``end`` from the last step of the way on.
    """
    if not isinstance(value, Ramp):
        return value
    share = min(step / max((value.steps or steps) - 1, 1), 1.0)
    match value.schedule:
        case "cosine":
            share = (1.0 - math.cos(math.pi * share)) / 2.0
        case "step":
            share = float(share >= 0.5)
    between = (1.0 - share) * value.start + share * value.end  # both ends are met to the bit
    least, most = sorted((value.start, value.end))
    return min(max(between, least), most)  # rounding leads past an end that the records may not cover
