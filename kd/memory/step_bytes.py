"""The bytes of a training step, from shapes alone. Imports no torch.

A step holds weights, their gradients, the optimiser's state, what autograd keeps, and a chunk of
logits. ``StepShape.estimate`` counts them on one device; ``kd.memory.parallel`` splits them over
the ranks of several. ``kd plan``, strategy "auto" and the warning before a training count with it.

What autograd keeps is told by the matrices of the layers: each keeps its input and its output, and
norms, rotations and activations a little more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property

from kd.config.train import Checkpointing, TrainConfig
from kd.files import format_bytes
from kd.optim.state_size import (
    AVERAGE_NUMBER_BYTES,
    ParameterShape,
    count_optimizer_bytes,
    count_trained_bytes,
)

#: Bytes of a number in float32.
FLOAT32 = 4
#: Bytes of a number of the sum over chunks that becomes the gradient of the LM head.
_SUM_BYTES = 4
#: Bytes of a logit and its gradient in float32, where plain operations compute the loss.
_LOGIT_AND_GRADIENT = 8
#: Bytes that autograd keeps for each number of the inputs and outputs of a layer's matrices: in
#: float32, in a narrower precision, and there with weights in bfloat16 too. Measured on tiny
#: Llamas; in a narrower precision norms and residuals stay in float32.
_KEPT_FLOAT32 = 4.6
_KEPT_HALF = 3.3
_KEPT_PURE = 2.6
#: Hidden states that are kept outside of the layers.
_OUTSIDE_COPIES = 2


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

    ``frozen`` counts numbers that are not trained, and ``frozen_bytes`` are their bytes. ``widths``
    are the rows and columns of all matrices that a token meets.
    """

    trained: tuple[ParameterShape, ...] = ()
    frozen: int = 0
    frozen_bytes: int = 0
    widths: float = 0.0

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
    """The parameters of a student by layer, and ``width``, that of its hidden states.

    A tied LM head is counted once, in ``outside``.
    """

    layers: tuple[BlockShape, ...]
    outside: BlockShape
    head: HeadShape
    width: int
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

    def estimate_activations(self) -> int:
        """Bytes of all activations, with checkpointing, while one group is recomputed.

        Of layers whose activations are offloaded two are on the device, one of which is on its way
        back, and the cast weights of all.
        """
        count = self.student.layer_count
        layer = self._count_kept() / count
        groups = compute_group_sizes(count, self.options.gradient_checkpointing)
        recomputed = max(groups, default=0) * layer
        unchecked = count - sum(groups)
        if self.options.activation_offload:
            stored = max(recomputed + self.count_boundary(), layer * min(unchecked, 2))
        else:
            stored = unchecked * layer + len(groups) * self.count_boundary() + recomputed
        # In the backward pass of a layer about half of its activations have a gradient at the same
        # time.
        working = _OUTSIDE_COPIES * self.count_boundary() + layer / 2
        return round(working + stored + self.count_kept_casts())

    def count_offloaded(self) -> int:
        """Bytes of the activations that wait in the host's memory; 0 without the offload.

        Its copies are cut so that pinned memory takes hardly more
        (``kd.memory.activation_offload``).
        """
        if not self.options.activation_offload:
            return 0
        count = self.student.layer_count
        groups = compute_group_sizes(count, self.options.gradient_checkpointing)
        whole = (count - sum(groups)) / count * self._count_kept()
        return round(whole + len(groups) * self.count_boundary())

    def _count_kept(self) -> float:
        """Bytes that autograd keeps in all layers, cast weights apart."""
        narrow = _KEPT_PURE if self.options.is_pure_bfloat16 else _KEPT_HALF
        each = _KEPT_FLOAT32 if self.item == FLOAT32 else narrow
        widths = sum(block.widths * times for block, times in self.student.kinds)
        return each * self.options.batch_size * self.length * widths

    def count_boundary(self) -> int:
        """Bytes of the hidden states between two layers."""
        item = self.item if self.options.is_pure_bfloat16 else FLOAT32
        return item * self.options.batch_size * self.length * self.student.width

    def count_kept_casts(self) -> float:
        """Bytes of the casts of the layers' weights that autograd keeps at the same time.

        Weights are cast where the precision is narrower than they are; a layer that is recomputed
        casts them anew.
        """
        if self.item >= count_trained_bytes(1, self.options):
            return 0.0
        count = self.student.layer_count
        groups = compute_group_sizes(count, self.options.gradient_checkpointing)
        layers = count - sum(groups) + max(groups, default=0)
        return self.item * sum(each.numbers for each in self.student.layers) / count * layers

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
