"""The rates of the device at hand, measured by a short probe.

It takes about a second: products of two matrices in float32 and in bfloat16, and a copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from kd.memory.devices import DeviceRates
from kd.memory.host import read_memory_bytes
from kd.models.precision import find_hardware, float32_products, name_device

#: How many times faster a training in bfloat16 is on a CPU at most. Products alone are up to six
#: times faster, and trainings were measured at 1.4 to 1.5.
_CPU_GAIN = 1.5
#: Rows and columns of the matrices; a GPU needs larger ones to reach its rate.
_WIDTHS = {"cpu": 512, "cuda": 8192}
#: Bytes that are copied.
_COPIED = {"cpu": 1 << 27, "cuda": 1 << 30}
_ROUNDS = 4
#: Seconds after which no further round begins. A CPU without products in bfloat16 needs most of a
#: second for one.
_ENOUGH_SECONDS = 0.5


def measure_rates(device: torch.device) -> DeviceRates:
    """Measure the rates of ``device``: the fastest of a few rounds of each."""
    half = torch.float16 if find_hardware(device).precision == "fp16" else torch.bfloat16
    with float32_products():
        single = _measure_products(device, torch.float32)
    halves = _measure_products(device, half)
    return DeviceRates(
        name=name_device(device),
        memory=_read_device_memory(device),
        half=halves if device.type == "cuda" else min(halves, _CPU_GAIN * single),
        single=single,
        tf32=_measure_products(device, torch.float32) if find_hardware(device).tf32 else single,
        bandwidth=_measure_bandwidth(device),
    )


def _read_device_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return read_memory_bytes()


def _measure_products(device: torch.device, dtype: torch.dtype) -> float:
    width = _WIDTHS[device.type]
    # Not ones: a GPU needs less power for them, and runs at a higher clock than with real data.
    matrix = torch.randn(width, width, device=device).to(dtype)
    out = torch.empty_like(matrix)
    return 2 * width**3 / _time(lambda: torch.mm(matrix, matrix, out=out), device)


def _measure_bandwidth(device: torch.device) -> float:
    """The bytes per second of a copy, which reads and writes each byte."""
    size = _COPIED[device.type]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _time(lambda: target.copy_(source), device)


def _time(run: Callable[[], object], device: torch.device) -> float:
    """The seconds of the fastest round; the first one warms up, so there are two at least."""
    times: list[float] = []
    while len(times) < 2 or (len(times) <= _ROUNDS and sum(times) < _ENOUGH_SECONDS):
        began = time.monotonic()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.monotonic() - began)
    return max(min(times), 1e-9)
