"""A training step on N ranks: the bytes that each holds and sends, and the time. Imports no torch.

    single     one rank does the whole step
    ddp        each rank holds all, and a ring all-reduces the gradients
    fsdp       weights, gradients and state are divided by N; a layer is gathered before each of its
               passes, and its gradients are reduced and scattered after the backward pass
    pipeline   each rank holds some consecutive layers; micro-batches pass from rank to rank

With G the bytes of the gradients, W those of the weights in the precision of the products, P the
trained parameters and M the micro-batches of a rank, a rank sends in a step

    ddp        2 (N - 1) / N G
    fsdp       M (2 (N - 1) / N W + (N - 1) / N 4 P)

FSDP reduces in every micro-batch: otherwise each rank would hold the gradients of all weights. The
formulas of the rings are those of Patarasuk and Yuan 2009, those of FSDP are of Rajbhandari et al.
2020 (ZeRO, stage 3).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Literal

from kd.config.train import TrainConfig
from kd.files import format_bytes
from kd.memory.devices import DeviceRates
from kd.memory.step_bytes import BlockShape, StepMemoryEstimate, StepShape, compute_group_sizes
from kd.parallel.limits import list_unsharded_fields

ParallelStrategy = Literal["single", "ddp", "fsdp", "pipeline"]
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

    ``buffers`` are what FSDP gathers. ``offloaded`` lie in the host's memory
    (``train.fsdp_offload``, ``train.activation_offload``), and are not counted in ``total``.
    """

    buffers: int = 0
    offloaded: int = 0

    @property
    def total(self) -> int:
        """All bytes on the device of the rank."""
        return super().total + self.buffers

    def warn_of_host(self, host: int, ranks: int) -> str | None:
        """A warning if ``ranks`` like this one offload more than the ``host`` has; else None."""
        if self.offloaded * ranks <= host:
            return None
        return (
            f"{format_bytes(self.offloaded * ranks)} are kept in this host's memory, which has "
            f"{format_bytes(host)}: it will run out. Set train.activation_offload and "
            "train.fsdp_offload to false, or train.batch_size lower."
        )

    def offload(self) -> RankMemory:
        """Move the rank's parts of weights, gradients and state to the host."""
        parts = self.weights + self.gradients + self.optimizer
        return replace(self, weights=0, gradients=0, optimizer=0, offloaded=parts)


def estimate_rank(step: StepShape, split: Split) -> RankMemory:
    """The bytes of ``step`` on the rank that needs most.

    The options of ``step`` are those of a rank: its batch_size is the micro-batch of one forward
    pass. The first of N stages of a pipeline has N micro-batches in flight, which keep in an N-th
    of the layers what one keeps in all.
    """
    ranks = split.ranks
    whole = RankMemory(**asdict(step.estimate()), offloaded=step.count_offloaded())
    # The gradients of DDP are views of its buckets (``kd.parallel.strategies.replicate``).
    if split.is_whole or split.strategy == "ddp":
        return whole
    parts = RankMemory(
        weights=step.student.buffer_bytes
        + math.ceil((whole.weights - step.student.buffer_bytes) / ranks),
        gradients=math.ceil(whole.gradients / ranks),
        optimizer=math.ceil(whole.optimizer / ranks),
        activations=whole.activations,
        head=whole.head,
    )
    if split.strategy == "pipeline":
        return parts
    memory = replace(
        parts,
        # Gathered weights are in the precision of the products: neither layers nor head cast them.
        activations=whole.activations - round(step.count_kept_casts()),
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


# ---------------------------------------------------------------------- bytes that are sent


def count_traffic(step: StepShape, split: Split) -> float:
    """The bytes that a rank sends in a step; ``step`` is as in ``estimate_rank``."""
    if split.is_whole:
        return 0.0
    options = step.options
    ring = (split.ranks - 1) / split.ranks
    if split.strategy == "ddp":
        gradients = step.student.sum_blocks(lambda each: each.count_gradient_bytes(options))
        return 2 * ring * gradients
    weights = step.student.numbers * step.item
    reduced = step.student.sum_blocks(lambda each: each.trained_numbers) * _REDUCED_BYTES
    return options.gradient_accumulation_steps * ring * (2 * weights + reduced)


def count_waiting(
    work: float, traffic: float, split: Split, micro_batches: int, rates: DeviceRates
) -> float:
    """The seconds that a rank waits for links in a step of ``work`` seconds.

    DDP sends its ``traffic`` bytes during the backward pass of the last micro-batch, FSDP during
    all passes; only what takes longer is waited for.
    """
    if split.is_whole:
        return 0.0
    seconds = traffic / (LINK_SHARE * rates.find_ring_rate(split.ranks))
    hidden = work * (_BACKWARD_SHARE / micro_batches if split.strategy == "ddp" else 1.0)
    return max(seconds - hidden, 0.0)
