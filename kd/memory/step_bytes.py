"""The bytes of a training step, from shapes alone. Imports no torch.

A step holds weights, their gradients, the optimiser's state, what autograd keeps, and a chunk of
logits. ``StepShape.estimate`` counts them on one device; ``kd.memory.parallel`` splits them over
the ranks of several. ``kd plan``, strategy "auto" and the warning before a training count with it.

What autograd keeps is told by the matrices of the layers: each keeps its input and its output, and
norms, rotations and activations a little more.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property

from kd.config.train import Checkpointing, TrainConfig
from kd.files import format_bytes
from kd.optim.state_size import ParameterShape, count_state_bytes, count_trained_bytes

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
class StepMemory:
    """Bytes of a training step at its peak, on the rank that needs most.

    ``optimizer`` is its state and the moving average of the weights, ``activations`` all tensors
    that autograd keeps for the backward pass, ``head`` a chunk of logits and the gradient of the LM
    head, and ``buffers`` what FSDP gathers. ``offloaded`` lie in the host's memory
    (``train.fsdp_offload``, ``train.activation_offload``), and are not counted in ``total``.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    head: int
    buffers: int = 0
    offloaded: int = 0

    @property
    def total(self) -> int:
        """All bytes on the device."""
        return sum(asdict(self).values()) - self.offloaded

    def __str__(self) -> str:
        sizes = asdict(self)
        on_host = sizes.pop("offloaded")
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items() if size)
        beside = f" {format_bytes(on_host)} more lie in the host's memory." if on_host else ""
        return f"A training step is expected to need {format_bytes(self.total)}: {parts}.{beside}"

    def warning(self, room: int | None) -> str | None:
        """A warning if the step needs more than ``room`` bytes, its weights included; else None."""
        if room is None or self.total <= room:
            return None
        free = max(room - self.weights, 0)
        return f"{self} {format_bytes(free)} is free beside the weights: memory may run out."

    def warn_of_host(self, host: int, ranks: int, batches: int = 0) -> str | None:
        """A warning if ``ranks`` like this one keep more in the ``host``'s memory than it has.

        ``batches`` are the bytes of the batches that all of them read ahead.
        """
        kept = self.offloaded * ranks + batches
        if kept <= host:
            return None
        return (
            f"{format_bytes(kept)} are kept in this host's memory, which has {format_bytes(host)}: "
            "it will run out. Set train.activation_offload and train.fsdp_offload to false, or "
            "train.batch_size or train.dataloader_num_workers lower."
        )


@dataclass(frozen=True)
class StudentShape:
    """The parameters of a student, as far as the bytes of a step depend on them.

    ``layers`` is the number of its decoder layers, at least 1. ``trained`` are all trained
    parameters, and ``frozen`` the count of all other numbers. ``in_layers`` are the numbers of all
    layers, ``largest`` and ``largest_trained`` those of the largest one. ``widths`` are the rows
    and columns of all matrices in the layers that a token meets. ``head`` are the numbers of the LM
    head, which are counted in the others too, and ``head_bytes`` are the bytes of one of them where
    it is frozen, else None. ``width`` is that of the hidden states.
    """

    layers: int
    trained: tuple[ParameterShape, ...]
    in_layers: int
    largest: int
    largest_trained: int
    widths: float
    head: int
    width: int
    head_bytes: int | None = None
    frozen: int = 0
    frozen_bytes: int = 0
    buffer_bytes: int = 0

    @cached_property
    def trained_numbers(self) -> int:
        """The count of trained numbers."""
        return sum(each.size for each in self.trained)

    @property
    def numbers(self) -> int:
        """The count of all numbers."""
        return self.trained_numbers + self.frozen


def compute_group_sizes(count: int, how: Checkpointing) -> list[int]:
    """The number of layers in each checkpoint, of a model with ``count`` layers."""
    if how == "none":
        return []
    if how == "sqrt":
        size = math.ceil(count / math.ceil(math.sqrt(count)))
        return [min(size, count - start) for start in range(0, count, size)]
    return [1] * (count if how == "full" else math.ceil(count / how))


