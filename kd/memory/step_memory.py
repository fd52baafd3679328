"""The memory of a training step: estimated before the run, and measured during it.

``kd.memory.step_bytes`` has the arithmetic; a student is described and measured for it here.

Shapes: B sequences, L positions.
"""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from transformers import PreTrainedModel

from kd.config.train import TrainConfig
from kd.loss.chunk_size import PLAIN_LOGIT_BYTES, choose_chunk_positions
from kd.memory.model_work import find_mlp_width
from kd.memory.step_bytes import (
    BlockShape,
    HeadShape,
    SavedBytes,
    SavedBytesFit,
    StepShape,
    StudentShape,
)
from kd.models.layers import compute_hidden_states, find_decoder_layers
from kd.models.precision import Precision
from kd.optim.optimizers import list_trained_shapes
from kd.optim.state_size import ParameterShape
from kd.text.packed_rows import PackedRows


def describe_step(
    student: PreTrainedModel,
    options: TrainConfig,
    sequence_length: int,
    vocabulary: int,
    precision: Precision,
    kernels: bool = False,
    device: torch.device | None = None,
) -> StepShape:
    """Describe a step of ``student``, with what autograd keeps of short passes.

    Call it before ``checkpoint_activations`` and ``compile_student``, which hide those tensors. No
    state of the model changes. With ``kernels`` those of a GPU compute the loss
    (``kd.loss.chunk_size.suits_kernels``). The step is taken on ``device`` (None: where the student
    is).
    """
    item = precision.dtype.itemsize
    logit_bytes = item if kernels else PLAIN_LOGIT_BYTES
    return StepShape(
        student=describe_student(student),
        options=options,
        length=sequence_length,
        vocabulary=vocabulary,
        item=item,
        saved=fit_saved_bytes(student, sequence_length, precision),
        chunk=options.logits_chunk
        or choose_chunk_positions(vocabulary, device or student.device, logit_bytes),
        kernels=kernels,
    )


def estimate_optimizer_bytes(student: PreTrainedModel, options: TrainConfig) -> int:
    """Bytes of the optimiser's state, and of the moving average of the weights."""
    return describe_student(student).sum_blocks(lambda each: each.count_state_bytes(options))


def describe_student(student: PreTrainedModel) -> StudentShape:
    """Describe the parameters of ``student`` by layer; its weights may have no memory."""
    trained = list_trained_shapes(student)
    config = student.config.get_text_config()
    *layers, outside = _list_blocks(student)
    return StudentShape(
        layers=tuple(_describe_block(layer, trained) for layer in layers),
        outside=_describe_block(outside, trained),
        head=_describe_head(student),
        width=config.hidden_size,
        inner=find_mlp_width(config),
        buffer_bytes=sum(map(_count_bytes, student.buffers())),
    )


def _list_blocks(student: PreTrainedModel) -> list[list[Parameter]]:
    """The parameters of each layer, then all others; one that layers share is in the first."""
    left = dict.fromkeys(student.parameters())
    blocks = []
    for layer in find_decoder_layers(student):
        blocks.append([each for each in layer.parameters() if each in left])
        for parameter in blocks[-1]:
            del left[parameter]
    return [*blocks, list(left)]


def _describe_block(
    parameters: list[Parameter], trained: Mapping[Parameter, ParameterShape]
) -> BlockShape:
    frozen = [parameter for parameter in parameters if parameter not in trained]
    return BlockShape(
        trained=tuple(trained[parameter] for parameter in parameters if parameter in trained),
        frozen=sum(parameter.numel() for parameter in frozen),
        frozen_bytes=sum(map(_count_bytes, frozen)),
    )


def _describe_head(student: PreTrainedModel) -> HeadShape:
    weight = student.get_output_embeddings().weight
    rows, width = weight.shape
    tied = weight is student.get_input_embeddings().weight
    return HeadShape(rows, width, weight.requires_grad, weight.element_size(), tied)


def _count_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# ---------------------------------------------------------------------- activations


def fit_saved_bytes(
    student: PreTrainedModel, sequence_length: int, precision: Precision
) -> SavedBytesFit:
    """Fit what autograd keeps to passes of one sequence at three lengths, where the student is."""
    precision = replace(precision, device=student.device.type)
    step = max(min(64, sequence_length // 3), 2)
    lengths = [step, 2 * step, 3 * step]
    measured = [_measure_saved_bytes(student, each, precision) for each in lengths]

    def fit(name: str) -> tuple[float, float, float]:
        values = [getattr(each, name) for each in measured]
        fixed, linear, square = np.linalg.solve(np.vander(lengths, 3, increasing=True), values)
        return float(fixed), float(linear), float(square)

    return SavedBytesFit(fit("layers"), fit("outside"), fit("boundary"))


def _measure_saved_bytes(student: PreTrainedModel, length: int, precision: Precision) -> SavedBytes:
    """The bytes that a pass of one packed sequence of two documents keeps.

    A student of fake tensors, which have no values, reads one document: where documents begin is a
    value.
    """
    training = student.training
    device = student.device
    mode = getattr(next(student.parameters()), "fake_mode", None)
    ledger = _StorageCounter(student.parameters())
    lengths = (length - length // 2, length // 2)
    positions_BL = torch.cat([torch.arange(each) for each in lengths])[None]
    packed = PackedRows.of(positions_BL).map(lambda each: each.to(device))
    with (
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        torch.enable_grad(),
        mode or nullcontext(),
        precision.autocast(),
    ):
        tokens_BL = torch.zeros(1, length, dtype=torch.int64, device=device)
        with ledger.watching(find_decoder_layers(student)):
            try:
                hidden = compute_hidden_states(
                    student.train(), tokens_BL, None if mode is not None else packed
                )
            finally:
                student.train(training)
        del hidden
    return SavedBytes(ledger.inside, ledger.total - ledger.inside, ledger.boundary)


def _refuse(kept: None) -> Tensor:
    raise AssertionError("the graph of a short pass has no backward pass")


def _name_storage(tensor: Tensor) -> int:
    """The place of the object that owns the bytes of ``tensor``; fake tensors have such, too."""
    return tensor.untyped_storage()._cdata


class _StorageCounter:
    """Counts the storages that autograd keeps, each once, and those of them that a layer keeps."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        # Not counted, because they are in memory anyway: the parameters, and later each storage
        # seen. They are held, so that no other takes the place of one in memory.
        self._known = {_name_storage(each): each.untyped_storage() for each in known}
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
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._keep, _refuse))
            yield

    def _keep(self, tensor: Tensor) -> None:
        """Count the storage of ``tensor``, and give the graph nothing of it to keep.

        A node that kept its own output would keep itself, and the graph would never be freed.
        """
        name = _name_storage(tensor)
        if name not in self._known:
            storage = tensor.untyped_storage()
            self._known[name] = storage
            self.total += storage.nbytes()
            self.inside += storage.nbytes() * self._within

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
