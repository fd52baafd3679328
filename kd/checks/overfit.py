"""Learning a handful of sequences by heart: what a sound student, loss and optimiser do in a hundred steps.

    before    the mean loss of the sequences, untrained
    after     the same when the loop has trained on nothing else, at the job's learning rate; where that does not do, at
              ten times, then at a tenth of it
    floor     the least that any logits could come to (``kd.checks.floor``)

A student has learnt them where it went nine tenths of the way from ``before`` to ``floor``; where the way is short, for
it began well, half of it that ends near the floor will do. The loop is the job's own, with what hinders memory left
out: dropout, weight decay, averaging, a schedule.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from cache.codec import Codec
from cache.records import Records, Sequences
from kd.batches import Batch, Source, make_batch
from kd.checks.floor import least_loss
from kd.checks.parity import first
from kd.checks.verdict import Verdict
from kd.config.job import JobConfig
from kd.config.loss import FeatureConfig, LearnedTemperature, Ramp
from kd.errors import TrainingError
from kd.losses import Objective, distillation_loss
from kd.models import head_of
from kd.precision import Precision, pick_device, target_hidden_states
from kd.progress import Event, Monitor
from kd.targets import TargetDecoder, Targets
from kd.train import train

STEPS = 100
#: At most so many sequences, and of long ones as few as have about so many tokens.
SEQUENCES, TOKENS = 4, 1024
#: Logits that are looked at when the loss is measured and its floor is sought.
MEASURED_ELEMENTS = 2**21
#: What counts as learnt, as learnt if it ends near the floor, and as not having moved at all, in shares of the way.
LEARNT, HALF, UNMOVED = 0.9, 0.5, 0.01
#: Nats above the floor that are near it, and that are nothing.
NEAR, NOTHING = 0.3, 0.02
#: Checks of the loop that may say why nothing is learnt; the others tell how well.
TELLING = {"parity", "gradients", "initial_loss"}
#: Rates that are tried, in turn, in multiples of the job's.
RATES = (1.0, 10.0, 0.1)


@dataclass(frozen=True)
class Few:
    """The sequences ``numbers`` of another source, over and over, and always the same sample of their records."""

    source: Source
    numbers: NDArray[np.int64]

    @property
    def train_count(self) -> int:
        """Sequences to train on."""
        return len(self.numbers)

    @property
    def validation_count(self) -> int:
        """Nothing is held out."""
        return 0

    @property
    def identity(self) -> str:
        """A name for the content."""
        return f"{self.source.identity} {self.numbers.tolist()}"

    @property
    def codec(self) -> Codec | None:
        """What the records' columns mean."""
        return self.source.codec

    def teacher_head(self) -> dict[str, NDArray[Any]]:
        """The teacher's LM head, of a hidden cache."""
        return self.source.teacher_head()

    def read(self, indices: np.ndarray, draws: np.ndarray | int = 0) -> tuple[Sequences, Records | None]:
        """The sequences of ``indices`` and their records, in that order."""
        return self.source.read(self.numbers[indices], 0)


@dataclass(frozen=True)
class _Attempt:
    """What training at ``rate`` came to: the loss after it, or why it ended; and the verdicts that went against it."""

    rate: float
    after: float = float("nan")
    error: str = ""
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class Way:
    """Where the student began, and the least that it could come to."""

    before: float
    floor: float

    def gone(self, after: float) -> float:
        """The share of the way; 1 = at the floor, 0 = where it began, NaN where there is no number."""
        return (self.before - after) / max(self.before - self.floor, NOTHING)

    def learnt(self, after: float) -> bool:
        """Whether that is far enough."""
        left, gone = after - self.floor, self.gone(after)
        return gone >= LEARNT or left <= NOTHING or (left <= NEAR and gone >= HALF)


