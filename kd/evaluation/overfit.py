"""Check that the student can learn a few sequences by heart, within a hundred steps.

    before    mean loss on the sequences, untrained
    after     mean loss after the loop has trained on these sequences only, at the job's learning
              rate; if that fails at ten times the rate, then at a tenth of it
    floor     least loss for any logits (``kd.evaluation.floor``)

The student has learnt them if it went nine tenths of the way from ``before`` to ``floor``. Where it
began well the way is short, and half of it is enough if it ends near the floor. The loop is the
job's own, without what hinders memory: dropout, weight decay, averaging, a schedule.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from cache.codec import Codec
from cache.reading.file_reads import DiskReads
from cache.records import Records, Sequences
from kd.checks.parity import take_first_positions
from kd.checks.verdict import Verdict
from kd.config.job import JobConfig
from kd.config.loss import FeatureConfig, LearnedTemperature, Ramp
from kd.errors import TrainingError
from kd.evaluation.floor import find_least_loss
from kd.evaluation.teacher_comparison import EvaluatedModel
from kd.loss.decoder import TargetDecoder
from kd.loss.fused import compute_distillation_loss
from kd.loss.objective import Objective
from kd.loss.targets import Targets
from kd.models.lm_head import find_student_head
from kd.models.precision import Precision, compute_target_hidden_states, pick_device
from kd.progress import Event, Monitor
from kd.text.batches import Batch, Source, make_batch
from kd.training.loop import train

#: Optimiser steps of each attempt.
STEPS = 100
#: Most sequences to learn.
SEQUENCES = 4
#: Most tokens of these sequences, about: of long sequences there are fewer.
TOKENS = 1024
#: Most logits from which the loss and its floor are measured.
MEASURED_ELEMENTS = 2**21
#: Share of the way to the floor that counts as learnt.
LEARNT_SHARE = 0.9
#: Share of the way that counts as learnt where the loss ends near the floor.
HALF_SHARE = 0.5
#: Share of the way below which the loss counts as unchanged.
UNMOVED_SHARE = 0.01
#: Share of the way below which the loss hardly fell.
SMALL_SHARE = 0.02
#: Times as far that ten times the rate must go, for the rate to be what holds the student back.
#: Far below the right rate it is ten times, near it about once.
GROWTH = 3.0
#: Nats above the floor that count as near it.
NEAR_NATS = 0.3
#: Nats above the floor that count as nothing.
NOTHING_NATS = 0.02
#: Checks of the loop that may explain why nothing is learnt; the others rate how well it goes.
TELLING_CHECKS = {"parity", "gradients", "initial_loss"}
#: Learning rates to try, in turn, as multiples of the job's.
RATE_FACTORS = (1.0, 10.0, 0.1)


@dataclass(frozen=True)
class RepeatedSubset:
    """The sequences ``numbers`` of another source, repeated, with one draw of their records."""

    source: Source
    numbers: NDArray[np.int64]
    #: Nothing is held out.
    validation_count: ClassVar[int] = 0

    @property
    def train_count(self) -> int:
        """The number of sequences to train on."""
        return len(self.numbers)

    @property
    def shard_sequences(self) -> int:
        """All of them, because they are few."""
        return len(self.numbers)

    @property
    def sequence_bytes(self) -> int:
        """Bytes of memory that a decoded sequence takes on average."""
        return self.source.sequence_bytes

    @property
    def fingerprint(self) -> str:
        """A name for the content."""
        return f"{self.source.fingerprint} {self.numbers.tolist()}"

    @property
    def codec(self) -> Codec | None:
        """The codec of the records' columns."""
        return self.source.codec

    @property
    def disk_reads(self) -> DiskReads | None:
        """Bytes and seconds of reading from the disk so far."""
        return self.source.disk_reads

    def teacher_head(self) -> dict[str, NDArray[Any]]:
        """The teacher's LM head, from a hidden cache."""
        return self.source.teacher_head()

    def tail_mean(self) -> None:
        """None: the mean over the whole cache is not that of these sequences."""

    def projection(self) -> dict[str, NDArray[Any]] | None:
        """How the tokens of the records become the student's."""
        return self.source.projection()

    def read(
        self, indices: np.ndarray, draws: np.ndarray | int = 0
    ) -> tuple[Sequences, Records | None]:
        """The sequences of ``indices`` and their records, in that order."""
        # Always draw 0: a new sample would be a new target, which is no longer the one to learn.
        return self.source.read(self.numbers[indices], 0)


@dataclass(frozen=True)
class _Attempt:
    """The result of training at ``rate``: the loss after it or the error, and the failed checks."""

    rate: float
    after: float = float("nan")
    error: str = ""
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class LossRange:
    """The loss where the student began, and the least loss possible."""

    before: float
    floor: float

    def compute_progress(self, after: float) -> float:
        """The share of the way to the floor: 0 at the start, 1 at the floor, NaN for NaN."""
        return (self.before - after) / max(self.before - self.floor, NOTHING_NATS)

    def is_learnt(self, after: float) -> bool:
        """Whether the loss ``after`` is near enough to the floor."""
        left = after - self.floor
        progress = self.compute_progress(after)
        is_near = left <= NEAR_NATS and progress >= HALF_SHARE
        return progress >= LEARNT_SHARE or left <= NOTHING_NATS or is_near


