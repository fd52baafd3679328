"""The time of a run by phase, its FLOPs per token, and the utilisation of its device."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kd.memory.devices import find_device_kind
from kd.memory.model_work import count_model_work

#: The phase of what a rank does between two exchanges with others. It is a part of other phases.
ALONE = "alone"


@dataclass(frozen=True)
class Phase:
    """A row of the table: how often the phase ran, its seconds, and its share of all of them."""

    name: str
    count: int
    seconds: float
    mean_milliseconds: float
    share: float


@dataclass
class Stopwatch:
    """Sums the seconds of each phase of a loop.

    On a GPU a phase is the time between two CUDA events on the stream. They are read later, so that
    measuring never makes the loop wait for the device.
    """

    device: torch.device
    _phases: dict[str, tuple[int, float]] = field(default_factory=dict)
    _pending: list[tuple[str, Any, Any]] = field(default_factory=list)
    _before: dict[str, tuple[int, float]] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the time of the block."""
        if self.device.type == "cuda":
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()  # type: ignore[no-untyped-call]
            yield
            last.record()  # type: ignore[no-untyped-call]
            self._pending.append((name, first, last))
        else:
            began = time.perf_counter()
            yield
            self.add(name, time.perf_counter() - began)

    def alone(self) -> AbstractContextManager[None]:
        """Measure the block, which exchanges nothing with other ranks, where gradients follow."""
        return self.phase(ALONE) if torch.is_grad_enabled() else nullcontext()

    def measure_calls(self, module: nn.Module) -> None:
        """Measure the calls of ``module``, as ``alone`` does, without the hooks that it has."""
        running = ExitStack()
        module.register_forward_pre_hook(lambda *_: running.enter_context(self.alone()))
        module.register_forward_hook(lambda *_: running.close())

    def add(self, name: str, seconds: float) -> None:
        """Add ``seconds`` that the caller measured with the host's clock."""
        count, before = self._phases.get(name, (0, 0.0))
        self._phases[name] = count + 1, before + seconds

    def read_pending(self) -> None:
        """Read the pending events; call it where the loop waits for the device anyway."""
        for name, first, last in self._pending:
            last.synchronize()
            self.add(name, first.elapsed_time(last) / 1e3)
        self._pending.clear()

    def dump(self) -> dict[str, list[float]]:
        """Return the count and the seconds of each phase, for a checkpoint."""
        self.read_pending()
        return {name: [*phase] for name, phase in self._phases.items()}

    def restore(self, phases: Mapping[str, Sequence[float]]) -> None:
        """Go on from what ``dump`` returned in the process before."""
        self._phases |= {name: (int(count), seconds) for name, (count, seconds) in phases.items()}
        self._before = dict(self._phases)

    def lap(self, names: Sequence[str]) -> float:
        """Return the seconds of the phases ``names`` since the last call, per entry of the first.

        It also counts from ``restore``. Pending events are not read.
        """
        none = (0, 0.0)
        now, before = (
            [each.get(name, none) for name in names] for each in (self._phases, self._before)
        )
        self._before = dict(self._phases)
        seconds = sum(own[1] for own in now) - sum(own[1] for own in before)
        return seconds / max(now[0][0] - before[0][0], 1)

    def table(self) -> list[Phase]:
        """The phases, longest first."""
        self.read_pending()
        whole = {name: phase for name, phase in self._phases.items() if name != ALONE}
        total = sum(seconds for _, seconds in whole.values()) or 1.0
        rows = [
            Phase(name, count, seconds, 1e3 * seconds / count, seconds / total)
            for name, (count, seconds) in whole.items()
        ]
        return sorted(rows, key=lambda row: -row.seconds)


def count_flops_per_token(student: PreTrainedModel, vocabulary: int, sequence_length: int) -> float:
    """Floating-point operations of forward and backward pass for one token.

    ``kd.memory.model_work`` has the formula. Recomputed activations do not count.
    """
    return count_model_work(student, vocabulary).count_training(sequence_length)


def compute_utilisation(
    tokens_per_second: float, flops: float, device: torch.device
) -> float | None:
    """Model FLOP/s utilisation (MFU) of the device; None where its peak is not known."""
    if device.type != "cuda":
        return None
    kind = find_device_kind(torch.cuda.get_device_name(device))
    return None if kind is None else tokens_per_second * flops / kind.half
