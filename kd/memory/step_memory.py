"""The memory of a training step: estimated before the run, and measured during it.

``kd.memory.step_bytes`` has the arithmetic; a student is described for it here.
"""

from __future__ import annotations

import math
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch
from torch.nn import Parameter
from transformers import PreTrainedModel

from kd.config.train import TrainConfig
from kd.loss.chunk_size import PLAIN_LOGIT_BYTES, choose_chunk_positions
from kd.memory.devices import CUDA_CONTEXT
from kd.memory.model_work import find_expert_share
from kd.memory.step_bytes import StepShape, StudentShape
from kd.models.adapters import find_expert_weights
from kd.models.layers import find_decoder_layers
from kd.models.precision import Precision
from kd.optim.optimizers import list_trained_shapes
from kd.optim.state_size import count_state_bytes


def describe_step(
    student: PreTrainedModel,
    options: TrainConfig,
    sequence_length: int,
    vocabulary: int,
    precision: Precision,
    kernels: bool = False,
    looks_ahead: bool = False,
    device: torch.device | None = None,
) -> StepShape:
    """Describe a step of ``student``, whose weights may have no memory.

    ``kernels`` and ``looks_ahead`` are those of ``StepShape``. The step is taken on ``device``
    (None: where the student is).
    """
    item = precision.dtype.itemsize
    logit_bytes = item if kernels else PLAIN_LOGIT_BYTES
    return StepShape(
        student=describe_student(student),
        options=options,
        length=sequence_length,
        vocabulary=vocabulary,
        item=item,
        chunk=options.logits_chunk
        or choose_chunk_positions(vocabulary, device or student.device, logit_bytes),
        kernels=kernels,
        looks_ahead=looks_ahead,
    )


def estimate_optimizer_bytes(student: PreTrainedModel, options: TrainConfig) -> int:
    """Bytes of the optimiser's state, and of the moving average of the weights."""
    return count_state_bytes(options, list_trained_shapes(student).values())


def describe_student(student: PreTrainedModel) -> StudentShape:
    """Describe the parameters of ``student``; its weights may have no memory."""
    trained = list_trained_shapes(student)
    frozen = [each for each in student.parameters() if each not in trained]
    config = student.config.get_text_config()
    names = find_expert_weights(student)
    experts = {each for name, each in student.named_parameters() if name in names}
    share = find_expert_share(config)
    # A parameter that layers share counts in the first.
    layers: list[list[Parameter]] = []
    left = set(student.parameters())
    for layer in find_decoder_layers(student):
        layers.append([each for each in layer.parameters() if each in left])
        left.difference_update(layers[-1])
    sizes = [sum(each.numel() for each in layer) for layer in layers]
    largest = layers[sizes.index(max(sizes))] if layers else []
    head = student.get_output_embeddings().weight
    return StudentShape(
        layers=max(len(layers), 1),
        trained=tuple(trained.values()),
        in_layers=sum(sizes),
        largest=max(sizes, default=0),
        largest_trained=sum(each.numel() for each in largest if each in trained),
        # Of experts only the share that a token meets counts.
        widths=sum(
            (share if each in experts else 1.0) * math.prod(each.shape[:-2]) * sum(each.shape[-2:])
            for layer in layers
            for each in layer
            if each.ndim >= 2
        ),
        head=head.numel(),
        width=config.hidden_size,
        head_bytes=None if head.requires_grad else head.element_size(),
        frozen=sum(each.numel() for each in frozen),
        frozen_bytes=sum(each.nbytes for each in frozen),
        buffer_bytes=sum(each.nbytes for each in student.buffers()),
    )


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


def read_device_peak(device: torch.device) -> int:
    """The most bytes that the device must have had for this process: on a GPU with its context."""
    return read_peak_memory(device) + (CUDA_CONTEXT if device.type == "cuda" else 0)


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
        free = _read_field("/proc/meminfo", "MemAvailable")
        if limit != resource.RLIM_INFINITY:
            free = min(free, limit - _read_field("/proc/self/status", "VmSize"))
        return max(free, 0)
    return None


def _read_field(path: str, name: str) -> int:
    """The bytes of the field ``name`` in a file of Linux's /proc, which counts in KiB."""
    for line in Path(path).read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{path} has no {name}")