def check_overfit(
    config: JobConfig,
    source: Source,
    student: PreTrainedModel,
    vocabulary: int,
    folder: Path,
    monitor: Monitor,
) -> Verdict:
    """Train copies of ``student`` on a few training sequences; the verdict names the likely fault.

    ``student`` stays as it is. ``folder`` is for the attempts' files. Raises what the training loop
    raises, except ``TrainingError``, which becomes part of the verdict.
    """
    subset = _choose_subset(source, config)
    config = _simplify_job(config, subset.train_count)
    head = EvaluatedModel.of(student, vocabulary, config.data).lm_head
    probe = _LossProbe.of(config, subset, head.vocabulary)
    floor = find_least_loss(probe.targets, probe.objective, probe.vocabulary) / probe.positions
    span = LossRange(probe.measure_loss(student), floor)
    if not np.isfinite(span.before):
        wrong = _Attempt(0.0, span.before, "The loss of the untrained student is not finite.")
        return _make_verdict(span, [wrong], subset)
    attempts: list[_Attempt] = []
    # One for each learning rate, each time from the same weights.
    for number, factor in enumerate(RATE_FACTORS):
        options = config.require_train()
        rate = options.learning_rate * factor
        tried = options.model_copy(update={"learning_rate": rate})
        job = config.model_copy(update={"train": tried})
        faults: list[str] = []
        listener = _collect_faults(monitor, faults)
        learner = copy.deepcopy(student)
        _remove_dropout(learner)
        try:
            train(job, subset, learner, probe.vocabulary, folder / f"attempt-{number}", listener)
        except TrainingError as error:
            attempts.append(_Attempt(rate, error=error.detail, faults=tuple(faults)))
            continue
        attempts.append(_Attempt(rate, probe.measure_loss(learner), faults=tuple(faults)))
        if span.is_learnt(attempts[-1].after):
            break
    return _make_verdict(span, attempts, subset)


def _collect_faults(monitor: Monitor, faults: list[str]) -> Monitor:
    """Pass progress on and collect the objections of the loop's checks.

    All other events are dropped.
    """

    def listen(event: Event) -> None:
        if event.type == "progress":
            monitor.listen(event)
        elif event.data.get("check") in TELLING_CHECKS and not event.data["ok"]:
            faults.append(event.data["message"])

    return Monitor(listen, monitor.should_stop)


