"""Settings that train a student on given devices, with memory by part, time and cost.

A candidate is a strategy, a micro-batch, activation checkpointing and a precision. The sequences of
a step stay as the job says: with S of them, N ranks and micro-batches of b sequences,

    single, ddp, fsdp   each rank does S / (b N) forward passes a step

``train.gradient_accumulation_steps`` counts the forward passes of all ranks, S / b, as it does on
one device. Imports no torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from kd.config.train import Checkpointing, TrainConfig
from kd.memory.parallel import (
    STRATEGIES,
    ParallelStrategy,
    RankMemory,
    Split,
    StepTime,
    count_usable,
    list_strategies,
)
from kd.memory.step_bytes import resize_micro_batch
from kd.memory.training_phase import Place, TrainingPhase
from kd.memory.work import compute_cost
from kd.planning.devices import DeviceGroup

#: Steps that differ by less are as fast: the simpler settings come first.
_EQUAL_TIMES = 1.02
#: Memory of a slower setting that is shown, as a share of the least of those above it.
_CLEARLY_LESS = 0.97
#: Micro-batches that are tried.
_MOST_MICRO_BATCHES = 16
_CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "sqrt", "full")


@dataclass(frozen=True)
class Candidate:
    """One way to train: its settings, and what a rank needs.

    ``memory`` is that of the rank that needs most; ``process`` and ``loader`` lie beside it. Times
    are of the training without its evaluations. ``sent_bytes`` are those of a rank and a step.
    ``why`` says why it is where it is in the list.
    """

    strategy: ParallelStrategy
    ranks: int
    batch_size: int
    gradient_accumulation_steps: int
    gradient_checkpointing: Checkpointing
    precision: str
    memory: RankMemory
    process: int
    loader: int
    memory_bytes: int
    fits: bool
    time: StepTime
    sent_bytes: int
    seconds: float
    cost: float | None
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the candidate as JSON values."""
        found = asdict(self)
        times = {name: round(value, 6) for name, value in found.pop("time").items()}
        return found | {
            "step_seconds": round(self.time.total, 6),
            "step": times,
            "efficiency": round(self.time.efficiency, 4),
            "seconds": round(self.seconds, 1),
            "cost": None if self.cost is None else round(self.cost, 4),
        }

    @property
    def settings(self) -> dict[str, Any]:
        """The fields of the job's section ``train`` that make this candidate."""
        return {
            "strategy": self.strategy,
            "batch_size": self.batch_size,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "gradient_checkpointing": self.gradient_checkpointing,
            "precision": self.precision,
        }


def list_candidates(
    training: TrainingPhase, devices: DeviceGroup, price: float | None = None
) -> list[Candidate]:
    """All candidates, the best first: those that fit, by time; then the others, by memory.

    Empty where a step has fewer sequences than there are devices.
    ``price`` is that of an hour of one device.
    """
    found = [
        _make_candidate(changed, devices, strategy, price)
        for changed, strategy in _list_settings(training, devices)
    ]
    return sorted(found, key=lambda each: _rank(each, training.options))


def _rank(candidate: Candidate, options: TrainConfig) -> tuple[Any, ...]:
    """The place of a candidate: faster first, then fewer changes, then larger micro-batches."""
    if not candidate.fits:
        return (1, candidate.memory_bytes)
    pace = round(math.log(candidate.time.total) / math.log(_EQUAL_TIMES))
    changes = sum(getattr(options, name) != value for name, value in candidate.settings.items())
    return (0, pace, STRATEGIES.index(candidate.strategy), changes, -candidate.batch_size)


def _list_settings(
    training: TrainingPhase, devices: DeviceGroup
) -> Iterator[tuple[TrainingPhase, ParallelStrategy]]:
    """The training with each micro-batch, checkpointing and precision, and each strategy of it."""
    options = training.options
    ways = dict.fromkeys((options.gradient_checkpointing, *_CHECKPOINTING))
    precisions = list_precisions(training, devices.place)
    for batch in list_micro_batches(options, devices.count):
        resized = replace(training, options=resize_micro_batch(options, batch))
        for how, precision in itertools.product(ways, precisions):
            changed = resized.change(precision=precision, gradient_checkpointing=how)
            for strategy in list_strategies(changed.options, devices.count):
                yield changed, strategy


