"""Which device, and which precision its matrix products run in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kd.batches import Batch
from kd.models import hidden_states


def pick_device() -> torch.device:
    """The first GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Precision:
    """What the matrix products of the forward and backward pass run in; weights and optimiser stay in float32."""

    device: str
    dtype: torch.dtype

    @classmethod
    def choose(cls, name: str, device: torch.device) -> Precision:
        """auto = bfloat16 where the GPU has it (Ampere and later), float16 on older ones, float32 on a CPU."""
        if name == "auto":
            if device.type != "cuda":
                name = "fp32"
            else:
                name = "bf16" if torch.cuda.get_device_capability() >= (8, 0) else "fp16"
        torch.set_float32_matmul_precision("high")  # TF32 for what stays in float32, on GPUs that have it
        return cls(device.type, {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name])

    @property
    def scales_loss(self) -> bool:
        """float16 alone needs loss scaling: its gradients underflow."""
        return self.dtype == torch.float16

    def autocast(self) -> AbstractContextManager[Any]:
        """The context for a forward pass."""
        return nullcontext() if self.dtype == torch.float32 else torch.autocast(self.device, self.dtype)


@contextmanager
def float32_products() -> Iterator[None]:
    """Matrix products in all of float32: the ten bits of TF32 would cost a teacher's logits hundredths of a nat."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def target_hidden_states(forward: nn.Module, batch: Batch, precision: Precision) -> Tensor:
    """Hidden states (N, D) of the positions that have a target, in the dtype of the head's matrix products."""
    with precision.autocast():
        hidden_BTD = hidden_states(forward, batch.tokens_BT, batch.positions_BT)
    return hidden_BTD.flatten(0, 1)[batch.rows_N].to(precision.dtype)
