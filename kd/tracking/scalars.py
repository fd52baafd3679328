"""Scalars of a training step beside its loss: speed, memory, and each layer and parameter group.

    throughput/tokens_per_second, samples_per_second, steps_per_second
    throughput/mfu                   model FLOP utilisation, where the device's peak is known
    loader/waited_share              of the time since the last report, waiting for batches
    loader/late_steps                the share of the steps whose batches were not ready
    loader/pinned_share              of the micro-batches: a GPU copies those while it computes
    memory/resident_bytes            of this process, in the host's memory
    memory/peak_bytes                the most so far: on the GPU, else of this process
    memory/allocated_bytes           on the GPU, in tensors
    memory/reserved_bytes            on the GPU, in torch's allocator
    rank_seconds/RANK                what a rank works alone in a step (kd.checks.slow_rank)
    grad_norm/NAME                   the norm of the gradient before clipping
    learning_rate/NAME

Speeds are means since the last report; a sample is a sequence. NAME is a layer (``layer 0``,
``head``) or a group of the optimiser (``group 0``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from kd.memory.step_memory import read_peak_memory, read_resident_memory
from kd.tracking.stopwatch import compute_utilisation

#: Seconds from which a step counts as one that waited; a batch that is ready takes less.
LATE_SECONDS = 1e-3


@dataclass(frozen=True)
class StepWork:
    """What a step did: its tokens and sequences, and its seconds, waiting for them and after that.

    ``pinned`` is the share of its micro-batches that lie in pinned memory.
    """

    tokens: int
    samples: int
    waited: float
    worked: float
    pinned: float


@dataclass
class SpeedMeter:
    """Counts what the steps do between two reports, and the time that they take.

    ``devices`` share the work.
    """

    flops_per_token: float
    device: torch.device
    devices: int
    _steps: list[StepWork] = field(default_factory=list)

    def count(self, step: StepWork) -> None:
        """Count a step."""
        self._steps.append(step)

    def report(self) -> dict[str, float]:
        """Return the speed since the last report; empty where no step was counted."""
        if not self._steps:
            return {}
        steps = self._steps
        self._steps = []
        seconds = max(sum(each.waited + each.worked for each in steps), 1e-9)
        tokens = sum(each.tokens for each in steps) / seconds
        found = {
            "throughput/tokens_per_second": tokens,
            "throughput/samples_per_second": sum(each.samples for each in steps) / seconds,
            "throughput/steps_per_second": len(steps) / seconds,
            "loader/waited_share": sum(each.waited for each in steps) / seconds,
            "loader/late_steps": sum(each.waited > LATE_SECONDS for each in steps) / len(steps),
            "loader/pinned_share": sum(each.pinned for each in steps) / len(steps),
        }
        share = compute_utilisation(tokens / self.devices, self.flops_per_token, self.device)
        if share is not None:
            found["throughput/mfu"] = share
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
