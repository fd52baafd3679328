"""Which device, which precision its matrix products run in, and how the loss scale of float16 fares."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kd.batches import Batch
from kd.errors import ConfigError, Problem, TrainingError
from kd.models import hidden_states


def pick_device() -> torch.device:
    """The first GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Hardware:
    """What the devices of a kind compute best in: ``precision`` of auto, and whether float32 products can use TF32."""

    name: str
    precision: str
    tf32: bool


CPU = Hardware("CPU", "fp32", tf32=False)
#: GPUs from a compute capability on. Before Volta there are no matrix units: half precision would only lose range.
GPUS = {
    (8, 0): Hardware("Ampere and later", "bf16", tf32=True),
    (7, 0): Hardware("V100, T4", "fp16", tf32=False),
    (0, 0): Hardware("before Volta", "fp32", tf32=False),
}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def hardware_of(device: torch.device) -> Hardware:
    """The row of the table that ``device`` belongs to."""
    if device.type != "cuda":
        return CPU
    capability = torch.cuda.get_device_capability()
    return next(hardware for since, hardware in GPUS.items() if capability >= since)


@dataclass(frozen=True)
class Precision:
    """What the matrix products of the forward and backward pass run in; weights and optimiser stay in float32."""

    device: str
    dtype: torch.dtype

    @classmethod
    def choose(cls, name: str, device: torch.device) -> Precision:
        """The precision called ``name`` on ``device``, auto by its hardware.

        Raises ``ConfigError`` for fp16 on a CPU.
        """
        if name == "fp16" and device.type == "cpu":
            raise ConfigError(
                [
                    Problem(
                        "/train/precision",
                        "fp16 needs a GPU, but the device of this run is cpu.",
                        "Set train.precision to auto, bf16 or fp32, or run where torch sees a GPU.",
                    )
                ]
            )
        return cls(device.type, _DTYPES[hardware_of(device).precision if name == "auto" else name])

    @property
    def scales_loss(self) -> bool:
        """float16 alone needs loss scaling: its gradients underflow."""
        return self.dtype == torch.float16

    def autocast(self) -> AbstractContextManager[Any]:
        """The context for a forward pass."""
        return nullcontext() if self.dtype == torch.float32 else torch.autocast(self.device, self.dtype)


def set_tf32(device: torch.device, wanted: bool) -> None:
    """Let float32 products have TF32's ten bits, if ``wanted`` and where the device has them.

    It is torch's own switch, for the whole process, and training's alone: who needs all of float32 says so
    (``float32_products``).
    """
    torch.set_float32_matmul_precision("high" if wanted and hardware_of(device).tf32 else "highest")


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


# ---------------------------------------------------------------------- the loss scale

#: So many falls of the loss scale within so many steps are an alarm; one now and then is how the scale is found.
FALLS, WITHIN = 4, 20
#: Gradients that overflow even at this scale are above 6e8: they no longer come from a loss that can be trained.
LEAST_SCALE = 1e-4


@dataclass
class ScalerWatch:
    """What became of the loss scale so far; all of it is JSON (``dataclasses.asdict``), for a checkpoint.

    ``skipped`` steps were not taken because a gradient overflowed; ``falls`` are the recent ones among them.
    """

    skipped: int = 0
    falls: list[int] = field(default_factory=list)

    def update(self, scaler: torch.amp.GradScaler, step: int) -> bool:
        """Let ``scaler`` set the next scale after its ``step``; returns whether that step was taken.

        Raises ``TrainingError`` where the scale has fallen to nothing.
        """
        before = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() >= before:  # it falls where the gradients overflowed and the step was skipped
            return True
        self.skipped += 1
        self.falls = [each for each in self.falls if each > step - WITHIN] + [step]
        if scaler.get_scale() < LEAST_SCALE:
            raise TrainingError(
                f"At step {step} the gradients overflow float16 even with the loss scaled by {before:.2g}.",
                "The last checkpoint is whole. Lower train.learning_rate, or set train.precision to fp32.",
            )
        return False

    def alarm(self) -> str | None:
        """Says that the scale falls fast; once for each time it does."""
        if len(self.falls) < FALLS:
            return None
        first, last = self.falls[0], self.falls[-1]
        self.falls = []
        return (
            f"The loss scale of float16 was halved {FALLS} times from step {first} to {last}: gradients overflow, and "
            f"{self.skipped} steps were skipped so far. Lower train.learning_rate, or set train.precision to fp32."
        )
