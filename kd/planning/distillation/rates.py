"""How fast the devices of a plan work: a teacher that captures, a student that trains.

A teacher that does not fit one device is spread over k of them by its ``tp_plan``
(``teacher.parallel: tensor``). Of the k the first has the LM head, so a token takes

    layers / k  +  2 all-reduces of the hidden state a layer  +  LM head

(Shoeybi et al. 2019 for the all-reduces). Work and rates are those of ``kd estimate``; the rates of
a student are those of ``kd plan``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kd.config.job import JobConfig
from kd.loss.chunk_size import suits_kernels
from kd.memory.devices import CUDA_CONTEXT, DeviceRates
from kd.memory.parallel import LINK_SHARE, count_all_reduce_bytes, count_usable
from kd.memory.phases import estimate_logit_bytes
from kd.memory.training_phase import TrainingPhase
from kd.memory.work import ASSUMED_UTILIZATION, Pass, Work, count_forward_bytes
from kd.planning.candidates import Candidate, list_candidates
from kd.planning.devices import DeviceGroup
from kd.planning.distillation.models import PlannedModel
from kd.planning.distillation.storage import RecordSize, TokenCount

#: Bytes of a number of a teacher's weights and hidden states.
_ITEM = 2
#: All-reduces of the hidden state in a layer: after the attention, and after the MLP.
_LAYER_REDUCES = 2
#: Held-out tokens of an evaluation where the job does not say how many sequences it has.
HELD_OUT_TOKENS = 1 << 20


@dataclass(frozen=True)
class Micro:
    """A micro-batch: sequences, and tokens of each."""

    sequences: int
    length: int

    @property
    def tokens(self) -> int:
        """All tokens of it."""
        return self.sequences * self.length


@dataclass(frozen=True)
class TeacherRate:
    """A teacher on ``ranks`` devices: the seconds of a token by part, and the bytes of a device."""

    ranks: int
    layers: float
    links: float
    head: float
    memory_bytes: int

    @property
    def seconds(self) -> float:
        """Seconds of a token: the parts come one after the other."""
        return self.layers + self.links + self.head

    @property
    def tokens(self) -> float:
        """Tokens a second of one such teacher."""
        return 1 / self.seconds


def spread_teacher(
    teacher: PlannedModel, kind: DeviceRates, micro: Micro, count: int
) -> TeacherRate | None:
    """The teacher on as few of ``count`` devices as hold it; None where all of them do not."""
    ranks = 1
    while ranks <= count:
        memory = count_teacher_bytes(teacher, micro, ranks)
        if memory <= count_usable(kind.memory):
            return rate_teacher(teacher, kind, micro, ranks, memory)
        ranks *= 2
    return None


def count_teacher_bytes(teacher: PlannedModel, micro: Micro, ranks: int) -> int:
    """Bytes of the device that has the LM head and the embeddings, besides its part of the layers.

    The activations of one layer and a chunk of logits are counted whole.
    """
    shape = teacher.plan.shape
    layers = sum(each.numbers for each in shape.layers)
    weights = _ITEM * (math.ceil(layers / ranks) + shape.outside.numbers)
    activations = count_forward_bytes(shape.width, shape.inner, _ITEM * micro.tokens)
    logits = estimate_logit_bytes("cuda", micro.tokens, teacher.vocabulary)
    return weights + activations + logits + CUDA_CONTEXT


def rate_teacher(
    teacher: PlannedModel, kind: DeviceRates, micro: Micro, ranks: int, memory: int = 0
) -> TeacherRate:
    """The seconds of a token of a teacher that is spread over ``ranks`` devices of ``kind``."""
    targets = micro.sequences * (micro.length - 1)
    body = Pass(tokens=micro.tokens, targets=0, context=micro.length, micro_batches=1)
    head = Pass(tokens=0, targets=targets, context=micro.length, micro_batches=0)
    sent = 0.0
    if ranks > 1:
        state = _ITEM * teacher.plan.shape.width
        reduces = _LAYER_REDUCES * teacher.plan.shape.layer_count
        sent = reduces * count_all_reduce_bytes(state, ranks)
    return TeacherRate(
        ranks=ranks,
        layers=_count_seconds(teacher, body, kind) / micro.tokens / ranks,
        links=sent / (LINK_SHARE * kind.find_ring_rate(ranks)),
        head=_count_seconds(teacher, head, kind) / micro.tokens,
        memory_bytes=memory,
    )


def _count_seconds(teacher: PlannedModel, run: Pass, kind: DeviceRates) -> float:
    work = Work.of(teacher.plan.work, run, _ITEM)
    return work.seconds(kind, "bf16", False, ASSUMED_UTILIZATION)


# ---------------------------------------------------------------------- the student


@dataclass(frozen=True)
class StudentRate:
    """A student that trains: the best settings of ``kd plan``, steps, and its evaluations.

    ``evaluated`` are the held-out tokens of all evaluations, which take ``evaluation`` seconds.
    """

    best: Candidate
    steps: int
    step_tokens: int
    evaluated: int
    evaluation: float

    @property
    def tokens(self) -> float:
        """Tokens a second of all devices, without the evaluations."""
        return self.step_tokens / self.best.time.total


def describe_training(
    student: PlannedModel, records: RecordSize, text: TokenCount, config: JobConfig, count: int
) -> TrainingPhase:
    """The training of ``student`` for the job's epochs of ``text``, a step of it for all devices.

    A step has the job's sequences, rounded up to forward passes of every device.
    """
    options = config.require_train()
    passes = math.ceil(options.gradient_accumulation_steps / count) * count
    sequences = passes * options.batch_size
    steps = math.ceil(text.sequences * (options.epochs or 1.0) / sequences)
    held_out = config.data.max_eval_samples or math.ceil(HELD_OUT_TOKENS / text.length)
    return TrainingPhase(
        student=student.plan.shape,
        options=options.model_copy(
            update={"gradient_accumulation_steps": passes, "max_steps": steps, "epochs": None}
        ),
        vocabulary=student.vocabulary,
        length=text.length,
        targets=float(text.length - 1),
        steps=steps,
        evaluations=2 + steps // options.eval_steps,
        held_out=held_out,
        loader=0,  # it lies on the host
        saved=student.plan.saved,
        model=student.plan.work,
        suits_kernels=suits_kernels(records.codec, config.loss.divergence),
    )


def rate_student(training: TrainingPhase, devices: DeviceGroup) -> StudentRate | None:
    """The fastest settings of ``training`` that fit on ``devices``; None where none does."""
    best = next((each for each in list_candidates(training, devices) if each.fits), None)
    if best is None:
        return None
    chosen = replace(training, options=training.options.model_copy(update=best.settings))
    place = devices.place
    precision = chosen.choose_precision(place)
    work = chosen.count_evaluation()
    whole = work.seconds(place.rates, precision, chosen.options.tf32, ASSUMED_UTILIZATION)
    return StudentRate(
        best=best,
        steps=training.steps,
        step_tokens=training.options.sequences_per_step * training.length,
        evaluated=training.evaluations * training.held_out * training.length,
        evaluation=whole / devices.count,
    )