def overfit(
    config: JobConfig, source: Source, student: PreTrainedModel, vocabulary: int, folder: Path, monitor: Monitor
) -> Verdict:
    """Train copies of ``student`` on a handful of the training sequences; says what is likely wrong if none learns.

    ``student`` itself stays as it is; ``folder`` is for the attempts' files. Raises what the loop raises, except for a
    ``TrainingError``, which is a finding.
    """
    few = _handful(source, config)
    config = _plainly(config, few.train_count)
    sample = _Sample.of(config, few, vocabulary)
    nn.Module.to(student, pick_device())
    way = Way(sample.loss(student), sample.floor())
    if not np.isfinite(way.before):
        return _verdict(way, [_Attempt(0.0, way.before, "The loss of the untrained student is not finite.")], few)
    attempts = []
    for attempt in _attempts(config, few, student, sample, folder, monitor):
        attempts.append(attempt)
        if way.learnt(attempt.after):
            break
    return _verdict(way, attempts, few)


def _attempts(
    config: JobConfig, few: Few, student: PreTrainedModel, sample: _Sample, folder: Path, monitor: Monitor
) -> Iterator[_Attempt]:
    """One attempt for each rate, each from the same weights."""
    assert config.train is not None, "JobConfig refuses a training job without a train section"
    for number, factor in enumerate(RATES):
        rate = config.train.learning_rate * factor
        options = config.train.model_copy(update={"learning_rate": rate})
        faults: list[str] = []
        learner = _without_dropout(copy.deepcopy(student))
        try:
            tried = config.model_copy(update={"train": options})
            train(tried, few, learner, sample.vocabulary, folder / f"attempt-{number}", _listening(monitor, faults))
        except TrainingError as error:
            yield _Attempt(rate, error=error.detail, faults=tuple(faults))
        else:
            yield _Attempt(rate, sample.loss(learner), faults=tuple(faults))


def _listening(monitor: Monitor, faults: list[str]) -> Monitor:
    """Pass progress on, and keep what the loop's own checks object to; of its other events there is nothing to tell."""

    def listen(event: Event) -> None:
        if event.type == "progress":
            monitor.listen(event)
        elif event.type == "check" and event.data["check"] in TELLING and not event.data["ok"]:
            faults.append(event.data["message"])

    return Monitor(listen, monitor.should_stop)


# ---------------------------------------------------------------------- what is trained, and on what


