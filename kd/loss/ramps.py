"""Values with a schedule, as pure functions of the step: a resumed run needs no state for them."""

from __future__ import annotations

import math

from kd.config.loss import Ramp


def evaluate_ramp(value: float | Ramp, step: int, steps: int) -> float:
    """Return the value at optimiser step ``step`` (from 0) of a run of ``steps``.

    A number is constant. A ramp is ``start`` at step 0, and ``end`` from its last step on.
    """
    if not isinstance(value, Ramp):
        return value
    share = min(step / max((value.steps or steps) - 1, 1), 1.0)
    match value.schedule:
        case "cosine":
            share = (1.0 - math.cos(math.pi * share)) / 2.0
        case "step":
            share = float(share >= 0.5)
    between = (1.0 - share) * value.start + share * value.end  # exact to the bit at both ends
    least, most = sorted((value.start, value.end))
    # Rounding may step over an end, and the records may not cover a temperature beyond it.
    return min(max(between, least), most)
