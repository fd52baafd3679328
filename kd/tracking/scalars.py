"""Scalars of a training step beside its loss: speed, memory, and each layer and parameter group.

throughput/tokens_per_second, samples_per_second, steps_per_second
since the last report; a sample is a sequence
throughput/mfu                   model FLOP utilisation, where the device's peak is known
memory/resident_bytes            of this process, in the host's memory
memory/peak_bytes                the most so far: on the GPU, else of this process
memory/allocated_bytes, reserved_bytes
on the GPU: in tensors, and in torch's allocator
grad_norm/NAME, learning_rate/NAME
NAME is a layer (``layer 0``, ``head``) or a group of the
optimiser (``group 0``); the norm is that before clipping
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kd.memory.step_memory import read_peak_memory, read_resident_memory
from kd.tracking.stopwatch import compute_utilisation


@dataclass
class SpeedMeter:
    """Counts what the steps do between two reports, and the time that they take."""

    flops_per_token: float
    device: torch.device
    #: The devices that share the work.
    devices: int
    _tokens: int = 0
    _samples: int = 0
    _steps: int = 0
    _seconds: float = 0.0

    def count(self, tokens: int, samples: int, seconds: float) -> None:
        """Count a step of ``tokens`` and ``samples`` that took ``seconds``."""
        self._tokens += tokens
        self._samples += samples
        self._steps += 1
        self._seconds += seconds

    def report(self) -> dict[str, float]:
        """Return the speed since the last report; empty where no step was counted."""
        if not self._steps:
            return {}
        seconds = max(self._seconds, 1e-9)
        tokens = self._tokens / seconds
        found = {
            "throughput/tokens_per_second": tokens,
            "throughput/samples_per_second": self._samples / seconds,
            "throughput/steps_per_second": self._steps / seconds,
        }
        share = compute_utilisation(tokens / self.devices, self.flops_per_token, self.device)
        if share is not None:
            found["throughput/mfu"] = share
        self._tokens = self._samples = self._steps = 0
        self._seconds = 0.0
        return found


def measure_memory(device: torch.device) -> dict[str, float]:
    """Return the memory in use now, in bytes."""
    found: dict[str, float] = {
        "memory/resident_bytes": read_resident_memory(),
        "memory/peak_bytes": read_peak_memory(device),
    }
    if device.type == "cuda":
        found["memory/allocated_bytes"] = torch.cuda.memory_allocated(device)
        found["memory/reserved_bytes"] = torch.cuda.memory_reserved(device)
    return found


def name_scalars(kind: str, values: Mapping[str, float]) -> dict[str, float]:
    """Return ``values`` under names such as ``grad_norm/layer 0``."""
    return {f"{kind}/{name}": value for name, value in values.items()}
