"""The temperature of a run: a number, a schedule, or learned.

A learned temperature is T = min (max / min)^sigmoid(theta): every theta gives a T between the
bounds, and a step of theta multiplies T. Theta has its own Adam here, without weight decay; the
student's optimiser never sees it. With u = log T, theta descends this slope:

    adversarial     -c d log(T^2 KL) / du   T increases what the student decreases (gradient
                                            reversal). c grows to ``ADVERSARY_WEIGHT`` over
                                            ``RAMP_STEPS``. The slope is divided by the loss, so
                                            that the prior weighs the same for a student near its
                                            teacher and for one far away.
    entropy         E[H(p_T)] - target      dual ascent: a teacher above the target entropy lowers
                                            T. H grows with T, so exactly one T meets the target.
                                            This mode has no prior.
    lookahead       -d cos / du             cos is the cosine between the gradient of the held-out
                                            cross-entropy and that of the loss at T
                                            (``kd.training.lookahead``), every ``interval`` steps.
    teacher_only    -d cos / du             like lookahead, with the student at T = 1.

All modes but entropy add the slope of ``PRIOR`` log(T / init)^2, which pulls T back to init.

Minimising the loss itself over T is not offered: KL falls to 0 as T grows, for any student, and T^2
KL falls as T shrinks, so both end at a bound. A KL in which only the teacher is tempered falls as
the teacher's distribution becomes the easiest one to imitate, the flattest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from kd.config.loss import LearnedTemperature, Ramp
from kd.loss.ramps import evaluate_ramp
from kd.parallel.group import ALONE, Group

#: Decay rates of the two moments of Adam for theta.
BETAS = (0.9, 0.99)
#: Weight of the adversary. At 1, T stays at its upper bound under any prior that lets T move.
ADVERSARY_WEIGHT = 0.1
#: Steps over which the weight of the adversary grows from 0.
RAMP_STEPS = 100
#: Weight of (log(T / init))^2, which pulls T back to init.
PRIOR = 0.1
#: Decay of the running mean of the loss, by which the adversary's gradient is divided.
LEVEL_DECAY = 0.99
#: Largest |theta|, at 1 % from a bound. Farther out the sigmoid is so flat that T cannot come back.
FARTHEST_THETA = math.log(0.99 / 0.01)
#: T counts as at a bound within this share of the range of log T.
NEAR_BOUND = 0.02
#: Share of the steps that T may be at a bound before there is an alarm.
TOLERATED_SHARE = 0.01


@dataclass(frozen=True)
class StepStatistics:
    """The statistics of a step that the temperature needs, as means per token.

    ``kd`` is T^2 D and ``entropy`` H(p_T), both in nats. ``lookahead_slope`` is the slope of
    ``kd.training.lookahead``, None if this step computed none. ``loss_scale`` is the factor by
    which the loss was multiplied before its backward pass; if ranks add up their gradients, also
    by their number.
    """

    kd: float
    entropy: float
    lookahead_slope: float | None = None
    loss_scale: float = 1.0


class TemperatureControl(nn.Module):
    """The temperature of every step; all of its state is in ``state_dict``.

    ``state_dict`` is empty if T is not learned. The module stays on the CPU: the loop reads T at
    every step and must not wait for a GPU.
    """

    theta: Tensor
    mean: Tensor  # Adam's first moment of theta's gradient
    square: Tensor  # Adam's second moment
    moves: Tensor  # steps of Adam
    level: Tensor  # running mean of T^2 D
    gradient: Tensor  # for theta, at its last move
    taken: Tensor  # steps of the run
    near: Tensor  # steps of the run with T at a bound
    crossed: Tensor  # 0 below the tolerated share, 1 at the step that crosses it, 2 after it

    def __init__(self, config: float | Ramp | LearnedTemperature, steps: int) -> None:
        """Make the control for ``loss.temperature``, for a run of ``steps`` optimiser steps."""
        super().__init__()
        self.config = config
        self.steps = steps
        self._leaf: Tensor | None = None
        # T of the last step.
        self._used = config.init if isinstance(config, LearnedTemperature) else self.evaluate(0)
        if not isinstance(config, LearnedTemperature):
            return
        share = math.log(config.init / config.min) / math.log(config.max / config.min)
        theta = _make_scalar(math.log(share / (1.0 - share)))
        self.theta = nn.Parameter(theta, requires_grad=False)
        for name in ("mean", "square", "level", "gradient"):
            self.register_buffer(name, _make_scalar(0.0))
        for name in ("moves", "taken", "near", "crossed"):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64))

    @property
    def learned(self) -> bool:
        """True if T is learned, so that there is state to keep."""
        return isinstance(self.config, LearnedTemperature)

    @property
    def follows_held_out(self) -> bool:
        """True if ``kd.training.lookahead`` moves T."""
        return self._mode in {"lookahead", "teacher_only"}

    def is_lookahead_step(self, step: int) -> bool:
        """Return whether this ``step``, one in ``interval``, needs a ``lookahead_slope``."""
        config = self.config
        if not isinstance(config, LearnedTemperature) or not self.follows_held_out:
            return False
        return (step + 1) % config.interval == 0

    def evaluate(self, step: int) -> float:
        """T at ``step`` as a number, in every mode."""
        if isinstance(self.config, LearnedTemperature):
            share = torch.sigmoid(self.theta).item()
            return self.config.min * math.exp(_compute_log_range(self.config) * share)
        return evaluate_ramp(self.config, step, self.steps)

    def track(self, step: int) -> float | Tensor:
        """T at ``step`` for its micro-batches: a number, or a leaf that sums their gradients for T.

        A leaf (0-dim, float64, on the CPU) costs time, so only the mode that uses d loss / dT gets
        one.
        """
        value = self.evaluate(step)
        self._leaf = _make_scalar(value).requires_grad_() if self._mode == "adversarial" else None
        return value if self._leaf is None else self._leaf

    @torch.no_grad()
    def step(self, step: int, seen: StepStatistics, group: Group = ALONE) -> None:
        """Move theta after the student's step; a slope that is not finite moves nothing.

        A float16 overflow makes such a slope.
        """
        config = self.config
        self._used = self.evaluate(step)
        if not isinstance(config, LearnedTemperature):
            return
        if self._leaf is not None and not group.alone:
            own = self._leaf.grad
            self._leaf.grad = group.add_(torch.zeros_like(self._leaf) if own is None else own)
        if seen.lookahead_slope is not None and not group.alone:
            # Each rank looks at the same text, but with a dropout of its own: the mean gives all of
            # them one T.
            total = group.add_(_make_scalar(seen.lookahead_slope))
            seen = replace(seen, lookahead_slope=total.item() / group.size)
        slope = self._compute_slope(config, step, seen)
        if slope is not None and math.isfinite(slope):
            share = torch.sigmoid(self.theta).item()
            self.gradient.fill_(slope * _compute_log_range(config) * share * (1.0 - share))
            interval = config.interval if self.is_lookahead_step(step) else 1
            self._move_theta(config.learning_rate * interval)
        self._count_step()

    def report(self) -> dict[str, float | None]:
        """T of the last step, the gradient that theta descends, and how far T is from a bound.

        The distance is to the nearer bound, as a share of the range of log T: 0.5 in the middle.
        Gradient and distance are None if T is not learned.
        """
        return {
            "temperature": self._used,
            "temperature_gradient": self.gradient.item() if self.learned else None,
            "temperature_margin": self._compute_margin() if self.learned else None,
        }

    def describe_alarm(self) -> str | None:
        """A warning that T stays at a bound, at the step when such steps exceed 1 %, else None."""
        config = self.config
        if not isinstance(config, LearnedTemperature) or self.crossed.item() != 1:
            return None
        bound = "min" if self._used**2 < config.min * config.max else "max"
        target = ""
        if config.mode == "entropy":
            target = f", change loss.temperature.target_entropy (now {config.target_entropy:g})"
        return (
            f"The learned temperature is {self._used:.3g} and was within {NEAR_BOUND:.0%} of a "
            f"bound in {self.near.item() / self.taken.item():.1%} of the steps; at most "
            f"{TOLERATED_SHARE:.0%} is expected. Widen loss.temperature.{bound} (now "
            f"{getattr(config, bound):g}){target}, or set a fixed temperature."
        )

    def _compute_slope(
        self, config: LearnedTemperature, step: int, seen: StepStatistics
    ) -> float | None:
        """The slope in log T that theta descends; None if this step has none."""
        match config.mode:
            case "entropy":
                assert config.target_entropy is not None, "the mode needs it"
                return seen.entropy - config.target_entropy
            case "adversarial":
                # -c d loss / d log T per token, over the running mean of |T^2 D|: of one sampled
                # record T^2 D may be below 0.
                if math.isfinite(seen.kd):
                    self.level.lerp_(_make_scalar(abs(seen.kd)), 1.0 - LEVEL_DECAY)
                # The mean begins at 0; dividing by the weight of its terms corrects that, as in
                # Adam.
                level = self.level.item() / (1.0 - LEVEL_DECAY ** (self.taken.item() + 1))
                grown = min(step / RAMP_STEPS, 1.0) if RAMP_STEPS else 1.0
                gradient = self._leaf.grad if self._leaf is not None else None
                d_loss = gradient.item() / seen.loss_scale if gradient is not None else 0.0
                slope = -ADVERSARY_WEIGHT * grown * d_loss * self._used / max(level, 1e-6)
            case _:
                if seen.lookahead_slope is None:
                    return None
                slope = seen.lookahead_slope
        return slope + 2.0 * PRIOR * math.log(self._used / config.init)

    def _move_theta(self, learning_rate: float) -> None:
        """One step of Adam (arXiv 1412.6980, algorithm 1), with |theta| <= ``FARTHEST_THETA``."""
        self.moves += 1
        self.mean.lerp_(self.gradient, 1.0 - BETAS[0])
        self.square.lerp_(self.gradient**2, 1.0 - BETAS[1])
        mean, square = (
            moment.item() / (1.0 - beta ** self.moves.item())
            for moment, beta in zip((self.mean, self.square), BETAS, strict=True)
        )
        self.theta.sub_(learning_rate * mean / (math.sqrt(square) + 1e-12)).clamp_(
            -FARTHEST_THETA, FARTHEST_THETA
        )

    def _count_step(self) -> None:
        """Count the step, and whether T was at a bound in it; update ``crossed``."""
        self.taken += 1
        self.near += self._compute_margin() < NEAR_BOUND
        above = self.near.item() > TOLERATED_SHARE * self.taken.item()
        self.crossed.fill_((1 if self.crossed.item() == 0 else 2) if above else 0)

    def _compute_margin(self) -> float:
        """The distance of T to the nearer bound, as a share of the range of log T."""
        assert isinstance(self.config, LearnedTemperature)
        share = math.log(self._used / self.config.min) / _compute_log_range(self.config)
        return min(share, 1.0 - share)

    @property
    def _mode(self) -> str | None:
        return self.config.mode if isinstance(self.config, LearnedTemperature) else None


def _make_scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _compute_log_range(config: LearnedTemperature) -> float:
    return math.log(config.max / config.min)
