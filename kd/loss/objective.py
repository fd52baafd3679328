"""The objective of a job: the divergence, and the weight of each term."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kd.config.loss import Divergence, LearnedTemperature, LossConfig, Ramp


@dataclass(frozen=True)
class Objective:
    """The terms of the loss and their weights; the fields are those of ``kd.config.loss``.

    T^2 multiplies every divergence. Near p = q the gradients of all divergences but total variation
    shrink as 1 / T^2, so the factor keeps the meaning of alpha when T changes. Total variation's
    shrink as 1 / T, so at T > 1 it gains weight by a factor of T. ``teacher_only`` tempers the
    teacher and leaves the student at T = 1; there is then no T^2. ``mean_weight`` is the mean of
    (1 + H)^w over the positions of a step, by which entropy weighting divides; None takes the mean
    over the positions of the pass.
    """

    alpha: float = 0.0
    divergence: Divergence = "forward_kl"
    beta: float = 0.5
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    entropy_weighting: float = 0.0
    teacher_only: bool = False
    mean_weight: float | None = None

    @classmethod
    def of(cls, config: LossConfig) -> Objective:
        """The objective of a job; if alpha has a schedule, at its start."""
        temperature = config.temperature
        return cls(
            alpha=config.alpha.start if isinstance(config.alpha, Ramp) else config.alpha,
            divergence=config.divergence,
            beta=config.beta,
            label_smoothing=config.label_smoothing,
            entropy_weighting=config.entropy_weighting,
            teacher_only=isinstance(temperature, LearnedTemperature)
            and temperature.mode == "teacher_only",
        )

    def with_alpha(self, alpha: float) -> Objective:
        """The objective with ``alpha`` as the weight of the hard labels, all else unchanged."""
        return replace(self, alpha=alpha)

    def with_mean_weight(self, mean_weight: float | None) -> Objective:
        """The objective of a pass over a part of a step that has this mean weight."""
        return replace(self, mean_weight=mean_weight)