def _choose_subset(source: Source, config: JobConfig) -> RepeatedSubset:
    """The first training sequences that have a target, up to about ``TOKENS`` tokens."""
    count = max(1, min(SEQUENCES, TOKENS // config.data.sequence_length))
    found: list[int] = []
    for number in range(source.train_count):
        if len(found) < count and source.read(np.array([number]))[0].target_mask.any():
            found.append(number)
    if not found:
        detail = "No position of the training text is a target."
        raise TrainingError(detail, "Check data.train and its chat template.")
    return RepeatedSubset(source, np.array(found))


def _simplify_job(config: JobConfig, sequences: int) -> JobConfig:
    """The job with a constant objective, and a plain loop with ``sequences`` at every step."""
    alpha = config.loss.alpha
    temperature = config.loss.temperature
    loss = {
        "alpha": alpha.start if isinstance(alpha, Ramp) else alpha,
        "temperature": temperature.start if isinstance(temperature, Ramp) else temperature,
        "features": FeatureConfig(),  # the floor has no such term
    }
    if isinstance(temperature, LearnedTemperature):
        loss["temperature"] = temperature.init
    options = {**_LOOP_OPTIONS, "batch_size": sequences}
    sections = {
        "loss": config.loss.model_copy(update=loss),
        "train": config.require_train().model_copy(update=options),
        "checks": config.checks.model_copy(update=_CHECK_OPTIONS),
    }
    return config.model_copy(update=sections)


#: Checks of an attempt. It does not roll back after a spike, and its only batch is never left out.
#: The verdict needs to know whether every weight has a gradient.
_CHECK_OPTIONS = {"spike_factor": 0.0, "max_skipped": 0, "alarms": True}
#: Train options of an attempt: all steps at one rate, and nothing that hinders memory.
_LOOP_OPTIONS: dict[str, object] = {
    "max_steps": STEPS,
    "epochs": None,
    "gradient_accumulation_steps": 1,
    "lr_scheduler_type": "constant_with_warmup",
    "lr_scheduler_kwargs": {},
    "warmup_steps": STEPS // 10,
    "weight_decay": 0.0,
    "dropout": None,
    "ema_decay": None,
    "compile": "none",
    "logging_steps": STEPS,
    "eval_steps": STEPS,
    "save_steps": STEPS,
    "early_stopping_patience": None,
    "order": "shuffled",
    "report_to": (),
}


def _remove_dropout(student: PreTrainedModel) -> None:
    """Set every dropout to 0, in layers and in attentions that keep its probability as a number."""
    for module in student.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


@dataclass(frozen=True)
class _LossProbe:
    """Some positions of the sequences; it measures their loss in float32, in evaluation mode."""

    batch: Batch
    decoder: TargetDecoder
    objective: Objective
    temperature: float
    vocabulary: int
    positions: int

    @classmethod
    def of(cls, config: JobConfig, subset: RepeatedSubset, vocabulary: int) -> _LossProbe:
        device = pick_device()
        temperature = config.loss.temperature
        assert isinstance(temperature, float), "the objective is constant here"
        batch = make_batch(*subset.read(np.arange(subset.train_count))).to(device)
        positions = max(1, min(len(batch), MEASURED_ELEMENTS // vocabulary))
        decoder = TargetDecoder.of(subset, device)
        return cls(batch, decoder, Objective.of(config.loss), temperature, vocabulary, positions)

    @torch.no_grad()
    def measure_loss(self, student: PreTrainedModel) -> float:
        """The student's loss in nats per position."""
        training = student.training
        student.eval()
        precision = Precision.choose("fp32", pick_device())
        hidden_ND = compute_target_hidden_states(student, self.batch, precision)[: self.positions]
        lm_head = find_student_head(student, self.vocabulary)
        terms = compute_distillation_loss(hidden_ND, lm_head, self.targets, self.objective)
        student.train(training)
        return float(terms.total) / self.positions

    @property
    def targets(self) -> Targets:
        """The targets of the measured positions."""
        batch = self.batch
        targets = self.decoder.decode(batch.gold_N, batch.teacher, self.temperature)
        return take_first_positions(targets, self.positions)


def _make_verdict(span: LossRange, attempts: list[_Attempt], subset: RepeatedSubset) -> Verdict:
    last = attempts[-1]
    best = min(attempts, key=lambda each: each.after if np.isfinite(each.after) else np.inf)
    ok = span.is_learnt(last.after)
    shown = last if ok else best
    facts = {
        "sequences": subset.train_count,
        "steps": STEPS,
        "before": span.before,
        "after": shown.after,
        "floor": span.floor,
        "learning_rate": shown.rate,
        "tried": {f"{attempt.rate:g}": attempt.after for attempt in attempts},
    }
    message = (
        f"Trained on {subset.train_count} sequence(s) alone, the loss went from "
        f"{span.before - span.floor:.3f} to {shown.after - span.floor:.3f} nats per token above "
        f"its floor in {STEPS} steps at a learning rate of {shown.rate:g}; the floor, the least "
        f"loss possible, is {span.floor:.3f}."
    )
    remedy = "" if ok else _diagnose(span, attempts)
    if ok and len(attempts) > 1:
        side = "low" if last.rate > attempts[0].rate else "high"
        remedy = (
            f"All parts work, but train.learning_rate {attempts[0].rate:g} is {side}: "
            f"it learnt at {last.rate:g}."
        )
    return Verdict("overfit", ok, message, remedy, facts)


def _diagnose(span: LossRange, attempts: list[_Attempt]) -> str:
    """The likely fault, by the most telling sign."""
    faults = [fault for attempt in attempts for fault in attempt.faults]
    errors = [attempt.error for attempt in attempts if attempt.error]
    progress = [span.compute_progress(attempt.after) for attempt in attempts if not attempt.error]
    if faults:
        return f"Likely: {faults[0]}"
    if not progress:
        return f"Likely: {errors[0]}"
    # NaN for an attempt that ended by an error.
    own, higher = (span.compute_progress(attempt.after) for attempt in attempts[:2])
    if 0.0 <= own < SMALL_SHARE and higher > max(GROWTH * own, 0.0):
        return (
            f"Likely: train.learning_rate {attempts[0].rate:g} is far too small. The loss falls, "
            f"but it went only {own:.2g} of the way to the floor in {STEPS} steps, and "
            f"{higher:.2g} of it at {attempts[1].rate:g}. Try a rate 100 times as high."
        )
    if max(map(abs, progress)) < UNMOVED_SHARE:
        # The loop found a gradient in every trained weight: so they do affect the loss.
        return (
            "Likely: the steps are too small to move the loss, though every trained weight has a "
            f"gradient. Raise train.learning_rate (now {attempts[0].rate:g}), and check "
            "train.optim_args."
        )
    if max(progress) < UNMOVED_SHARE:
        return (
            "Likely: the steps go uphill, or are far too large. Check the sign of the loss, "
            "and lower train.learning_rate."
        )
    return (
        "Likely: the student, or student.lora.rank, is too small to learn this by heart; "
        "or the steps are too small: see train.learning_rate and train.optim_args."
    )
