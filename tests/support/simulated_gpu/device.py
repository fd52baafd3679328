"""Put the simulated GPU in the place of ``torch.cuda``."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from tests.support.simulated_gpu import streams
from tests.support.simulated_gpu.tensors import register_factories

NAME = "Simulated GPU"
#: The variable that says of which compute capability the GPU is: "7.5" or "8.0", the default.
CAPABILITY = "SIMULATED_CAPABILITY"
_MEMORY = 80 << 30


def install() -> None:
    """Let this process see one GPU. There is no way back: use a process of its own.

    Triton has no such device, so that kernels count as failed, and are not compiled.
    """
    capability = _read_capability()
    properties = SimpleNamespace(
        name=NAME, total_memory=_MEMORY, major=capability[0], minor=capability[1],
        multi_processor_count=100,
    )  # fmt: skip
    replaced: dict[str, Any] = {
        "Event": streams.SimulatedEvent,
        "Stream": streams.SimulatedStream,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": _make_idle(),
        "current_device": lambda: 0,
        "current_stream": streams.current_stream,
        "default_stream": lambda *_: streams.DEFAULT,
        "device_count": lambda: 1,
        "empty_cache": _make_idle(),
        "get_arch_list": lambda: [f"sm_{capability[0]}{capability[1]}"],
        "get_device_capability": lambda *_: capability,
        "get_device_name": lambda *_: NAME,
        "get_device_properties": lambda *_: properties,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "init": _make_idle(),
        "is_available": lambda: True,
        "is_bf16_supported": lambda *_, **__: capability >= (8, 0),
        "is_current_stream_capturing": lambda: False,
        "is_initialized": lambda: True,
        "manual_seed": _make_idle(),
        "manual_seed_all": _make_idle(),
        "max_memory_allocated": lambda *_: 1 << 30,
        "max_memory_reserved": lambda *_: 1 << 30,
        "mem_get_info": lambda *_: (_MEMORY, _MEMORY),
        "memory_allocated": lambda *_: 0,
        "memory_reserved": lambda *_: 0,
        "reset_peak_memory_stats": _make_idle(),
        "set_device": _make_idle(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "stream": lambda stream: stream,
        "synchronize": streams.synchronize,
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    # Otherwise Module.to would give a parameter the data of another class.
    torch.__future__.set_swap_module_params_on_conversion(True)
    # torch.library drops the registrations with the object that holds them.
    torch.cuda.simulated = register_factories()  # type: ignore[attr-defined]


def adapt_product() -> None:
    """Tell the product what no simulation can: kernels do not run, and weights are plain.

    Call it before other modules of the product are imported.
    """
    import kd.kernels.available as kernels
    import kd.models.lm_head as lm_head

    kernels.describe_kernel_failure = lambda *_: "the GPU is simulated"
    plain = lm_head.is_plain
    lm_head.is_plain = lambda weight: plain(getattr(weight, "cpu_tensor", weight))


def _read_capability() -> tuple[int, int]:
    major, minor = os.environ.get(CAPABILITY, "8.0").split(".")
    return int(major), int(minor)


def _make_idle() -> Callable[..., None]:
    """Return a function that does nothing. torch's compiler wants one object for each name."""
    return lambda *_, **__: None
