"""What is checked while a student trains."""

from __future__ import annotations

from pydantic import Field

from kd.config.section import Section


class ChecksConfig(Section):
    """Checks that a careful engineer makes by hand; each is an event with a verdict."""

    initial_loss: bool = Field(True, description="A fresh student must begin near ln(vocabulary), else a warning.")
    parity_tokens: int = Field(
        8,
        ge=0,
        le=4096,
        description="Tokens whose loss and gradient are compared with a dense float64 one at the start; 0 = none.",
    )
    gradients: bool = Field(
        True, description="After the first backward pass every trained parameter must have a finite gradient, not 0."
    )
    spike_factor: float = Field(
        3.0, ge=0, le=1000, description="A loss above this times its moving average is a spike; 0 = do not look."
    )
    max_rollbacks: int = Field(
        2,
        ge=0,
        le=100,
        description="At a spike: back to the last checkpoint with half the learning rate, at most so often; then fail.",
    )
    clipping_share: float = Field(
        0.5, gt=0, le=1, description="Warn where more than this share of the steps is clipped."
    )
    starvation_share: float = Field(
        0.1, gt=0, le=1, description="Warn where the steps wait for data more than this share of their time."
    )
    agreement_drop: float = Field(
        0.1,
        gt=0,
        le=1,
        description="Warn where top-1 agreement with the teacher falls by more than this below its best.",
    )
