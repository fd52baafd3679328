"""The section ``checks``: what is checked while a student trains."""

from __future__ import annotations

from pydantic import Field

from kd.config.section import Section


class ChecksConfig(Section):
    """The checks of a training run. Each reports an event with its verdict."""

    initial_loss: bool = Field(
        True, description="Warn if the first loss of a new student is not near ln(vocabulary)."
    )
    parity_tokens: int = Field(
        8,
        ge=0,
        le=4096,
        description=(
            "Tokens whose loss and gradient are compared with a dense float64 computation at the "
            "start; 0 = none."
        ),
    )
    gradients: bool = Field(
        True,
        description=(
            "Check after the first backward pass that every trained parameter has a finite "
            "gradient other than 0."
        ),
    )
    spike_factor: float = Field(
        3.0,
        ge=0,
        le=1000,
        description="A loss above this times its moving average is a spike; 0 = do not check.",
    )
    max_rollbacks: int = Field(
        2,
        ge=0,
        le=100,
        description=(
            "At a spike, training returns to the last checkpoint with half the learning rate. "
            "After this many returns the next spike fails the run."
        ),
    )
    max_skipped: int = Field(
        10,
        ge=0,
        le=10_000,
        description=(
            "Batches that a run may skip. A batch whose loss or gradient is NaN or infinite is "
            "computed a second time, and then skipped. If more batches than this must be skipped, "
            "or a weight is not finite, the run fails."
        ),
    )
    exploding_norm: float = Field(
        100.0,
        ge=0,
        le=1e12,
        description=(
            "Warn if the gradient of a layer has a norm above this, before clipping; 0 = do not "
            "check. Checked every train.logging_steps steps, like vanishing_norm."
        ),
    )
    vanishing_norm: float = Field(
        1e-7,
        ge=0,
        le=1.0,
        description="Warn if the gradient of a layer has a norm below this; 0 = do not check.",
    )
    dead_activation: float = Field(
        1e-6,
        ge=0,
        le=1.0,
        description=(
            "A channel of an MLP is dead if its activation stays below this over the first batch "
            "of an evaluation; 0 = do not check. Not checked with train.compile."
        ),
    )
    dead_share: float = Field(
        0.1, ge=0, le=1, description="Warn if more than this share of a layer's channels is dead."
    )
    loss_scale_falls: int = Field(
        4,
        ge=1,
        le=20,
        description=(
            "Warn if the loss scale of fp16 falls this often within 20 steps: each fall is an "
            "overflow of the gradients, and a skipped step."
        ),
    )
    clipping_share: float = Field(
        0.5, gt=0, le=1, description="Warn if more than this share of the steps is clipped."
    )
    starvation_share: float = Field(
        0.1,
        gt=0,
        le=1,
        description="Warn if the steps wait for data for more than this share of their time.",
    )
    agreement_drop: float = Field(
        0.1,
        gt=0,
        le=1,
        description=(
            "Warn if the top-1 agreement with the teacher falls by more than this below its best "
            "value."
        ),
    )
