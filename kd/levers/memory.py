"""What a training step needs of memory: estimated before the run, measured during it.

Shapes: B sequences, T positions, L layers, V vocabulary, D hidden width.
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
from transformers import PreTrainedModel

from kd.config.train import TrainConfig
from kd.levers.checkpointing import group_sizes
from kd.losses import chunk_positions
from kd.models import decoder_layers, hidden_states
from kd.precision import Precision

# Numbers that an optimiser keeps for each weight; of Muon, for the matrices of the layers.
_STATE = {"adamw": 2, "schedule_free": 2, "lion": 1, "lars": 1, "muon": 1}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of a training step at its peak; ``optimizer`` is its state and the moving average of the weights.

    ``activations`` are what the backward pass finds kept, ``head`` the chunk of logits and the head's own gradient.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    head: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.head

    def row(self) -> str:
        """The numbers as a row of a Markdown table: weights, gradients, optimiser, activations, head, total."""
        return "| " + " | ".join(readable(size) for size in (*asdict(self).values(), self.total)) + " |"

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {readable(size)}" for name, size in asdict(self).items())
        return f"A training step is expected to need {readable(self.total)}: {parts}."

    def warning(self, free: int | None) -> str | None:
        """Says that it is more than the ``free`` bytes; weights that are there already are not counted again."""
        if free is None or self.total - self.weights <= free:
            return None
        return f"{self} {readable(free)} is free beside the weights: memory may run out."


def estimate_memory(
    student: PreTrainedModel, options: TrainConfig, sequence_length: int, vocabulary: int, precision: Precision
) -> MemoryEstimate:
    """What a step of ``student`` on its device will need, from what autograd keeps of a few short passes.

    Call it before ``checkpoint_activations`` and ``compile_student``, which hide it; no state of the model is changed.
    """
    parameters = list(student.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return MemoryEstimate(
        weights=sum(_size(each) for each in (*parameters, *student.buffers())),
        gradients=sum(map(_size, trained)),
        optimizer=optimizer_bytes(student, options),
        activations=_activations(student, options, sequence_length, precision),
        head=_head(student, options, sequence_length, vocabulary, precision),
    )


def optimizer_bytes(student: PreTrainedModel, options: TrainConfig) -> int:
    """Bytes of the optimiser's state, and of the moving average of the weights."""
    trained = [parameter for parameter in student.parameters() if parameter.requires_grad]
    average = sum(map(_size, trained)) if options.ema_decay is not None else 0
    maps = {id(each) for layer in decoder_layers(student) for each in layer.parameters() if each.ndim >= 2}
    return average + sum(_state(each, options.optim, id(each) in maps) for each in trained)


def _state(parameter: nn.Parameter, optim: str, maps: bool) -> int:
    """Of one weight, in float32; ``maps`` is whether it is a matrix of a layer."""
    if optim == "adafactor":  # a row and a column of a matrix; all of a vector
        return 4 * (sum(parameter.shape) if parameter.ndim >= 2 else parameter.numel())
    if optim == "muon" and not maps:  # embeddings, head and vectors are AdamW's
        optim = "adamw"
    return 4 * parameter.numel() * _STATE[optim]


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _head(
    student: PreTrainedModel, options: TrainConfig, sequence_length: int, vocabulary: int, precision: Precision
) -> int:
    """A chunk of logits and of their gradient, the gradient of the weight before it is added, and a cast weight."""
    weight = student.get_output_embeddings().weight
    positions = options.batch_size * sequence_length
    chunk = min(options.logits_chunk or chunk_positions(vocabulary, student.device), positions)
    cast = _size(weight) // 2 if precision.dtype.itemsize == 2 else 0
    states = 2 * positions * weight.shape[1] * precision.dtype.itemsize
    return 2 * 4 * chunk * vocabulary + _size(weight) * weight.requires_grad + cast + states


# ---------------------------------------------------------------------- activations


