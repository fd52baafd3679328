"""What is watched at every step and every evaluation: spikes, clipping, starvation, agreement.

    spike         loss > spike_factor x max(its moving average, 0.1 nats), and the cross-entropy rose half as far
    clipping      share of a window of steps whose gradient was clipped
    starvation    seconds that a window of steps waited for data, as a share of all their seconds
    agreement     top-1 agreement with the teacher, against the best so far

The loss alone proves no spike: it jumps where alpha or the temperature does, and the cross-entropy then does not. An
alarm is told once, and again only after the figure has been well in between. All that decides about weights, and all
that is told of them, is kept in ``state()``; seconds are this process's own and are not.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kd.batches import loader_threads
from kd.checks.verdict import Verdict
from kd.config.job import JobConfig

#: The moving average forgets a loss in about ten steps, and says nothing before it has seen as many.
DECAY, FIRST = 0.9, 10
#: Nats below which a loss is noise: of a student that is almost its teacher, 3 times nothing is no spike.
LEAST_LOSS = 0.1
#: Steps over which shares are taken; the first steps of a process, which compile and fill caches, tell nothing of time.
WINDOW, WARM_UP = 50, 5


@dataclass
class _State:
    """What a resumed run must know. Numbers of steps count those of the present window."""

    average: float = 0.0
    ce_average: float = 0.0
    losses: int = 0
    counted: int = 0
    clipped: int = 0
    clipping: bool = False
    best_agreement: float | None = None
    apart: bool = False


@dataclass(frozen=True)
class Seconds:
    """What a step waited for its data, and what it worked after that."""

    waited: float
    worked: float


class Watch:
    """Made once for a run; ``state`` and ``restore`` carry it over checkpoints and roll-backs."""

    def __init__(self, config: JobConfig) -> None:
        assert config.train is not None, "JobConfig refuses a training job without a train section"
        self._checks, self._train, self._state = config.checks, config.train, _State()
        self._steps = 0
        self._waited = self._worked = 0.0
        self._starving = False

    def state(self) -> dict[str, Any]:
        """All that a checkpoint must keep, as JSON values."""
        return asdict(self._state)

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what ``state`` gave; an empty one starts anew."""
        self._state = _State(**state)

    # ------------------------------------------------------------------ losses

    @property
    def average(self) -> float:
        """The moving average of the loss in nats per token."""
        return self._freed(self._state.average)

    def _freed(self, average: float) -> float:
        """An average freed of its beginning at 0, as Adam's are."""
        return average / (1.0 - DECAY**self._state.losses) if self._state.losses else 0.0

    def spike(self, loss: float, ce_loss: float) -> bool:
        """Whether a step with this loss and cross-entropy, in nats per token, is a spike; ask before it is taken.

        One that is not finite is no spike but an error of its own.
        """
        factor = self._checks.spike_factor
        if not factor or self._state.losses < FIRST or not math.isfinite(loss + ce_loss):
            return False
        risen, ce_risen = loss - self.average, ce_loss - self._freed(self._state.ce_average)
        return loss > factor * max(self.average, LEAST_LOSS) and ce_risen > risen / 2

    def spiked(self, step: int, loss: float, rollbacks: int, checkpoint: Path | None) -> Verdict:
        """The verdict on a spike at ``step``: ok where the run goes on from ``checkpoint``, its newest good one.

        ``rollbacks`` counts those before this one. The one that must end the run is raised by ``require``.
        """
        most = self._checks.max_rollbacks
        facts = {
            "step": step,
            "loss": loss,
            "average": self.average,
            "rollbacks": rollbacks,
            "checkpoint": str(checkpoint) if checkpoint else None,
        }
        said = f"At step {step} the loss is {loss:.4g}, {loss / max(self.average, 1e-30):.1f} times its moving average"
        if checkpoint is None:
            return Verdict("spike", False, f"{said}; there is no checkpoint to go back to.", _SLOWER, facts)
        if rollbacks >= most:
            ended = f"{said}, after {rollbacks} of at most {most} roll-backs. The last good checkpoint is {checkpoint}."
            return Verdict("spike", False, ended, _SLOWER, facts)
        back = f"{said}: back to {checkpoint.name} with half the learning rate (roll-back {rollbacks + 1} of {most})."
        return Verdict("spike", True, back, facts=facts)

    # ------------------------------------------------------------------ steps

    def after_step(self, loss: float, ce_loss: float, grad_norm: float, seconds: Seconds) -> list[Verdict]:
        """Note a step that was taken; returns the alarms that it sets off.

        ``grad_norm`` is the one before clipping.
        """
        state = self._state
        state.losses += 1
        state.average += (1.0 - DECAY) * (loss - state.average)
        state.ce_average += (1.0 - DECAY) * (ce_loss - state.ce_average)
        alarms = [self._clipping(grad_norm), self._starvation(seconds)]
        return [alarm for alarm in alarms if alarm is not None]

    def _clipping(self, grad_norm: float) -> Verdict | None:
        state, limit = self._state, self._train.max_grad_norm
        state.counted += 1
        state.clipped += 0 < limit < grad_norm < math.inf  # an infinite one is skipped by the loss scaler
        if state.counted < WINDOW:
            return None
        share, most, before = state.clipped / state.counted, self._checks.clipping_share, state.clipping
        state.counted = state.clipped = 0
        state.clipping = share > most
        if before or not state.clipping:
            return None
        message = f"{share:.0%} of the last {WINDOW} steps were clipped to a gradient norm of {limit:g}."
        return Verdict("clipping", False, message, _CLIPPING, {"share": share, "max_grad_norm": limit})

    def _starvation(self, seconds: Seconds) -> Verdict | None:
        self._steps += 1
        if self._steps <= WARM_UP:
            return None
        self._waited, self._worked = self._waited + seconds.waited, self._worked + seconds.worked
        if (self._steps - WARM_UP) % WINDOW:
            return None
        share, before = self._waited / max(self._waited + self._worked, 1e-9), self._starving
        self._waited = self._worked = 0.0
        self._starving = share > self._checks.starvation_share
        return self._starved(share) if self._starving and not before else None

    def _starved(self, share: float) -> Verdict:
        train = self._train
        message = f"The last {WINDOW} steps waited for data {share:.0%} of their time."
        remedy = (
            f"Raise train.dataloader_num_workers (now {loader_threads(train)}) or dataloader_prefetch_factor "
            f"(now {train.dataloader_prefetch_factor}), or put the cache on a faster disk."
        )
        return Verdict("starvation", False, message, remedy, {"share": share})

    # ------------------------------------------------------------------ evaluations

    def after_evaluation(self, found: dict[str, Any]) -> list[Verdict]:
        """Note an evaluation; returns an alarm where the student drifts away from its teacher."""
        now, state = found.get("validation_agreement"), self._state
        if now is None:
            return []
        best = state.best_agreement = max(now, state.best_agreement or 0.0)
        before, state.apart = state.apart, best - now > self._checks.agreement_drop
        if before or not state.apart:
            return []
        message = f"Student and teacher name the same best token {now:.1%} of the time, after {best:.1%} at best."
        return [Verdict("agreement", False, message, _AGREEMENT, {"agreement": now, "best": best})]


_SLOWER = "Lower train.learning_rate, add train.warmup_steps, or lower train.max_grad_norm."
_CLIPPING = "The steps have one length whatever the gradient: lower train.learning_rate, or raise train.max_grad_norm."
_AGREEMENT = "The student forgets its teacher: lower loss.alpha or train.learning_rate, or stop early."
