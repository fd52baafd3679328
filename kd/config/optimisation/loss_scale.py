"""The section ``train.loss_scale``: how float16's gradients are kept from underflow."""

from __future__ import annotations

from pydantic import Field

from kd.config.section import Section


class LossScale(Section):
    """The loss is multiplied by a scale, and gradients are divided by it before the step.

    The fields are the arguments of ``torch.amp.GradScaler``.
    """

    initial: float = Field(65536.0, ge=1e-3, le=2.0**40, description="The scale at the first step.")
    growth_factor: float = Field(2.0, gt=1, le=1024, description="The scale grows by this factor.")
    growth_interval: int = Field(
        2000,
        ge=1,
        le=100_000_000,
        description="It grows after this many steps in a row whose gradients are finite.",
    )
    backoff_factor: float = Field(
        0.5,
        gt=0,
        lt=1,
        description="It falls by this factor when gradients overflow; that step is skipped.",
    )