@dataclass(frozen=True)
class _Kept:
    """Bytes that a forward pass keeps for the backward pass: in the layers, outside them, and one layer's output."""

    layers: float
    outside: float
    boundary: float


def _activations(student: PreTrainedModel, options: TrainConfig, sequence_length: int, precision: Precision) -> int:
    """Of B sequences of T positions, with the layers checkpointed as configured, while one group is recomputed."""
    kept = _extrapolated(student, options.batch_size, sequence_length, precision)
    count = max(len(decoder_layers(student)), 1)
    layer, groups = kept.layers / count, group_sizes(count, options.gradient_checkpointing)
    recomputed = max(groups, default=0) * layer
    spared = (count - sum(groups)) * layer
    # The backward pass of a layer has gradients of about what the layer kept, a part at a time.
    return round(kept.outside + spared + len(groups) * kept.boundary + recomputed + layer / 2)


def _extrapolated(student: PreTrainedModel, batch: int, length: int, precision: Precision) -> _Kept:
    """c + B (a T + b T^2), from passes at three lengths: weights cast by autocast, most tensors, and masks."""
    step = max(min(64, length // 3), 2)
    lengths = [step, 2 * step, 3 * step]
    measured = [_measure(student, each, precision) for each in lengths]

    def at(values: list[float]) -> float:
        fixed, linear, square = np.linalg.solve(np.vander(lengths, 3, increasing=True), values)
        return float(fixed + batch * (linear * length + square * length**2))

    return _Kept(*(at([getattr(each, name) for each in measured]) for name in ("layers", "outside", "boundary")))


def _measure(student: PreTrainedModel, length: int, precision: Precision) -> _Kept:
    """What one packed sequence of two documents keeps."""
    training, device = student.training, student.device
    ledger = _Ledger({each.untyped_storage().data_ptr() for each in student.parameters()})
    positions_BT = torch.cat([torch.arange(length - length // 2), torch.arange(length // 2)])[None].to(device)
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad(), precision.autocast():
        with ledger.watching(decoder_layers(student)):
            try:
                hidden = hidden_states(student.train(), torch.zeros_like(positions_BT), positions_BT)
            finally:
                student.train(training)
        del hidden
    return _Kept(ledger.inside, ledger.total - ledger.inside, ledger.boundary)


class _Ledger:
    """Counts storages that autograd keeps, each once, and whether a layer kept them."""

    def __init__(self, known: set[int]) -> None:
        self._known = known  # the parameters: they are there anyway
        self._within = False
        self.total = self.inside = self.boundary = 0

    @contextmanager
    def watching(self, layers: list[nn.Module]) -> Iterator[None]:
        """Count while the block runs a forward pass, whose graph must live until it ends."""
        with ExitStack() as stack:
            for layer in layers:
                for handle in (layer.register_forward_pre_hook(self._enter), layer.register_forward_hook(self._leave)):
                    stack.callback(handle.remove)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor))
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
        self.boundary = _size(output[0] if isinstance(output, tuple) else output)


# ---------------------------------------------------------------------- measured


def reset_peak_memory(device: torch.device) -> None:
    """Let ``peak_memory`` begin anew, where the system can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_memory(device: torch.device) -> int:
    """The most bytes in use since ``reset_peak_memory``: of the GPU by torch, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):
        return _field("/proc/self/status", "VmHWM")
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be had of the GPU, or of this machine within this process's limit; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with suppress(OSError):
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        left = math.inf if limit == resource.RLIM_INFINITY else limit - _field("/proc/self/status", "VmSize")
        return int(max(min(_field("/proc/meminfo", "MemAvailable"), left), 0))
    return None


def _field(path: str, name: str) -> int:
    """Bytes of a line of Linux's accounts."""
    for line in Path(path).read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{path} has no {name}")


def readable(size: float) -> str:
    """A number of bytes for people."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
