"""Whether a device has the memory for a capture at all, asked before the capture begins.

The least that a capture needs is the teacher's weights, and the tensors and logits of one sequence.
It is told too low rather than too high (docs/benchmarks/forecast.md), so a job that is refused here
could not have run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kd.capture.plan import CapturePlan
from kd.capture.recording import LOGIT_ELEMENTS
from kd.capture.sampling import PASS_ELEMENTS
from kd.config.placement import Resources
from kd.errors import ConfigError, Problem
from kd.files import format_bytes
from kd.memory.host import read_memory_bytes
from kd.memory.model_work import count_weight_bytes, estimate_forward_bytes
from kd.models.loading import choose_teacher_dtype, outline_teacher

#: Copies of the elements of a pass of the sampler, in float32.
_PASS_COPIES = 16


@dataclass(frozen=True)
class LeastCapture:
    """Bytes that a capture needs for the weights, and for one sequence beside them."""

    weights: int
    sequence: int

    @classmethod
    def of(cls, plan: CapturePlan, device: torch.device, devices: int = 1) -> LeastCapture:
        """Count them by the shape of the teacher of ``plan``; its weights are not read.

        ``devices`` are those of the job, such as ``device``.
        """
        teacher = plan.teacher
        dtype = choose_teacher_dtype(teacher, device)
        hollow = outline_teacher(teacher, dtype)
        length = plan.read_length
        vocabulary = plan.identity.tokenizer.vocabulary_size
        logits = vocabulary * min(max(LOGIT_ELEMENTS[device.type] // vocabulary, 1), length)
        weights = count_weight_bytes(hollow, dtype.itemsize, teacher.section.quantization)
        return cls(
            teacher.section.compute_device_share(weights, devices),
            estimate_forward_bytes(hollow, length, dtype.itemsize)
            # A chunk of logits, and the passes of the sampler over it, in float32.
            + 4 * (logits + _PASS_COPIES * min(PASS_ELEMENTS[device.type], logits)),
        )

    def find_problems(self, memory: int, length: int) -> list[Problem]:
        """Find that ``memory`` bytes are too few, and name what to lower."""
        if self.weights + self.sequence <= memory:
            return []
        less = "set teacher.dtype to bfloat16, or teacher.quantization to int8"
        more = "a device with more memory (resources.memory)"
        need = f"{format_bytes(self.weights)} of weights"
        there = f"the device has {format_bytes(memory)}"
        if self.weights > memory:
            detail = f"the teacher has {need}, but {there}."
            remedy = f"Take a smaller teacher, or {more}; or {less}."
            return [Problem("/teacher/model", detail, remedy)]
        detail = (
            f"one sequence of {length} tokens needs {format_bytes(self.sequence)} beside {need}, "
            f"but {there}."
        )
        remedy = f"Lower it, or take {more}; or {less}."
        return [Problem("/data/sequence_length", detail, remedy)]


def require_capture_memory(plan: CapturePlan, resources: Resources, device: torch.device) -> None:
    """Raise ``ConfigError`` where ``device`` has too little memory for even one sequence."""
    if not plan.teacher.section.is_local:
        return
    if device.type == "cuda":
        memory = torch.cuda.mem_get_info(device)[1]
    else:
        memory = min(read_memory_bytes(), resources.memory or read_memory_bytes())
    least = LeastCapture.of(plan, device, resources.gpus or 1)
    if problems := least.find_problems(memory, plan.read_length):
        raise ConfigError(problems)