def _handful(source: Source, config: JobConfig) -> Few:
    """The first training sequences that have a target, in all about ``TOKENS`` long."""
    count = max(1, min(SEQUENCES, TOKENS // config.data.sequence_length))
    found: list[int] = []
    for number in range(source.train_count):
        if len(found) < count and source.read(np.array([number]))[0].target_mask.any():
            found.append(number)
    if not found:
        raise TrainingError("No position of the training text is a target.", "See data.train and its chat template.")
    return Few(source, np.array(found))


def _plainly(config: JobConfig, sequences: int) -> JobConfig:
    """The job with a constant objective, and a loop that does nothing but learn: ``sequences`` at every step."""
    assert config.train is not None, "JobConfig refuses a training job without a train section"
    alpha, temperature = config.loss.alpha, config.loss.temperature
    loss = {
        "alpha": alpha.start if isinstance(alpha, Ramp) else alpha,
        "temperature": temperature.start if isinstance(temperature, Ramp) else temperature,
        "features": FeatureConfig(),
    }
    if isinstance(temperature, LearnedTemperature):
        loss["temperature"] = temperature.init
    return config.model_copy(
        update={
            "loss": config.loss.model_copy(update=loss),
            "train": config.train.model_copy(update={**_LOOP, "batch_size": sequences}),
            "checks": config.checks.model_copy(update={"spike_factor": 0.0}),
        }
    )


_LOOP: dict[str, Any] = {
    "max_steps": STEPS,
    "epochs": None,
    "gradient_accumulation_steps": 1,
    "lr_scheduler_type": "constant_with_warmup",
    "lr_scheduler_kwargs": {},
    "warmup_steps": STEPS // 10,
    "weight_decay": 0.0,
    "ema_decay": None,
    "compile": "none",
    "logging_steps": STEPS,
    "eval_steps": STEPS,
    "save_steps": STEPS,
    "early_stopping_patience": None,
    "order": "shuffled",
    "report_to": (),
    "trace_steps": 0,
}


def _without_dropout(student: PreTrainedModel) -> PreTrainedModel:
    """``student`` with dropout of 0, in layers of its own and in attentions that keep its probability as a number."""
    for module in student.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return student


# ---------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class _Sample:
    """Some positions of the sequences, and how their loss is measured: in float32, in evaluation mode."""

    batch: Batch
    decoder: TargetDecoder
    objective: Objective
    temperature: float
    vocabulary: int
    positions: int

    @classmethod
    def of(cls, config: JobConfig, few: Few, vocabulary: int) -> _Sample:
        device, temperature = pick_device(), config.loss.temperature
        assert isinstance(temperature, float), "the objective is constant here"
        batch = make_batch(*few.read(np.arange(few.train_count))).to(device)
        positions = max(1, min(len(batch), MEASURED_ELEMENTS // vocabulary))
        decoder = TargetDecoder.of(few, device)
        return cls(batch, decoder, Objective.of(config.loss), temperature, vocabulary, positions)

    @torch.no_grad()
    def loss(self, student: PreTrainedModel) -> float:
        """Nats per position."""
        training = student.training
        student.eval()
        precision = Precision.choose("fp32", pick_device())
        hidden_ND = target_hidden_states(student, self.batch, precision)[: self.positions]
        terms = distillation_loss(hidden_ND, head_of(student, self.vocabulary), self._targets, self.objective)
        student.train(training)
        return float(terms.total) / self.positions

    def floor(self) -> float:
        """The least nats per position that any logits come to."""
        return least_loss(self._targets, self.objective, self.vocabulary) / self.positions

    @property
    def _targets(self) -> Targets:
        return first(self.decoder.targets(self.batch.gold_N, self.batch.teacher, self.temperature), self.positions)


# ---------------------------------------------------------------------- what is told


def _verdict(way: Way, attempts: list[_Attempt], few: Few) -> Verdict:
    last = attempts[-1]
    best = min(attempts, key=lambda attempt: attempt.after if np.isfinite(attempt.after) else np.inf)
    ok = way.learnt(last.after)
    shown = last if ok else best
    facts = {
        "sequences": few.train_count,
        "steps": STEPS,
        "before": way.before,
        "after": shown.after,
        "floor": way.floor,
        "learning_rate": shown.rate,
        "tried": {f"{attempt.rate:g}": attempt.after for attempt in attempts},
    }
    message = (
        f"Trained on {few.train_count} sequence(s) alone, the loss went from {way.before - way.floor:.3f} to "
        f"{shown.after - way.floor:.3f} nats per token above its floor in {STEPS} steps at a learning rate of "
        f"{shown.rate:g}; the floor, below which nothing comes, is {way.floor:.3f}."
    )
    return Verdict("overfit", ok, message, _advice(attempts) if ok else _diagnosis(way, attempts), facts)


def _advice(attempts: list[_Attempt]) -> str:
    """What to think of the rate at which it did learn."""
    if len(attempts) == 1:
        return ""
    side = "low" if attempts[-1].rate > attempts[0].rate else "high"
    return (
        f"All parts work, but train.learning_rate {attempts[0].rate:g} is {side}: it learnt at {attempts[-1].rate:g}."
    )


def _diagnosis(way: Way, attempts: list[_Attempt]) -> str:
    """What is likely wrong, the most telling sign first."""
    faults = [fault for attempt in attempts for fault in attempt.faults]
    errors = [attempt.error for attempt in attempts if attempt.error]
    gone = [way.gone(attempt.after) for attempt in attempts if not attempt.error]
    if faults:
        return f"Likely: {faults[0]}"
    if not gone:
        return f"Likely: {errors[0]}"
    if max(map(abs, gone)) < UNMOVED:
        return "Likely: what is trained has no say in the loss. See that weights are not frozen, and train.optim_args."
    if max(gone) < UNMOVED:
        return "Likely: the steps go uphill, or far too wide. See the sign of the loss, and lower train.learning_rate."
    return (
        "Likely: the student, or student.lora.rank, is too small to learn this by heart; or the steps are, which "
        "train.learning_rate and train.optim_args decide."
    )
