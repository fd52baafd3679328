"""The temperature of a run: a number, a schedule, or one that is learned.

A learned one is T = min (max / min)^sigmoid(theta): every theta is a temperature between the bounds, and a step of
theta is a factor of T. Theta has an Adam of its own here, without weight decay, and the student's optimiser never sees
it. What it descends is, with u = log T,

    adversarial     -c d log(T^2 KL) / du   T makes large what the student makes small (gradient reversal); its weight
                                            grows to c = ``ADVERSARY`` over ``ramp_steps``. Divided by the loss, so
                                            that the prior weighs the same for a student near its teacher and far
    entropy         E[H(p_T)] - target      dual ascent: too uncertain a teacher lowers T. H grows with T, so one T
                                            meets the target, and it is met: this mode has no prior
    lookahead       -d cos / du             of the angle between the gradient of the held-out cross-entropy and that
                                            of the loss at T (``kd.levers.lookahead``), every ``interval`` steps
    teacher_only    the same                with the student at T = 1

and 2 prior log(T / init), the slope of prior log(T / init)^2. Minimising the loss itself over T is not offered. KL
falls to 0 as T grows, whatever the student is, and T^2 KL as T shrinks: both end at a bound. A KL of which the teacher
alone is tempered falls as its distribution becomes the easiest one to imitate, the flattest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kd.config.loss import LearnedTemperature, Ramp
from kd.levers.ramps import ramp_value

BETAS = (0.9, 0.99)  # of Adam for theta
ADVERSARY = 0.1  # at full weight it would hold T at its upper bound against any prior that leaves T free to move
LEVEL_DECAY = 0.99  # of the running mean of the loss that the adversary's gradient is divided by
FARTHEST = math.log(0.99 / 0.01)  # |theta| at 1 % from a bound: farther out the sigmoid is so flat that T stays there
NEAR = 0.02  # of the range of log T: at a bound
TOLERATED = 0.01  # share of the steps that may be there


@dataclass(frozen=True)
class Seen:
    """What a step saw of the temperature: means per token.

    ``kd`` is T^2 D and ``entropy`` H(p_T), both in nats; ``ahead`` is the slope of ``kd.levers.lookahead``, where this
    step took one. ``loss_scale`` is what the loss was multiplied by before its backward pass.
    """

    kd: float
    entropy: float
    ahead: float | None = None
    loss_scale: float = 1.0


class TemperatureControl(nn.Module):
    """The temperature of every step; all of its state is in ``state_dict``, which is empty where nothing is learned.

    It stays on the CPU: the loop reads T at every step, and must not wait for a GPU to know it.
    """

    theta: Tensor
    mean: Tensor  # Adam's moments of theta's gradient
    square: Tensor
    moves: Tensor
    level: Tensor  # running mean of T^2 D
    gradient: Tensor  # of theta, at the last move
    taken: Tensor  # steps, and those of them at a bound
    near: Tensor
    crossed: Tensor

    def __init__(self, config: float | Ramp | LearnedTemperature, steps: int) -> None:
        super().__init__()
        self.config, self.steps = config, steps
        self._leaf: Tensor | None = None
        self._used = config.init if isinstance(config, LearnedTemperature) else self.value(0)  # T of the last step
        if not isinstance(config, LearnedTemperature):
            return
        share = math.log(config.init / config.min) / math.log(config.max / config.min)
        self.theta = nn.Parameter(_number(math.log(share / (1.0 - share))), requires_grad=False)
        self._numbers("mean", "square", "level", "gradient")
        self._counts("moves", "taken", "near", "crossed")

    @classmethod
    def of(cls, config: float | Ramp | LearnedTemperature, steps: int) -> TemperatureControl:
        """The control of a run of ``steps`` optimiser steps, as ``loss.temperature`` asks for it."""
        return cls(config, steps)

    @property
    def learned(self) -> bool:
        """Whether T is learned, so that there is state to keep."""
        return isinstance(self.config, LearnedTemperature)

    @property
    def teacher_only(self) -> bool:
        """Whether the student stays at T = 1."""
        return self._mode == "teacher_only"

    @property
    def follows_held_out(self) -> bool:
        """Whether T is moved by ``kd.levers.lookahead``."""
        return self._mode in {"lookahead", "teacher_only"}

    def looks_ahead(self, step: int) -> bool:
        """Whether ``step`` needs ``Seen.ahead``: one in ``interval`` steps of the modes that follow held-out text."""
        config = self.config
        return isinstance(config, LearnedTemperature) and self.follows_held_out and (step + 1) % config.interval == 0

    def value(self, step: int) -> float:
        """T at ``step``, in every mode a plain number."""
        if isinstance(self.config, LearnedTemperature):
            return self.config.min * math.exp(_log_range(self.config) * torch.sigmoid(self.theta).item())
        return ramp_value(self.config, step, self.steps)

    def at(self, step: int) -> float | Tensor:
        """T at ``step`` for the losses of its micro-batches: a number, or a leaf, whose gradient they add up.

        A leaf (0-dim, float64, on the CPU) where the mode follows d loss / dT: the others do not pay for it.
        """
        value = self.value(step)
        self._leaf = _number(value).requires_grad_() if self._mode == "adversarial" else None
        return value if self._leaf is None else self._leaf

    @torch.no_grad()
    def step(self, step: int, seen: Seen) -> None:
        """Move theta after the student's step; a slope that is not finite (an overflow in float16) moves nothing."""
        config = self.config
        self._used = self.value(step)
        if not isinstance(config, LearnedTemperature):
            return
        slope = self._slope(config, step, seen)
        if slope is not None and math.isfinite(slope):
            share = torch.sigmoid(self.theta).item()
            self.gradient.fill_(slope * _log_range(config) * share * (1.0 - share))
            self._move(config.learning_rate * (config.interval if self.looks_ahead(step) else 1))
        self._note()

    def report(self) -> dict[str, float | None]:
        """T of the last step taken, the gradient that theta descends, and the way to the nearer bound.

        The way is a share of the range of log T, so 0.5 in its middle. The latter two are None where T is not learned.
        """
        if not self.learned:
            return {"temperature": self._used, "temperature_gradient": None, "temperature_margin": None}
        return {
            "temperature": self._used,
            "temperature_gradient": self.gradient.item(),
            "temperature_margin": self._margin(),
        }

    def alarm(self) -> str | None:
        """What to tell where T sits at a bound; once, after the step at which the share of such steps crosses 1 %."""
        config = self.config
        if not isinstance(config, LearnedTemperature) or self.crossed.item() != 1:
            return None
        bound = "min" if self._used**2 < config.min * config.max else "max"
        pull = "target_entropy" if config.mode == "entropy" else "prior"
        return (
            f"The learned temperature is {self._used:.3g} and has been within {NEAR:.0%} of a bound for "
            f"{self.near.item() / self.taken.item():.1%} of the steps, where at most {TOLERATED:.0%} is expected. "
            f"Widen loss.temperature.{bound} (now {getattr(config, bound):g}), change loss.temperature.{pull} "
            f"(now {getattr(config, pull):g}), or set a fixed temperature."
        )

    # ------------------------------------------------------------------ how theta moves

    def _slope(self, config: LearnedTemperature, step: int, seen: Seen) -> float | None:
        """What is descended, as a slope in log T; None where this step has none."""
        match config.mode:
            case "entropy":
                assert config.target_entropy is not None, "the configuration refuses mode entropy without it"
                return seen.entropy - config.target_entropy
            case "adversarial":
                slope = self._reversed(config, step, seen)
            case _:
                if seen.ahead is None:
                    return None
                slope = seen.ahead
        return slope + 2.0 * config.prior * math.log(self._used / config.init)

    def _reversed(self, config: LearnedTemperature, step: int, seen: Seen) -> float:
        """-c d loss / d log T per token over the running mean of T^2 D; that of one sampled record may be below 0."""
        if math.isfinite(seen.kd):
            self.level.lerp_(_number(abs(seen.kd)), 1.0 - LEVEL_DECAY)
        level = self.level.item() / (1.0 - LEVEL_DECAY ** (self.taken.item() + 1))
        grown = min(step / config.ramp_steps, 1.0) if config.ramp_steps else 1.0
        gradient = self._leaf.grad if self._leaf is not None else None
        d_loss = gradient.item() / seen.loss_scale if gradient is not None else 0.0
        return -ADVERSARY * grown * d_loss * self._used / max(level, 1e-6)

    def _move(self, learning_rate: float) -> None:
        """One step of Adam (arXiv 1412.6980, algorithm 1); |theta| stays within ``FARTHEST``."""
        self.moves += 1
        self.mean.lerp_(self.gradient, 1.0 - BETAS[0])
        self.square.lerp_(self.gradient**2, 1.0 - BETAS[1])
        mean, square = (
            moment.item() / (1.0 - beta ** self.moves.item())
            for moment, beta in zip((self.mean, self.square), BETAS, strict=True)
        )
        self.theta.sub_(learning_rate * mean / (math.sqrt(square) + 1e-12)).clamp_(-FARTHEST, FARTHEST)

    def _note(self) -> None:
        """Count the step, and whether T was at a bound in it; ``crossed``: 1 at the crossing, 2 after it, 0 below."""
        self.taken += 1
        self.near += self._margin() < NEAR
        above = self.near.item() > TOLERATED * self.taken.item()
        self.crossed.fill_((1 if self.crossed.item() == 0 else 2) if above else 0)

    def _margin(self) -> float:
        assert isinstance(self.config, LearnedTemperature)
        share = math.log(self._used / self.config.min) / _log_range(self.config)
        return min(share, 1.0 - share)

    @property
    def _mode(self) -> str | None:
        return self.config.mode if isinstance(self.config, LearnedTemperature) else None

    def _numbers(self, *names: str) -> None:
        for name in names:
            self.register_buffer(name, _number(0.0))

    def _counts(self, *names: str) -> None:
        for name in names:
            self.register_buffer(name, torch.zeros((), dtype=torch.int64))


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _log_range(config: LearnedTemperature) -> float:
    return math.log(config.max / config.min)
