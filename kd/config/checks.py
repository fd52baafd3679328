"""The section ``checks``: what is checked while a student trains."""

from __future__ import annotations

from pydantic import Field

from kd.config.section import Section


class ChecksConfig(Section):
    """The checks of a training run. Each reports an event with its verdict.

    Each run begins with a comparison of loss and gradient of some tokens with a dense float64
    computation, which ends the run if they differ.
    """

    spike_factor: float = Field(3.0, ge=0, le=1000)
    """A loss above this times its moving average is a spike: training returns to the last
    checkpoint with half the learning rate. The third spike fails the run. 0 = do not check."""

    max_skipped: int = Field(10, ge=0, le=10_000)
    """Batches that a run may skip. A batch whose loss or gradient is NaN or infinite is computed a
    second time, and then skipped. If more batches than this must be skipped, or a weight is not
    finite, the run fails."""

    alarms: bool = True
    """Warn if the training looks wrong; the alarms change nothing in it. They are about a first
    loss of a new student that is not near ln(vocabulary), a trained parameter without a gradient, a
    layer whose gradient explodes or vanishes, dead channels of an MLP, steps that are mostly
    clipped or wait for data, a rank for which the others wait, a loss scale of fp16 that keeps
    falling, and a student that drifts away from its teacher."""
