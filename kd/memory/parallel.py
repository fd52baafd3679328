"""A training step on N ranks: the bytes that each holds and sends, and the time. Imports no torch.

    single     one rank does the whole step
    ddp        each rank holds all, and a ring all-reduces the gradients
    fsdp       weights, gradients and state are divided by N; a layer is gathered before each of its
               passes, and its gradients are reduced and scattered after the backward pass
    pipeline   each rank holds some consecutive layers; micro-batches pass from rank to rank

With G the bytes of the gradients, W those of the weights in the precision of the products, M the
micro-batches of a rank and H the hidden states of a micro-batch, a rank sends in a step

    ddp        2 (N - 1) / N G
    fsdp       M (2 (N - 1) / N W + (N - 1) / N G)
    pipeline   2 M H

FSDP reduces in every micro-batch: otherwise each rank would hold the gradients of all weights. The
formulas of the rings are those of Patarasuk and Yuan 2009, those of FSDP are of Rajbhandari et al.
2020 (ZeRO, stage 3), and the idle share (N - 1) / (M + N - 1) of a pipeline is of Huang et al. 2019
(GPipe).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Literal, get_args

from kd.config.train import TrainConfig
from kd.memory.devices import DeviceRates
from kd.memory.step_bytes import (
    BlockShape,
    SavedBytesFit,
    StepMemoryEstimate,
    StepShape,
    StudentShape,
    compute_group_sizes,
)
from kd.optim.state_size import ParameterShape
from kd.parallel.cutting import cut_layers
from kd.parallel.limits import list_unsharded_fields

ParallelStrategy = Literal["single", "ddp", "fsdp", "pipeline"]
#: From the simplest to the one that moves most.
STRATEGIES: tuple[ParallelStrategy, ...] = get_args(ParallelStrategy)
#: Copies of the gradients in the buckets of DDP: none, because gradients are views of the buckets
#: (``kd.parallel.strategies.replicate``).
DDP_BUCKET_COPIES = 0
#: Layers that FSDP has whole at the same time: the one in use, and the next.
_WHOLE_LAYERS = 2
#: Bytes of a number that FSDP reduces, in float32.
_REDUCED_BYTES = 4
#: Share of a step's work that is its backward pass.
_BACKWARD_SHARE = 2 / 3
#: Share of the rate of a link that collectives are expected to reach: an assumption.
LINK_SHARE = 0.8


@dataclass(frozen=True)
class Split:
    """How a step is split: a strategy, and the ranks that share it."""

    strategy: ParallelStrategy = "single"
    ranks: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether one rank does the whole step."""
        return self.ranks == 1 or self.strategy == "single"


# ---------------------------------------------------------------------- the choice

#: Share of a device's memory that is left free, for holes and for what the estimate misses.
HEADROOM = 0.1


def list_strategies(options: TrainConfig, ranks: int) -> tuple[ParallelStrategy, ...]:
    """List the strategies by which ``ranks`` devices can train with ``options``, in their order."""
    if ranks == 1:
        return ("single",)
    if options.fsdp_offload:
        return ("fsdp",)
    return ("ddp",) if list_unsharded_fields(options) else ("ddp", "fsdp")


def choose_strategy(step: StepShape, ranks: int, room: int | None) -> ParallelStrategy:
    """Choose what train.strategy "auto" means: the simplest strategy whose step fits a device.

    ``room`` are the bytes that a device has for the step; None, if they are not known, counts as
    enough. Where no strategy fits it is the last one, which needs least.
    """
    found = list_strategies(step.options, ranks)
    for strategy in found:
        if room is None or estimate_rank(step, Split(strategy, ranks)).total <= count_usable(room):
            return strategy
    return found[-1]


def count_usable(size: int) -> int:
    """The part of ``size`` bytes of memory that a training may use."""
    return int(size * (1 - HEADROOM))


# ---------------------------------------------------------------------- memory


@dataclass(frozen=True)
class RankMemory(StepMemoryEstimate):
    """Bytes of a step at its peak, on the rank that needs most.

    ``buffers`` are the buckets of DDP, or what FSDP gathers. ``offloaded`` lie in the host's memory
    (``train.fsdp_offload``), and are not counted in ``total``.
    """

    buffers: int = 0
    offloaded: int = 0

    @property
    def total(self) -> int:
        """All bytes on the device of the rank."""
        return super().total + self.buffers

    @property
    def step(self) -> StepMemoryEstimate:
        """The bytes of a step that a device without other ranks has too."""
        names = [each.name for each in fields(StepMemoryEstimate)]
        return StepMemoryEstimate(**{name: getattr(self, name) for name in names})

    def offload(self) -> RankMemory:
        """Move the rank's parts of weights, gradients and state to the host."""
        parts = self.weights + self.gradients + self.optimizer
        return replace(self, weights=0, gradients=0, optimizer=0, offloaded=parts)


