"""The time of a run by phase, its FLOPs per token, and the utilisation of its device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

#: Peak of dense matrix products in TFLOP/s (bf16 or fp16 with float32 sums), from the
#: manufacturers' data sheets.
PEAK_TERAFLOPS = {
    "V100": 125.0,
    "T4": 65.0,
    "A10": 125.0,
    "A100": 312.0,
    "L4": 121.0,
    "L40S": 362.0,
    "RTX 4090": 165.0,
    "RTX 3090": 71.0,
    "H100": 989.0,
    "H200": 989.0,
    "B200": 2250.0,
}


@dataclass(frozen=True)
class Phase:
    """A row of the table: how often the phase ran, its seconds, and its share of all of them."""

    name: str
    count: int
    seconds: float
    mean_milliseconds: float
    share: float

    def to_json(self) -> dict[str, Any]:
        """The row as events and reports hold it."""
        return asdict(self)


@dataclass
class Stopwatch:
    """Sums the seconds of each phase of a loop.

    On a GPU a phase is the time between two CUDA events on the stream. They are read later, so that
    measuring never makes the loop wait for the device.
    """

    device: torch.device
    _seconds: dict[str, float] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)
    _pending: list[tuple[str, Any, Any]] = field(default_factory=list)

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

    def add(self, name: str, seconds: float) -> None:
        """Add ``seconds`` that the caller measured with the host's clock."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        self._counts[name] = self._counts.get(name, 0) + 1

    def read_pending(self) -> None:
        """Read the pending events; call it where the loop waits for the device anyway."""
        for name, first, last in self._pending:
            last.synchronize()
            self.add(name, first.elapsed_time(last) / 1e3)
        self._pending.clear()

    def table(self) -> list[Phase]:
        """The phases, longest first."""
        self.read_pending()
        total = sum(self._seconds.values()) or 1.0
        rows = [
            Phase(
                name,
                self._counts[name],
                seconds,
                1e3 * seconds / self._counts[name],
                seconds / total,
            )
            for name, seconds in self._seconds.items()
        ]
        return sorted(rows, key=lambda row: -row.seconds)


def count_flops_per_token(student: PreTrainedModel, vocabulary: int, sequence_length: int) -> float:
    """Floating-point operations of forward and backward pass for one token: 6 (P + D V) + 6 M D L.

    P are the parameters of the body (embeddings are looked up, not multiplied), D V those of the LM
    head, and M layers of width D attend over L positions. Kaplan et al. 2020 (arXiv 2001.08361);
    attention as in appendix B of PaLM, halved for the causal mask. Recomputed activations do not
    count.
    """
    width = student.config.hidden_size
    layers = student.config.num_hidden_layers
    tables = {
        id(layer.weight)
        for layer in (student.get_input_embeddings(), student.get_output_embeddings())
        if layer is not None
    }
    body = sum(
        parameter.numel() for parameter in student.parameters() if id(parameter) not in tables
    )
    return 6.0 * (body + width * vocabulary) + 6.0 * layers * width * sequence_length


def compute_utilisation(
    tokens_per_second: float, flops: float, device: torch.device
) -> float | None:
    """Model FLOP/s utilisation (MFU) of the device; None where its peak is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    # Longest names first: L40S is no L4.
    peaks = [
        peak
        for key, peak in sorted(PEAK_TERAFLOPS.items(), key=lambda item: -len(item[0]))
        if key in name
    ]
    return tokens_per_second * flops / (peaks[0] * 1e12) if peaks else None
