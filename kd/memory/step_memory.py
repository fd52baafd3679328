"""The memory of a training step: estimated before the run, and measured during it.

Shapes: B sequences, L positions.
"""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from transformers import PreTrainedModel

from kd.config.train import TrainConfig
from kd.files import format_bytes
from kd.loss.chunk_size import PLAIN_LOGIT_BYTES, choose_chunk_positions
from kd.memory.activation_checkpointing import compute_group_sizes
from kd.models.layers import compute_hidden_states, find_decoder_layers
from kd.models.precision import Precision
from kd.optim.optimizers import list_trained_shapes
from kd.optim.state_size import (
    AVERAGE_NUMBER_BYTES,
    count_optimizer_bytes,
    count_trained_bytes,
)
from kd.text.packed_rows import PackedRows

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
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in asdict(self).items())
        return f"A training step is expected to need {format_bytes(self.total)}: {parts}."

    def warning(self, free: int | None) -> str | None:
        """A warning if the step needs more than ``free`` bytes beside the weights; else None."""
        if free is None or self.total - self.weights <= free:
            return None
        return f"{self} {format_bytes(free)} is free beside the weights: memory may run out."


def estimate_memory(
    student: PreTrainedModel,
    options: TrainConfig,
    sequence_length: int,
    vocabulary: int,
    precision: Precision,
    saved: SavedBytesFit | None = None,
    chunk: int | None = None,
    kernels: bool = False,
) -> StepMemoryEstimate:
    """Estimate the memory of a step of ``student``, from what autograd keeps of short passes.

    Call it before ``checkpoint_activations`` and ``compile_student``, which hide those tensors. No
    state of the model changes. ``saved`` is given where those passes were made before. ``chunk`` is
    the default of ``train.logits_chunk``; None means that of this device. With ``kernels`` those of
    a GPU compute the loss (``kd.loss.chunk_size.suits_kernels``).
    """
    saved = saved or fit_saved_bytes(student, sequence_length, precision)
    positions = options.batch_size * sequence_length
    chunk = options.logits_chunk or chunk
    item = precision.dtype.itemsize
    if chunk is None:
        logit_bytes = item if kernels else PLAIN_LOGIT_BYTES
        chunk = choose_chunk_positions(vocabulary, student.device, logit_bytes)
    logit_bytes = item if kernels else _LOGIT_AND_GRADIENT
    parameters = list(student.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return StepMemoryEstimate(
        weights=sum(_count_weight_bytes(each, options) for each in parameters)
        + sum(map(_count_bytes, student.buffers())),
        gradients=sum(_count_weight_bytes(each, options) for each in trained),
        optimizer=estimate_optimizer_bytes(student, options),
        activations=_estimate_activation_bytes(student, options, sequence_length, saved),
        head=_estimate_lm_head_bytes(student, options, positions, precision)
        + min(chunk, positions) * vocabulary * logit_bytes,
    )


def estimate_optimizer_bytes(student: PreTrainedModel, options: TrainConfig) -> int:
    """Bytes of the optimiser's state, and of the moving average of the weights."""
    shapes = list_trained_shapes(student)
    numbers = sum(each.size for each in shapes.values())
    average = AVERAGE_NUMBER_BYTES * numbers if options.ema_decay is not None else 0
    return average + count_optimizer_bytes(options.optim, shapes.values())


def _count_weight_bytes(parameter: Parameter, options: TrainConfig) -> int:
    """Bytes of a parameter as ``options`` train it, whatever its precision is now."""
    if not parameter.requires_grad:
        return _count_bytes(parameter)
    return count_trained_bytes(parameter.numel(), options)


def _count_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _estimate_lm_head_bytes(
    student: PreTrainedModel, options: TrainConfig, positions: int, precision: Precision
) -> int:
    """Bytes of the LM head beside its weight and a chunk of logits.

    They are the gradient of the weight before it is added to the others, the weight cast to the
    precision, and the hidden states with their gradient.
    """
    weight = student.get_output_embeddings().weight
    copy = weight.numel() * precision.dtype.itemsize
    cast = copy if copy < _count_weight_bytes(weight, options) else 0
    states = 2 * positions * weight.shape[1] * precision.dtype.itemsize
    # The gradient of the weight is a sum in float32, whatever the weight is in.
    return _SUM_BYTES * weight.numel() * weight.requires_grad + cast + states


# ---------------------------------------------------------------------- activations


@dataclass(frozen=True)
class _SavedBytes:
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
    the length. Each tuple holds c, a and b of one field of ``_SavedBytes``.
    """

    layers: tuple[float, float, float]
    outside: tuple[float, float, float]
    boundary: tuple[float, float, float]

    def at(self, batch: int, length: int) -> _SavedBytes:
        """The bytes that ``batch`` sequences of ``length`` positions keep."""
        kept = (
            fixed + batch * (linear * length + square * length**2)
            for fixed, linear, square in (self.layers, self.outside, self.boundary)
        )
        return _SavedBytes(*kept)


def _estimate_activation_bytes(
    student: PreTrainedModel, options: TrainConfig, sequence_length: int, saved: SavedBytesFit
) -> int:
    """Bytes of all activations, with checkpointing as configured, while one group is recomputed.

    Of layers whose activations are offloaded only one is on the device, and the cast weights of
    all.
    """
    kept = saved.at(options.batch_size, sequence_length)
    count = max(len(find_decoder_layers(student)), 1)
    layer = kept.layers / count
    groups = compute_group_sizes(count, options.gradient_checkpointing)
    recomputed = max(groups, default=0) * layer
    unchecked = count - sum(groups)
    # In the backward pass of a layer about half of its activations have a gradient at the same
    # time.
    working = kept.outside + layer / 2
    if options.activation_offload:
        casts = saved.layers[0] / count * unchecked
        return round(working + casts + max(recomputed, layer * min(unchecked, 1)))
    return round(working + unchecked * layer + len(groups) * kept.boundary + recomputed)


def count_offloaded_bytes(
    student: PreTrainedModel, options: TrainConfig, sequence_length: int, saved: SavedBytesFit
) -> float:
    """Bytes that a micro-batch moves to the host, and later back."""
    if not options.activation_offload:
        return 0.0
    kept = saved.at(options.batch_size, sequence_length)
    count = max(len(find_decoder_layers(student)), 1)
    groups = compute_group_sizes(count, options.gradient_checkpointing)
    unchecked = (count - sum(groups)) / count
    return unchecked * (kept.layers - saved.layers[0]) + len(groups) * kept.boundary


def fit_saved_bytes(
    student: PreTrainedModel, sequence_length: int, precision: Precision
) -> SavedBytesFit:
    """Fit what autograd keeps to passes of one sequence at three lengths."""
    step = max(min(64, sequence_length // 3), 2)
    lengths = [step, 2 * step, 3 * step]
    measured = [_measure_saved_bytes(student, each, precision) for each in lengths]

    def fit(name: str) -> tuple[float, float, float]:
        values = [getattr(each, name) for each in measured]
        fixed, linear, square = np.linalg.solve(np.vander(lengths, 3, increasing=True), values)
        return float(fixed), float(linear), float(square)

    return SavedBytesFit(fit("layers"), fit("outside"), fit("boundary"))


def _measure_saved_bytes(
    student: PreTrainedModel, length: int, precision: Precision
) -> _SavedBytes:
    """The bytes that a pass of one packed sequence of two documents keeps."""
    training = student.training
    device = student.device
    ledger = _StorageCounter({each.untyped_storage().data_ptr() for each in student.parameters()})
    lengths = (length - length // 2, length // 2)
    positions_BL = torch.cat([torch.arange(each) for each in lengths])[None]
    packed = PackedRows.of(positions_BL).map(lambda each: each.to(device))
    with (
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        torch.enable_grad(),
        precision.autocast(),
    ):
        with ledger.watching(find_decoder_layers(student)):
            try:
                hidden = compute_hidden_states(
                    student.train(), torch.zeros_like(packed.positions_BL), packed
                )
            finally:
                student.train(training)
        del hidden
    return _SavedBytes(ledger.inside, ledger.total - ledger.inside, ledger.boundary)


class _StorageCounter:
    """Counts the storages that autograd keeps, each once, and those of them that a layer keeps."""

    def __init__(self, known: set[int]) -> None:
        # Not counted, because they are in memory anyway: the parameters, and later each storage
        # seen.
        self._known = known
        self._within = False
        self.total = self.inside = self.boundary = 0

    @contextmanager
    def watching(self, layers: list[nn.Module]) -> Iterator[None]:
        """Count while the block runs a forward pass; its graph must live until the block ends."""
        with ExitStack() as stack:
            for layer in layers:
                for handle in (
                    layer.register_forward_pre_hook(self._enter),
                    layer.register_forward_hook(self._leave),
                ):
                    stack.callback(handle.remove)
            stack.enter_context(
                torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)
            )
            yield

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known:
            self._known.add(storage.data_ptr())
            self.total += storage.nbytes()
            self.inside += storage.nbytes() * self._within
        return tensor

    def _enter(self, layer: nn.Module, inputs: Any) -> None:
        self._within = True

    def _leave(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        self._within = False
        self.boundary = _count_bytes(output[0] if isinstance(output, tuple) else output)


# ---------------------------------------------------------------------- measured


def reset_peak_memory(device: torch.device) -> None:
    """Restart the peak that ``read_peak_memory`` returns, where the system can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def read_peak_memory(device: torch.device) -> int:
    """The most bytes in use since ``reset_peak_memory``: on the GPU, or by this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):
        return _read_field("/proc/self/status", "VmHWM")
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def read_resident_memory() -> int:
    """The bytes of this process that are in memory now; 0 if the system does not say."""
    with suppress(OSError):
        return _read_field("/proc/self/status", "VmRSS")
    return 0


def measure_free_memory(device: torch.device) -> int | None:
    """Free bytes of the GPU, or of this machine within this process's limit; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with suppress(OSError):
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        left = (
            math.inf
            if limit == resource.RLIM_INFINITY
            else limit - _read_field("/proc/self/status", "VmSize")
        )
        return int(max(min(_read_field("/proc/meminfo", "MemAvailable"), left), 0))
    return None


def _read_field(path: str, name: str) -> int:
    """The bytes of the field ``name`` in a file of Linux's /proc, which counts in KiB."""
    for line in Path(path).read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{path} has no {name}")