def estimate_rank(step: StepShape, split: Split) -> RankMemory:
    """The bytes of ``step`` on the rank that needs most.

    The options of ``step`` are those of a rank: its batch_size is the micro-batch of one forward
    pass, and in a pipeline its gradient_accumulation_steps are the micro-batches of the step.
    Raises ``ValueError`` for a pipeline of more ranks than the student has layers.
    """
    ranks = split.ranks
    if split.strategy == "pipeline" and ranks > 1:
        stages = [_estimate_stage(step, ranks, stage) for stage in range(ranks)]
        return max(stages, key=lambda each: each.total)
    whole = RankMemory(**asdict(step.estimate()))
    if split.is_whole:
        return whole
    if split.strategy == "ddp":
        return replace(whole, buffers=DDP_BUCKET_COPIES * whole.gradients)
    memory = RankMemory(
        weights=step.student.buffer_bytes
        + _divide(whole.weights - step.student.buffer_bytes, ranks),
        gradients=_divide(whole.gradients, ranks),
        optimizer=_divide(whole.optimizer, ranks),
        # Gathered weights are in the precision of the products, so no layer casts its own.
        activations=replace(step, saved=step.saved.without_casts()).estimate_activations(),
        head=whole.head - step.count_head_cast(),
        buffers=count_gathered_bytes(step),
    )
    return memory.offload() if step.options.fsdp_offload else memory


def count_gathered_bytes(step: StepShape) -> int:
    """The bytes of whole weights and gradients on a rank of FSDP, in a layer's backward pass.

    Embeddings, last norm and LM head stay whole for the step. Of the layers two are whole, and one
    has its gradient, and the copy of it in float32 that is reduced. Layers that are one checkpoint
    count as one.
    """
    layers = dict.fromkeys(step.student.layers)
    layer = max(layers, key=lambda each: each.numbers, default=BlockShape())
    sizes = compute_group_sizes(step.student.layer_count, step.options.gradient_checkpointing)
    together = max(sizes, default=1)
    gradient = together * layer.trained_numbers * (step.item + _REDUCED_BYTES)
    whole = step.student.outside.numbers + _WHOLE_LAYERS * together * layer.numbers
    return whole * step.item + gradient


def _divide(size: int, ranks: int) -> int:
    return math.ceil(size / ranks)


# ---------------------------------------------------------------------- stages of a pipeline


def _estimate_stage(step: StepShape, stages: int, stage: int) -> RankMemory:
    """The bytes of one stage, with as many micro-batches in flight as stages follow it (1F1B)."""
    sizes = cut_layers(step.student.layer_count, stages)
    first = sum(sizes[:stage])
    is_last = stage == stages - 1
    part = replace(
        step,
        student=_take_stage(step.student, range(first, first + sizes[stage]), stage == 0, is_last),
        saved=_take_saved(step, sizes[stage] / step.student.layer_count, is_last),
    )
    in_flight = min(stages - stage, step.options.gradient_accumulation_steps)
    whole = RankMemory(**asdict(part.estimate()))
    return replace(
        whole,
        activations=part.estimate_activations(in_flight),
        head=part.estimate_head() if is_last else 0,
    )


def _take_stage(
    student: StudentShape, layers: range, is_first: bool, is_last: bool
) -> StudentShape:
    """The student of one stage. A tied weight lies in the first stage and in the last."""
    blocks = tuple(student.layers[index] for index in layers)
    embedding, head = _split_outside(student)
    outside = BlockShape()
    if is_first:
        outside = embedding
    if is_last:
        outside = _join(outside, head)
    return replace(student, layers=blocks, outside=outside)


def _split_outside(student: StudentShape) -> tuple[BlockShape, BlockShape]:
    """Split what lies outside of the layers into the first stage's part and the last one's."""
    shape = student.head
    own = ParameterShape((shape.rows, shape.width), is_layer_matrix=False)
    if not shape.trained:
        head = BlockShape(frozen=shape.numbers, frozen_bytes=shape.numbers * shape.item)
    else:
        head = BlockShape(trained=(own,))
    if shape.tied:
        return student.outside, head
    left = list(student.outside.trained)
    if shape.trained:
        left.remove(own)
    rest = BlockShape(
        trained=tuple(left),
        frozen=student.outside.frozen - head.frozen,
        frozen_bytes=student.outside.frozen_bytes - head.frozen_bytes,
    )
    return rest, head