def list_micro_batches(options: TrainConfig, ranks: int) -> list[int]:
    """The micro-batches that divide a step, and its passes among ``ranks``; the largest first.

    Of many only some are kept, at even distances, and the job's own.
    """
    sequences = options.sequences_per_step
    found = [batch for batch in _list_divisors(sequences) if sequences // batch % ranks == 0]
    if len(found) <= _MOST_MICRO_BATCHES:
        return found
    last = len(found) - 1
    places = {round(last * place / (_MOST_MICRO_BATCHES - 1)) for place in
              range(_MOST_MICRO_BATCHES)}  # fmt: skip
    kept = {found[place] for place in places} | ({options.batch_size} & {*found})
    return sorted(kept, reverse=True)


def list_precisions(training: TrainingPhase, place: Place) -> tuple[str, ...]:
    """The precisions that a plan may choose: the job's own first, half as wide, and float32.

    Adapters on a base in bfloat16 need bf16.
    """
    options = training.options
    base = training.student.layers[0] if training.student.layers else training.student.outside
    if base.frozen and base.frozen_bytes < 4 * base.frozen:
        return ("bf16",)
    half = "bf16" if place.rates.has_bfloat16 else "fp16"
    return tuple(dict.fromkeys((place.choose_precision(options.precision), half, "fp32")))


def _list_divisors(number: int) -> list[int]:
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)}, reverse=True)


# ---------------------------------------------------------------------- one candidate


def _make_candidate(
    training: TrainingPhase, devices: DeviceGroup, strategy: ParallelStrategy, price: float | None
) -> Candidate:
    place = devices.place
    found = training.forecast_rank(place, Split(strategy, devices.count))
    seconds = training.steps * found.time.total
    return Candidate(
        strategy=strategy,
        ranks=devices.count,
        batch_size=training.options.batch_size,
        gradient_accumulation_steps=training.options.gradient_accumulation_steps,
        gradient_checkpointing=training.options.gradient_checkpointing,
        precision=training.options.precision,
        memory=found.memory,
        process=place.process,
        loader=training.loader,
        memory_bytes=found.needed,
        fits=found.needed <= count_usable(place.rates.memory),
        time=found.time,
        sent_bytes=round(found.sent),
        seconds=seconds,
        cost=compute_cost(seconds * devices.count, price),
    )


# ---------------------------------------------------------------------- the few best


def pick_best(found: list[Candidate], most: int = 6) -> tuple[Candidate, ...]:
    """The best candidates that fit, each with its reason.

    They are the fastest of each strategy, and slower ones that need clearly less memory.
    """
    fitting = [each for each in found if each.fits]
    least: dict[str, float] = {}
    picked = []
    for each in fitting:
        if each.memory_bytes < _CLEARLY_LESS * least.get(each.strategy, math.inf):
            least[each.strategy] = each.memory_bytes
            picked.append(each)
    firsts = [next(each for each in picked if each.strategy == name) for name in least]
    kept = [*firsts, *(each for each in picked if each not in firsts)][:most]
    return tuple(
        replace(
            each,
            why=_explain_best(each, found, len(fitting))
            if each is fitting[0]
            else _explain(each, fitting[0]),
        )
        for each in fitting
        if each in kept
    )


def _explain_best(best: Candidate, found: list[Candidate], count: int) -> str:
    reasons = {
        "single": "one device",
        "ddp": "each device holds the whole student, and only gradients are sent",
        "fsdp": "weights, gradients and state are divided by the devices",
    }
    others = {each.strategy for each in found} - {each.strategy for each in found if each.fits}
    too_large = f"; {' and '.join(sorted(others))} would not fit" if others else ""
    return (
        f"the fastest of the {count} settings that fit, the simplest where times are equal: "
        f"{reasons[best.strategy]}{too_large}"
    )


def _explain(candidate: Candidate, best: Candidate) -> str:
    """Say what the candidate costs beside the best one, and what takes the time."""
    ratio = candidate.time.total / best.time.total
    spared = best.memory_bytes - candidate.memory_bytes
    parts = [f"{ratio:.2f} times the time"]
    if spared:
        share = f"{abs(spared) / best.memory_bytes:.0%}"
        parts.append(f"{share} {'less' if spared > 0 else 'more'} memory")
    if candidate.gradient_checkpointing not in ("none", best.gradient_checkpointing):
        parts.append("layers run forward twice")
    if candidate.time.waiting > 0:
        parts.append(f"waits {candidate.time.waiting / candidate.time.total:.0%} for links")
    return ", ".join(parts)
