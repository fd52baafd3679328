"""The bytes of a training step, from shapes alone. Imports no torch.

A step holds weights, their gradients, the optimiser's state, what autograd keeps, and a chunk of
logits. ``StepShape.estimate`` counts them on one device; ``kd.memory.parallel`` splits them over
the ranks of several. What autograd keeps is measured by short passes of the student
(``kd.memory.step_memory``), or told by its shape (``kd.planning.shapes``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property

from kd.config.train import Checkpointing, TrainConfig
from kd.files import format_bytes
from kd.optim.state_size import (
    AVERAGE_NUMBER_BYTES,
    ParameterShape,
    count_optimizer_bytes,
    count_trained_bytes,
)

#: Bytes of a number of the sum over chunks that becomes the gradient of the LM head.
_SUM_BYTES = 4
#: Bytes of a logit and its gradient in float32, where plain operations compute the loss.
_LOGIT_AND_GRADIENT = 8


@dataclass(frozen=True)
class StepMemoryEstimate:
    """Bytes of a training step at its peak.

    ``optimizer`` is its state and the moving average of the weights, ``activations`` all tensors
    that autograd keeps for the backward pass, and ``head`` a chunk of logits and the gradient of
    the LM head.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    head: int

    @property
    def total(self) -> int:
        """All bytes of the step."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.head

    def row(self) -> str:
        """The fields in their order, and the total, as a row of a Markdown table."""
        sizes = (*asdict(self).values(), self.total)
        return "| " + " | ".join(format_bytes(size) for size in sizes) + " |"

    def __str__(self) -> str:
        parts = ", ".join(
            f"{name} {format_bytes(size)}" for name, size in asdict(self).items() if size
        )
        return f"A training step is expected to need {format_bytes(self.total)}: {parts}."

    def warning(self, room: int | None) -> str | None:
        """A warning if the step needs more than ``room`` bytes, its weights included; else None."""
        if room is None or self.total <= room:
            return None
        free = max(room - self.weights, 0)
        return f"{self} {format_bytes(free)} is free beside the weights: memory may run out."


# ---------------------------------------------------------------------- the student


@dataclass(frozen=True)
class BlockShape:
    """Parameters that belong together: those of a decoder layer, or those outside of all layers.

    ``frozen`` counts numbers that are not trained, and ``frozen_bytes`` are their bytes.
    """

    trained: tuple[ParameterShape, ...] = ()
    frozen: int = 0
    frozen_bytes: int = 0

    @property
    def trained_numbers(self) -> int:
        """The count of trained numbers."""
        return sum(each.size for each in self.trained)

    @property
    def numbers(self) -> int:
        """The count of all numbers."""
        return self.trained_numbers + self.frozen

    def count_weight_bytes(self, options: TrainConfig) -> int:
        """Bytes of the weights as ``options`` train them."""
        return count_trained_bytes(self.trained_numbers, options) + self.frozen_bytes

    def count_gradient_bytes(self, options: TrainConfig) -> int:
        """Bytes of the gradients."""
        return count_trained_bytes(self.trained_numbers, options)

    def count_state_bytes(self, options: TrainConfig) -> int:
        """Bytes of the optimiser's state, and of the moving average of the weights."""
        averaged = self.trained_numbers if options.ema_decay is not None else 0
        state = count_optimizer_bytes(options.optim, self.trained)
        return AVERAGE_NUMBER_BYTES * averaged + state


@dataclass(frozen=True)
class HeadShape:
    """The weight of the LM head: its rows and columns, and whether it is trained.

    ``item`` are the bytes of a number of it, where it is frozen; ``tied`` says that it is the
    embedding too.
    """

    rows: int
    width: int
    trained: bool
    item: int = 4
    tied: bool = False

    @property
    def numbers(self) -> int:
        """The count of its numbers."""
        return self.rows * self.width


@dataclass(frozen=True)
class StudentShape:
    """The parameters of a student by layer, and the widths of its tensors.

    ``width`` is that of the hidden states and ``inner`` that of an MLP. A tied LM head is counted
    once, in ``outside``.
    """

    layers: tuple[BlockShape, ...]
    outside: BlockShape
    head: HeadShape
    width: int
    inner: int
    buffer_bytes: int = 0

    @property
    def blocks(self) -> tuple[BlockShape, ...]:
        """All blocks: the layers, then what lies outside of them."""
        return (*self.layers, self.outside)

    @cached_property
    def kinds(self) -> tuple[tuple[BlockShape, int], ...]:
        """The different blocks and how often each occurs: most layers are alike."""
        return tuple(Counter(self.blocks).items())

    def sum_blocks(self, count: Callable[[BlockShape], int]) -> int:
        """The sum of ``count`` over all blocks."""
        return sum(count(block) * times for block, times in self.kinds)

    @cached_property
    def numbers(self) -> int:
        """The count of its parameters."""
        return self.sum_blocks(lambda each: each.numbers)

    @property
    def layer_count(self) -> int:
        """The number of its decoder layers, at least 1."""
        return max(len(self.layers), 1)


# ---------------------------------------------------------------------- what autograd keeps


@dataclass(frozen=True)
class SavedBytes:
    """Bytes that a forward pass keeps for the backward pass.

    Those kept in the layers and outside them; ``boundary`` is the output of one layer.
    """

    layers: float
    outside: float
    boundary: float


