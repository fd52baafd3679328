"""Whether the Triton kernels can run here: they need a GPU, triton and a compiler that works."""

from __future__ import annotations

import functools
import importlib.util
import warnings

import torch
from torch import Tensor


def can_run_kernels(hidden_ND: Tensor) -> bool:
    """Whether the kernels can run on the device and in the dtype of these hidden states."""
    return (
        hidden_ND.is_cuda
        and hidden_ND.dtype != torch.float64
        and _can_compile_kernels(hidden_ND.device)
    )


@functools.cache
def _can_compile_kernels(device: torch.device) -> bool:
    """Try the kernels on a few rows; a missing driver or compiler only makes the job slower."""
    if importlib.util.find_spec("triton") is None:
        return False
    from kd.kernels.triton_rows import reduce_rows

    logits_NV = torch.arange(12.0, device=device).view(2, 6)
    try:
        found_N = reduce_rows(logits_NV).lse_N
        torch.testing.assert_close(found_N, logits_NV.logsumexp(1))
    except Exception as error:  # a compiler may raise any type
        warnings.warn(
            f"the loss runs without its kernels, which fail on {device}: {error}", stacklevel=2
        )
        return False
    return True