@dataclass(frozen=True)
class StepShape:
    """All that the bytes of a step depend on.

    ``item`` are the bytes of a number in the precision of the products, ``chunk`` the positions
    whose logits are in memory at once. With ``kernels`` those of a GPU compute the loss
    (``kd.loss.chunk_size.suits_kernels``). With ``looks_ahead`` an update of a learned temperature
    has three more gradients beside those of the step (``kd.training.lookahead``).
    """

    student: StudentShape
    options: TrainConfig
    length: int
    vocabulary: int
    item: int
    chunk: int
    kernels: bool = False
    looks_ahead: bool = False

    @cached_property
    def groups(self) -> list[int]:
        """The number of layers in each checkpoint."""
        return compute_group_sizes(self.student.layers, self.options.gradient_checkpointing)

    def estimate(self) -> StepMemory:
        """The bytes of the step on one device."""
        student = self.student
        trained = count_trained_bytes(student.trained_numbers, self.options)
        return StepMemory(
            weights=trained + student.frozen_bytes + student.buffer_bytes,
            gradients=trained * (4 if self.looks_ahead else 1),
            optimizer=count_state_bytes(self.options, student.trained),
            activations=self.estimate_activations(),
            head=self.estimate_head(),
            offloaded=self.count_offloaded(),
        )

    def estimate_activations(self) -> int:
        """Bytes of all activations, with checkpointing, while one group is recomputed.

        Of layers whose activations are offloaded two are on the device, one of which is on its way
        back, and the cast weights of all.
        """
        layer = self._count_layer()
        boundary = self._count_boundary()
        recomputed = max(self.groups, default=0) * layer
        unchecked = self.student.layers - sum(self.groups)
        if self.options.activation_offload:
            stored = max(recomputed + boundary, layer * min(unchecked, 2))
        else:
            stored = unchecked * layer + len(self.groups) * boundary + recomputed
        # In the backward pass of a layer about half of its activations have a gradient at the same
        # time.
        working = _OUTSIDE_COPIES * boundary + layer / 2
        return round(working + stored + self.count_kept_casts())

    def count_offloaded(self) -> int:
        """Bytes of the activations that wait in the host's memory; 0 without the offload.

        Its copies are cut so that pinned memory takes hardly more
        (``kd.memory.activation_offload``).
        """
        if not self.options.activation_offload:
            return 0
        layers = (self.student.layers - sum(self.groups)) * self._count_layer()
        return round(layers + len(self.groups) * self._count_boundary())

    def _count_layer(self) -> float:
        """Bytes that autograd keeps in a layer, cast weights apart."""
        narrow = _KEPT_PURE if self.options.is_pure_bfloat16 else _KEPT_HALF
        kept = _KEPT_FLOAT32 if self.item == FLOAT32 else narrow
        tokens = self.options.batch_size * self.length
        return kept * tokens * self.student.widths / self.student.layers

    def _count_boundary(self) -> int:
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
        count = self.student.layers
        whole = count - sum(self.groups) + max(self.groups, default=0)
        return self.item * self.student.in_layers / count * whole

    def estimate_head(self) -> int:
        """Bytes of the LM head beside its weight, and of a chunk of logits.

        They are the gradient of the weight before it is added to the others, the weight cast to
        the precision, the hidden states with their gradient, and the chunk.
        """
        student = self.student
        positions = self.options.batch_size * self.length
        states = 2 * positions * student.width * self.item
        # The gradient of the weight is a sum in float32, whatever the weight is in.
        gradient = _SUM_BYTES * student.head if student.head_bytes is None else 0
        logit_bytes = self.item if self.kernels else _LOGIT_AND_GRADIENT
        chunk = min(self.chunk, positions) * self.vocabulary * logit_bytes
        return gradient + self.count_head_cast() + states + chunk

    def count_head_cast(self) -> int:
        """Bytes of the LM head's weight in the precision, where it is kept in a wider one."""
        own = self.student.head_bytes or count_trained_bytes(1, self.options)
        return self.student.head * self.item if self.item < own else 0


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
