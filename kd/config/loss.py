"""The objective."""

from __future__ import annotations

from pydantic import Field

from kd.config.section import Section


class LossConfig(Section):
    """The objective: (1 - alpha) KL(teacher || student) + alpha cross-entropy."""

    alpha: float = Field(
        0.1, ge=0.0, le=1.0, description="Weight of the hard labels; 1 = plain cross-entropy, needs no cache."
    )
    temperature: float = Field(
        1.0,
        gt=0.0,
        le=100.0,
        description="Temperature of teacher and student; other than 1 it needs profile tempered, hidden or dense.",
    )
