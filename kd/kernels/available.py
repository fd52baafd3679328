"""Whether the Triton kernels can run here: they need a GPU, triton and a compiler that works.

Each kernel is tried on a few rows, and its result compared with that of plain operations. A kernel
that fails makes a job slower, and changes its results by roundings only.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from kd.errors import format_first_line

#: How far a kernel's results may be from those of plain operations; GPUs approximate exp.
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}
TEMPERATURE = 2.0


def can_run_kernels(hidden_ND: Tensor) -> bool:
    """Whether the kernels can run on the device and in the dtype of these hidden states."""
    return (
        hidden_ND.is_cuda
        and hidden_ND.dtype != torch.float64
        and not describe_kernel_failure(hidden_ND.device, hidden_ND.dtype)
    )


@functools.cache
def describe_kernel_failure(device: torch.device, dtype: torch.dtype) -> str:
    """Try the kernels on a GPU on logits of ``dtype``; return what fails, or "" if nothing does.

    A process tries each pair once.
    """
    tried = try_kernels(device, dtype)
    errors = "; ".join(f"{name}: {error}" for name, error in tried.items() if error)
    if not errors:
        return ""
    message = (
        f"The GPU kernels fail on {device} in {dtype}, so the run computes logits of that type "
        f"without them, more slowly and with other roundings: {errors}."
    )
    warnings.warn(message, stacklevel=3)
    return message


def try_kernels(device: torch.device, dtype: torch.dtype = torch.float32) -> dict[str, str]:
    """Compile and run each kernel on logits of ``dtype``; return what fails, by kernel.

    The error of a kernel is empty if it ran and its result was right.
    On a CPU the environment must have ``TRITON_INTERPRET=1`` before triton is imported.
    """
    if importlib.util.find_spec("triton") is None:
        return dict.fromkeys(_TRIALS, "triton is not installed")
    found = dict.fromkeys(_TRIALS, "")
    for name, trial in _TRIALS.items():
        try:
            trial(torch.arange(12.0, device=device).view(2, 6).div(4).to(dtype))
        except Exception as error:  # a compiler may raise any type
            found[name] = format_first_line(error)
    return found


def _try_reduce_rows(z_NV: Tensor) -> None:
    from kd.kernels.triton_rows import reduce_rows

    rows = reduce_rows(z_NV, temperature=TEMPERATURE, total=True, mean=True)
    assert rows.total_N is not None and rows.mean_N is not None
    s_NV = z_NV.float()
    soft_NV = s_NV / TEMPERATURE
    _require_close(rows.lse_N, s_NV.logsumexp(1), z_NV.dtype)
    _require_close(rows.soft_lse_N, soft_NV.logsumexp(1), z_NV.dtype)
    _require_close(rows.total_N, s_NV.sum(1), z_NV.dtype)
    _require_close(rows.mean_N, (soft_NV.softmax(1) * s_NV).sum(1), z_NV.dtype)


def _try_write_gradient(z_NV: Tensor) -> None:
    from kd.kernels.triton_rows import PLAIN_LM_HEAD, RowSums, write_gradient_

    s_NV = z_NV.float()
    soft_NV = s_NV / TEMPERATURE
    rows = RowSums(s_NV.logsumexp(1), soft_NV.logsumexp(1), None, None)
    hard_N = torch.full_like(rows.lse_N, 0.25)
    soft_N = torch.full_like(rows.lse_N, 0.5)
    # Before the kernel, which overwrites the logits.
    expected_NV = 0.25 * s_NV.softmax(1) + 0.5 * soft_NV.softmax(1) - 0.125
    write_gradient_(z_NV, PLAIN_LM_HEAD, TEMPERATURE, rows, hard_N, soft_N, 0.125)
    _require_close(z_NV.float(), expected_NV, z_NV.dtype)


_TRIALS: dict[str, Callable[[Tensor], None]] = {
    "reduce_rows": _try_reduce_rows,
    "write_gradient": _try_write_gradient,
}


def _require_close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCES[dtype]
    if not torch.allclose(found, expected, rtol=tolerance, atol=tolerance):
        error = (found - expected).abs().max().item()
        raise ArithmeticError(f"its result is wrong by {error:.2g}")
