"""A training step on N ranks: the bytes that each holds and sends, and the time. Imports no torch.

    single     one rank does the whole step
    ddp        each rank holds all, and a ring all-reduces the gradients
    fsdp       weights, gradients and state are divided by N; a layer is gathered before each of its
               passes, and its gradients are reduced and scattered after the backward pass
    hsdp       fsdp on the N ranks of each of H hosts, and a ring all-reduces each rank's gradients
    pipeline   each rank holds some consecutive layers; micro-batches pass from rank to rank

With G the bytes of the gradients, W those of the layers' weights in the precision of the products,
E those of embeddings and LM head in their own, P the trained parameters and M the micro-batches of
a rank, a rank sends in a step

    ddp        2 (N - 1) / N G
    fsdp       M (N - 1) / N (2 W + E + 4 P)
    hsdp       the same, and each host sends 2 (H - 1) / H 4 P to the next

FSDP reduces in every micro-batch: otherwise each rank would hold the gradients of all weights. By
hsdp hosts exchange the sums of all micro-batches, once. The formulas of the rings are those of
Patarasuk and Yuan 2009, those of FSDP are of Rajbhandari et al. 2020 (ZeRO, stage 3).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from kd.config.train import TrainConfig
from kd.memory.devices import DeviceRates
from kd.memory.step_bytes import StepMemory, StepShape
from kd.optim.state_size import count_trained_bytes
from kd.parallel.limits import list_unsharded_fields

ParallelStrategy = Literal["single", "ddp", "fsdp", "hsdp", "pipeline"]
#: Layers that FSDP has whole at the same time: the one in use, and the next.
_WHOLE_LAYERS = 2
#: Bytes of a number that FSDP reduces, in float32.
_REDUCED_BYTES = 4
#: Share of a step's work that is its backward pass.
_BACKWARD_SHARE = 2 / 3
#: Share of the rate of a link that collectives are expected to reach: an assumption.
LINK_SHARE = 0.8
#: Share of a device's memory that is left free, for holes and for what the estimate misses.
HEADROOM = 0.1


def list_strategies(
    options: TrainConfig, ranks: int, per_host: int | None = None
) -> tuple[ParallelStrategy, ...]:
    """List the strategies by which ``ranks`` devices can train with ``options``, in their order.

    ``per_host`` is the number of devices of each host; None: all are in one.
    """
    if ranks == 1:
        return ("single",)
    if options.fsdp_offload:
        return ("fsdp",)
    if list_unsharded_fields(options):
        return ("ddp",)
    return ("ddp", "fsdp") if per_host in (None, 1, ranks) else ("ddp", "hsdp", "fsdp")


def choose_strategy(
    step: StepShape, ranks: int, room: int | None, per_host: int | None = None
) -> ParallelStrategy:
    """Choose what train.strategy "auto" means: the simplest strategy whose step fits a device.

    ``room`` are the bytes that a device has for the step; None, if they are not known, counts as
    enough. Where no strategy fits it is the last one, which needs least.
    """
    found = list_strategies(step.options, ranks, per_host)
    for strategy in found:
        parts = per_host if strategy == "hsdp" and per_host else ranks
        if room is None or estimate_rank(step, strategy, parts).total <= count_usable(room):
            return strategy
    return found[-1]


def count_usable(size: int) -> int:
    """The part of ``size`` bytes of memory that a training may use."""
    return int(size * (1 - HEADROOM))


# ---------------------------------------------------------------------- memory


def estimate_rank(step: StepShape, strategy: ParallelStrategy, ranks: int) -> StepMemory:
    """The bytes of ``step`` on the rank that needs most, of those that share it by ``strategy``.

    By hsdp the ranks of one host share it.
    The options of ``step`` are those of a rank: its batch_size is the micro-batch of one forward
    pass. The first of N stages of a pipeline has N micro-batches in flight, which keep in an N-th
    of the layers what one keeps in all.
    """
    whole = step.estimate()
    # The gradients of DDP are views of its buckets (``kd.parallel.strategies.replicate``).
    if ranks == 1 or strategy in ("single", "ddp"):
        return whole
    buffers = step.student.buffer_bytes
    parts = replace(
        whole,
        weights=buffers + math.ceil((whole.weights - buffers) / ranks),
        gradients=math.ceil(whole.gradients / ranks),
        optimizer=math.ceil(whole.optimizer / ranks),
    )
    if strategy == "pipeline":
        return parts
    memory = replace(
        parts,
        # Gathered weights are in the precision of the products: neither layers nor head cast them.
        activations=whole.activations - round(step.count_kept_casts()),
        head=whole.head - step.count_head_cast(),
        buffers=count_gathered_bytes(step),
    )
    if not step.options.fsdp_offload:
        return memory
    on_host = parts.weights + parts.gradients + parts.optimizer
    return replace(memory, weights=0, gradients=0, optimizer=0, offloaded=parts.offloaded + on_host)


def count_gathered_bytes(step: StepShape) -> int:
    """The bytes of whole weights and gradients on a rank of FSDP, in a layer's backward pass.

    Embeddings, last norm and LM head stay whole for the step. Of the layers two are whole, and one
    has its gradient, and the copy of it in float32 that is reduced. Layers that are one checkpoint
    count as one.
    """
    student = step.student
    together = max(step.groups, default=1)
    gradient = together * student.largest_trained * (step.item + _REDUCED_BYTES)
    whole = student.numbers - student.in_layers + _WHOLE_LAYERS * together * student.largest
    return whole * step.item + gradient


# ---------------------------------------------------------------------- bytes that are sent


def count_traffic(step: StepShape, strategy: ParallelStrategy, ranks: int) -> float:
    """The bytes that a rank sends in a step; ``step`` is as in ``estimate_rank``."""
    if ranks == 1 or strategy == "single":
        return 0.0
    ring = (ranks - 1) / ranks
    if strategy == "ddp":
        return 2 * ring * count_trained_bytes(step.student.trained_numbers, step.options)
    student, own = step.student, count_trained_bytes(1, step.options)
    # What lies outside of the layers stays whole, and in its own type.
    gathered = 2 * student.in_layers * step.item + (student.numbers - student.in_layers) * own
    reduced = student.trained_numbers * _REDUCED_BYTES
    return step.options.gradient_accumulation_steps * ring * (gathered + reduced)


def count_between_hosts(step: StepShape, hosts: int) -> float:
    """The bytes that each host sends to the next in a step by hsdp."""
    reduced = step.student.trained_numbers * _REDUCED_BYTES
    return 2 * (hosts - 1) / hosts * reduced


def count_waiting(
    work: float,
    traffic: float,
    strategy: ParallelStrategy,
    ranks: int,
    micro_batches: int,
    rates: DeviceRates,
    between: float = 0.0,
) -> float:
    """The seconds that a rank waits for links in a step of ``work`` seconds.

    DDP sends its ``traffic`` bytes during the backward pass of the last micro-batch, FSDP during
    all passes; only what takes longer is waited for. By hsdp the ``ranks`` are those of a host,
    which sends ``between`` bytes to the next.
    """
    seconds = (traffic / rates.find_ring_rate(ranks) + between / rates.network) / LINK_SHARE
    hidden = work * (_BACKWARD_SHARE / micro_batches if strategy == "ddp" else 1.0)
    return max(seconds - hidden, 0.0)