def _join(one: BlockShape, other: BlockShape) -> BlockShape:
    return BlockShape(
        (*one.trained, *other.trained),
        one.frozen + other.frozen,
        one.frozen_bytes + other.frozen_bytes,
    )


def _take_saved(step: StepShape, share: float, is_last: bool) -> SavedBytesFit:
    """The bytes that autograd keeps in a stage with this share of the layers."""
    saved = step.saved.take_layers(share)
    return saved if is_last else replace(saved, outside=(0.0, 0.0, 0.0))


# ---------------------------------------------------------------------- bytes that are sent


def count_all_reduce_bytes(size: float, ranks: int) -> float:
    """The bytes that a rank sends to sum ``size`` bytes of all ranks, in a ring."""
    return 2 * count_all_gather_bytes(size, ranks)


def count_all_gather_bytes(size: float, ranks: int) -> float:
    """The bytes that a rank sends to gather ``size`` bytes that lie in N parts, in a ring.

    To reduce and scatter as many takes as many.
    """
    return size * (ranks - 1) / ranks


def count_traffic(step: StepShape, split: Split) -> float:
    """The bytes that a rank sends in a step; ``step`` is as in ``estimate_rank``."""
    ranks = split.ranks
    if split.is_whole:
        return 0.0
    options = step.options
    micro_batches = options.gradient_accumulation_steps
    gradients = step.student.sum_blocks(lambda each: each.count_gradient_bytes(options))
    if split.strategy == "ddp":
        return count_all_reduce_bytes(gradients, ranks)
    if split.strategy == "fsdp":
        weights = step.student.numbers * step.item
        trained = step.student.sum_blocks(lambda each: each.trained_numbers)
        reduced = trained * _REDUCED_BYTES
        sent = 2 * count_all_gather_bytes(weights, ranks) + count_all_gather_bytes(reduced, ranks)
        return micro_batches * sent
    return 2 * micro_batches * step.saved.at(options.batch_size, step.length).boundary


# ---------------------------------------------------------------------- time


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: its work, what it waits for links, and what a pipeline is idle."""

    work: float
    communication: float
    waiting: float
    idle: float = 0.0

    @property
    def total(self) -> float:
        """All seconds of the step."""
        return self.work + self.waiting + self.idle

    @property
    def efficiency(self) -> float:
        """The share of the step that is work."""
        return self.work / self.total if self.total else 1.0


def estimate_step_time(
    work: float, traffic: float, split: Split, micro_batches: int, rates: DeviceRates
) -> StepTime:
    """The time of a step of ``work`` seconds on a rank that sends ``traffic`` bytes.

    DDP sends during the backward pass of the last micro-batch, FSDP during all passes; only what
    takes longer is waited for. A stage of a pipeline waits for each of its transfers.
    """
    if split.is_whole:
        return StepTime(work, 0.0, 0.0)
    if split.strategy == "pipeline":
        seconds = traffic / (LINK_SHARE * rates.find_pair_rate(split.ranks))
        return StepTime(work, seconds, seconds, work * (split.ranks - 1) / micro_batches)
    seconds = traffic / (LINK_SHARE * rates.find_ring_rate(split.ranks))
    hidden = work * (_BACKWARD_SHARE / micro_batches if split.strategy == "ddp" else 1.0)
    return StepTime(work, seconds, max(seconds - hidden, 0.0))


def add_replicas(
    time: StepTime, gradients: float, stages: int, replicas: int, micro_batches: int,
    rates: DeviceRates,
) -> StepTime:  # fmt: skip
    """The time of a pipeline with a stage on each device of a host, copied to ``replicas`` hosts.

    Each stage all-reduces its part of the ``gradients`` with the same stage of the other hosts,
    during the backward pass of the last micro-batch. The stages share the adapters of a host.
    """
    if replicas == 1:
        return time
    sent = count_all_reduce_bytes(gradients / stages, replicas)
    seconds = sent / (LINK_SHARE * rates.network / stages)
    waiting = max(seconds - time.work * _BACKWARD_SHARE / micro_batches, 0.0)
    return replace(time, communication=time.communication + seconds, waiting=time.waiting + waiting)
