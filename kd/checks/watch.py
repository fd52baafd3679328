"""Watch a training run for spikes, clipping, starvation and falling agreement.

    spike         loss > spike_factor x max(its moving average, 0.1 nats), and the cross-entropy
                  rose by at least half as much
    clipping      most steps of a window had their gradient clipped
    exploding     the gradient of a layer has a large norm
    vanishing     the gradient of a layer has a small one
    dead_units    many channels of a layer's MLP are dead
    starvation    the steps of a window waited for data for some share of their time
    agreement     top-1 agreement with the teacher, against the best so far

``checks.alarms`` false turns off all but the spikes.

The loss alone proves no spike: it jumps where alpha or the temperature does, and the cross-entropy
does not. An alarm sounds once, and again only after its figure has recovered. ``state()`` keeps all
that the weights depend on and all alarms about weights. Seconds belong to this process and are not
kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cache.json_object import Json
from cache.reading.arrays import MEMORY_BYTES
from kd.checks.dead_units import check_dead_units, find_dead_layers
from kd.checks.verdict import Verdict, format_names
from kd.config.checks import ChecksConfig
from kd.config.train import TrainConfig
from kd.text.steps.reading import count_loader_threads

#: Decay of the moving average: it forgets a loss in about ten steps.
DECAY = 0.9
#: Losses that the moving average needs before it counts.
AVERAGE_WARM_UP = 10
#: Nats below which a loss is noise. A student close to its teacher has almost no loss, and three
#: times that is no spike.
LEAST_LOSS = 0.1
#: A spike after this many roll-backs fails the run.
MOST_ROLLBACKS = 2
#: Steps over which shares are taken.
WINDOW = 50
#: First steps of a process whose time does not count: they compile and fill caches.
WARM_UP = 5
#: Norms of a layer's gradient before clipping, beyond which there is an alarm.
EXPLODING_NORM = 100.0
VANISHING_NORM = 1e-7
#: More than these shares of a window's steps clipped, or of its time spent on waiting for data, are
#: an alarm.
CLIPPING_SHARE = 0.5
STARVATION_SHARE = 0.1
#: How far the agreement may fall below its best value before there is an alarm.
AGREEMENT_DROP = 0.1


@dataclass
class _State:
    """The state that a resumed run needs. The counts of steps are those of the current window."""

    average: float = 0.0
    ce_average: float = 0.0
    losses: int = 0
    counted: int = 0
    clipped: int = 0
    clipping: bool = False
    best_agreement: float | None = None
    apart: bool = False
    exploding: list[str] = field(default_factory=list)
    vanishing: list[str] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class StepSeconds:
    """Seconds that a step waited for its data, and that it worked after that."""

    waited: float
    worked: float


class TrainingWatch:
    """The watch over one run. ``state`` and ``restore`` carry it over checkpoints."""

    def __init__(self, checks: ChecksConfig, options: TrainConfig) -> None:
        self._checks = checks
        self._train = options
        self._state = _State()
        self._steps = 0
        self._waited = self._worked = 0.0
        self._starving = False

    def state(self) -> Json:
        """The state that a checkpoint must keep, as JSON values."""
        return asdict(self._state)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a result of ``state``; an empty one starts anew."""
        self._state = _State(**state)

    @property
    def average(self) -> float:
        """The moving average of the loss in nats per token."""
        return self._correct_bias(self._state.average)

    def _correct_bias(self, average: float) -> float:
        """An average corrected for its start at 0, as Adam's are."""
        return average / (1.0 - DECAY**self._state.losses) if self._state.losses else 0.0

    def is_spike(self, loss: float, ce_loss: float) -> bool:
        """Whether a step with this loss and cross-entropy, in nats per token, is a spike.

        Call it before the step is taken. A loss that is not finite is no spike but an error of its
        own.
        """
        factor = self._checks.spike_factor
        if not factor or self._state.losses < AVERAGE_WARM_UP or not math.isfinite(loss + ce_loss):
            return False
        risen = loss - self.average
        ce_risen = ce_loss - self._correct_bias(self._state.ce_average)
        return loss > factor * max(self.average, LEAST_LOSS) and ce_risen > risen / 2

    def make_spike_verdict(
        self, step: int, loss: float, rollbacks: int, checkpoint: Path | None
    ) -> Verdict:
        """The verdict on a spike at ``step``.

        It is ok where the run goes on from ``checkpoint``, its newest good one. ``rollbacks``
        counts earlier roll-backs. A verdict that is not ok must end the run: call ``require``.
        """
        facts = {
            "step": step,
            "loss": loss,
            "average": self.average,
            "rollbacks": rollbacks,
            "checkpoint": str(checkpoint) if checkpoint else None,
        }
        spike = (
            f"At step {step} the loss is {loss:.4g}, "
            f"{loss / max(self.average, 1e-30):.1f} times its moving average"
        )
        if checkpoint is not None and rollbacks < MOST_ROLLBACKS:
            message = (
                f"{spike}: back to {checkpoint.name} with half the learning rate "
                f"(roll-back {rollbacks + 1} of {MOST_ROLLBACKS})."
            )
            return Verdict("spike", True, message, facts=facts)
        end = "; there is no checkpoint to go back to."
        if checkpoint is not None:
            end = (
                f", after {rollbacks} of at most {MOST_ROLLBACKS} roll-backs. "
                f"The last good checkpoint is {checkpoint}."
            )
        return Verdict("spike", False, spike + end, _SPIKE_REMEDY, facts)

    def observe_step(
        self, loss: float, ce_loss: float, grad_norm: float, seconds: StepSeconds
    ) -> list[Verdict]:
        """Record a step that was taken; return the alarms that it sets off.

        ``grad_norm`` is the norm before clipping.
        """
        state = self._state
        state.losses += 1
        state.average += (1.0 - DECAY) * (loss - state.average)
        state.ce_average += (1.0 - DECAY) * (ce_loss - state.ce_average)
        if not self._checks.alarms:
            return []
        alarms = [self._check_clipping(grad_norm), self._check_starvation(seconds)]
        return [alarm for alarm in alarms if alarm is not None]

    def observe_layers(self, norms: Mapping[str, float]) -> list[Verdict]:
        """Record the norm of each layer's gradient before clipping; return the alarms.

        A norm that is not finite is an error of its own.
        """
        if not self._checks.alarms:
            return []
        state = self._state
        large = [name for name, norm in norms.items() if EXPLODING_NORM < norm < math.inf]
        small = [name for name, norm in norms.items() if norm < VANISHING_NORM]
        alarms = []
        for check, now, before, bound, remedy in (
            ("exploding", large, state.exploding, f"above {EXPLODING_NORM:g}", _EXPLODING_REMEDY),
            ("vanishing", small, state.vanishing, f"below {VANISHING_NORM:g}", _VANISHING_REMEDY),
        ):
            if new := [name for name in now if name not in before]:
                facts = {"norms": {name: norms[name] for name in now}}
                message = f"The norm of the gradient is {bound} in {format_names(new)}."
                alarms.append(Verdict(check, False, message, remedy, facts))
        state.exploding, state.vanishing = large, small
        return alarms

    def observe_units(self, shares: dict[str, float]) -> list[Verdict]:
        """Record the share of each layer's dead units; return an alarm where a layer has many."""
        state = self._state
        dead = find_dead_layers(shares)
        new = set(dead) - set(state.dead)
        state.dead = dead
        return [check_dead_units(shares)] if new else []

    def _check_clipping(self, grad_norm: float) -> Verdict | None:
        state = self._state
        limit = self._train.max_grad_norm
        state.counted += 1
        # The loss scaler skips a step with an infinite norm, so that step was not clipped.
        state.clipped += 0 < limit < grad_norm < math.inf
        if state.counted < WINDOW:
            return None
        share = state.clipped / state.counted
        before = state.clipping
        state.counted = state.clipped = 0  # the next window
        state.clipping = share > CLIPPING_SHARE
        if before or not state.clipping:
            return None
        message = (
            f"{share:.0%} of the last {WINDOW} steps were clipped to a gradient norm of {limit:g}."
        )
        return Verdict(
            "clipping", False, message, _CLIPPING_REMEDY, {"share": share, "max_grad_norm": limit}
        )

    def _check_starvation(self, seconds: StepSeconds) -> Verdict | None:
        self._steps += 1
        if self._steps <= WARM_UP:
            return None
        self._waited = self._waited + seconds.waited
        self._worked = self._worked + seconds.worked
        if (self._steps - WARM_UP) % WINDOW:
            return None
        share = self._waited / max(self._waited + self._worked, 1e-9)
        before = self._starving
        self._waited = self._worked = 0.0
        self._starving = share > STARVATION_SHARE
        if before or not self._starving:
            return None
        train = self._train
        message = f"The last {WINDOW} steps waited for data {share:.0%} of their time."
        remedy = (
            f"Raise train.dataloader_num_workers (now {count_loader_threads(train)}). If the cache "
            f"is larger than {MEMORY_BYTES >> 20} MiB, set train.order (now {train.order}) to "
            "windows. Or put the cache on a faster disk."
        )
        return Verdict("starvation", False, message, remedy, {"share": share})

    def observe_evaluation(self, found: Mapping[str, Any]) -> list[Verdict]:
        """Record an evaluation; return an alarm where the student drifts away from its teacher."""
        now = found.get("validation_agreement")
        state = self._state
        if now is None or not self._checks.alarms:
            return []
        # The best is kept across checkpoints: a slow drift has no single bad step.
        best = state.best_agreement = max(now, state.best_agreement or 0.0)
        before = state.apart
        state.apart = best - now > AGREEMENT_DROP
        if before or not state.apart:
            return []
        message = (
            f"Student and teacher have the same best token {now:.1%} of the time, "
            f"after {best:.1%} at best."
        )
        facts = {"agreement": now, "best": best}
        return [Verdict("agreement", False, message, _AGREEMENT_REMEDY, facts)]


_SPIKE_REMEDY = "Lower train.learning_rate, add train.warmup_steps, or lower train.max_grad_norm."
_EXPLODING_REMEDY = (
    "Lower train.learning_rate, add train.warmup_steps, or lower train.max_grad_norm."
)
_VANISHING_REMEDY = (
    "The layer learns nothing. With precision fp16 use bf16 or fp32; else look for a layer that "
    "the loss does not reach, or raise train.learning_rate."
)
_CLIPPING_REMEDY = (
    "All clipped steps have one length, however large the gradient: "
    "lower train.learning_rate, or raise train.max_grad_norm."
)
_AGREEMENT_REMEDY = (
    "The student forgets its teacher: lower loss.alpha or train.learning_rate, or stop early."
)