@dataclass(frozen=True)
class SavedBytesFit:
    """The bytes that a pass of B sequences of L positions keeps: c + B (a L + b L^2).

    The constant c is weights that autocast casts, b is attention masks, and the rest grows with
    the length. Each tuple holds c, a and b of one field of ``SavedBytes``.
    """

    layers: tuple[float, float, float]
    outside: tuple[float, float, float]
    boundary: tuple[float, float, float]

    def at(self, batch: int, length: int) -> SavedBytes:
        """The bytes that ``batch`` sequences of ``length`` positions keep."""
        kept = (
            fixed + batch * (linear * length + square * length**2)
            for fixed, linear, square in (self.layers, self.outside, self.boundary)
        )
        return SavedBytes(*kept)

    def scale(self, factor: float) -> SavedBytesFit:
        """The fit of passes that keep ``factor`` times as many bytes."""
        parts = (self.layers, self.outside, self.boundary)
        return SavedBytesFit(*(_scale(part, factor) for part in parts))

    def take_layers(self, share: float) -> SavedBytesFit:
        """The fit of passes through this share of the layers."""
        return replace(self, layers=_scale(self.layers, share))

    def without_casts(self) -> SavedBytesFit:
        """The fit of a pass whose weights are in the precision of the products already."""
        return replace(self, layers=(0.0, *self.layers[1:]))


def _scale(parts: tuple[float, float, float], factor: float) -> tuple[float, float, float]:
    fixed, linear, square = parts
    return factor * fixed, factor * linear, factor * square


def compute_group_sizes(count: int, how: Checkpointing) -> list[int]:
    """The number of layers in each checkpoint, of a model with ``count`` layers."""
    if how == "none":
        return []
    if how == "sqrt":
        size = math.ceil(count / math.ceil(math.sqrt(count)))
        return [min(size, count - start) for start in range(0, count, size)]
    return [1] * (count if how == "full" else math.ceil(count / how))


# ---------------------------------------------------------------------- the step


@dataclass(frozen=True)
class StepShape:
    """All that the bytes of a step depend on.

    ``item`` are the bytes of a number in the precision of the products, ``chunk`` the positions
    whose logits are in memory at once. With ``kernels`` those of a GPU compute the loss
    (``kd.loss.chunk_size.suits_kernels``).
    """

    student: StudentShape
    options: TrainConfig
    length: int
    vocabulary: int
    item: int
    saved: SavedBytesFit
    chunk: int
    kernels: bool = False

    def estimate(self) -> StepMemoryEstimate:
        """The bytes of the step on one device."""
        options = self.options
        return StepMemoryEstimate(
            weights=self.student.sum_blocks(lambda each: each.count_weight_bytes(options))
            + self.student.buffer_bytes,
            gradients=self.student.sum_blocks(lambda each: each.count_gradient_bytes(options)),
            optimizer=self.student.sum_blocks(lambda each: each.count_state_bytes(options)),
            activations=self.estimate_activations(),
            head=self.estimate_head(),
        )

    def estimate_activations(self, in_flight: int = 1) -> int:
        """Bytes of all activations, with checkpointing, while one group is recomputed.

        Of layers whose activations are offloaded only one is on the device, and the cast weights
        of all. ``in_flight`` micro-batches are between their forward and backward passes at the
        same time: more than one in a pipeline.
        """
        kept = self.saved.at(self.options.batch_size, self.length)
        count = self.student.layer_count
        layer = kept.layers / count
        groups = compute_group_sizes(count, self.options.gradient_checkpointing)
        recomputed = max(groups, default=0) * layer
        unchecked = count - sum(groups)
        # In the backward pass of a layer about half of its activations have a gradient at the same
        # time.
        working = kept.outside + layer / 2
        if self.options.activation_offload:
            casts = self.saved.layers[0] / count * unchecked
            return round(working + casts + max(recomputed, layer * min(unchecked, 1)))
        stored = unchecked * layer + len(groups) * kept.boundary
        return round(working + in_flight * stored + recomputed)

    def estimate_head(self) -> int:
        """Bytes of the LM head beside its weight, and of a chunk of logits.

        They are the gradient of the weight before it is added to the others, the weight cast to
        the precision, the hidden states with their gradient, and the chunk.
        """
        head = self.student.head
        positions = self.options.batch_size * self.length
        cast = self.count_head_cast()
        states = 2 * positions * head.width * self.item
        # The gradient of the weight is a sum in float32, whatever the weight is in.
        logit_bytes = self.item if self.kernels else _LOGIT_AND_GRADIENT
        chunk = min(self.chunk, positions) * self.vocabulary * logit_bytes
        return _SUM_BYTES * head.numbers * head.trained + cast + states + chunk

    def count_head_cast(self) -> int:
        """Bytes of the LM head's weight in the precision, where it is kept in a wider one."""
        head = self.student.head
        own = count_trained_bytes(1, self.options) if head.trained else head.item
        return head.numbers * self.item if self.item < own else 0

    def count_offloaded_bytes(self) -> float:
        """Bytes that a micro-batch moves to the host, and later back."""
        if not self.options.activation_offload:
            return 0.0
        kept = self.saved.at(self.options.batch_size, self.length)
        count = self.student.layer_count
        groups = compute_group_sizes(count, self.options.gradient_checkpointing)
        unchecked = (count - sum(groups)) / count
        return unchecked * (kept.layers - self.saved.layers[0]) + len(groups) * kept.boundary


def resize_micro_batch(options: TrainConfig, batch_size: int) -> TrainConfig:
    """Split the step into micro-batches of ``batch_size`` sequences, which must divide the step."""
    accumulation, rest = divmod(
        options.batch_size * options.gradient_accumulation_steps, batch_size
    )
    if rest:
        raise ValueError(
            f"{batch_size} sequences do not divide a step of {batch_size * accumulation + rest}"
        )
    return options.model_copy(
        update={"batch_size": batch_size, "gradient_accumulation_steps": accumulation}
    )
