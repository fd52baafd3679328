"""Choose the device and the precision of its matrix products, and watch the loss scale of float16.

Shapes: B sequences, L positions of a sequence, N positions with a target, D hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kd.errors import ConfigError, TrainingError
from kd.models.layers import compute_hidden_states
from kd.text.batches import Batch


def pick_device() -> torch.device:
    """Return the first GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def name_device(device: torch.device) -> str:
    """Return the name of a GPU, or "cpu" with the number of torch's threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} threads"


@dataclass(frozen=True)
class Hardware:
    """A kind of device: the precision of "auto", and whether float32 products can use TF32."""

    name: str
    precision: str
    tf32: bool


CPU = Hardware("CPU", "fp32", tf32=False)
#: Kinds of GPU, by their lowest compute capability, newest first. GPUs before Volta have no matrix
#: units, so half precision would lose range and gain no speed.
GPUS = {
    (8, 0): Hardware("Ampere and later", "bf16", tf32=True),
    (7, 0): Hardware("V100, T4", "fp16", tf32=False),
    (0, 0): Hardware("before Volta", "fp32", tf32=False),
}
_DTYPES = {
    "bf16": torch.bfloat16,
    "bf16_pure": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}


def find_hardware(device: torch.device) -> Hardware:
    """Return the kind of hardware that ``device`` is."""
    if device.type != "cuda":
        return CPU
    capability = torch.cuda.get_device_capability()
    return next(hardware for since, hardware in GPUS.items() if capability >= since)


@dataclass(frozen=True)
class Precision:
    """The precision of the matrix products in the forward and backward pass.

    The state of the optimiser stays in float32, and so do the weights unless the job rounds them
    (bf16_pure).
    """

    device: str
    dtype: torch.dtype

    @classmethod
    def choose(cls, name: str, device: torch.device) -> Precision:
        """Return the precision called ``name``; "auto" depends on the hardware of ``device``.

        Raises ``ConfigError`` for fp16 on a CPU.
        """
        if name == "fp16" and device.type == "cpu":
            detail = "fp16 needs a GPU, but the device of this run is cpu."
            remedy = "Set train.precision to auto, bf16 or fp32, or run where torch sees a GPU."
            raise ConfigError.of_field("/train/precision", detail, remedy)
        known = find_hardware(device).precision if name == "auto" else name
        return cls(device.type, _DTYPES[known])

    @property
    def name(self) -> str:
        """Its name in a configuration: bf16, fp16 or fp32."""
        return next(name for name, dtype in _DTYPES.items() if dtype == self.dtype)

    @property
    def scales_loss(self) -> bool:
        """True if the loss must be scaled: only for float16, where gradients underflow."""
        return self.dtype == torch.float16

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context manager for a forward pass."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device, self.dtype)


def require_quantization(quantization: str, device: torch.device) -> None:
    """Raise ``ConfigError`` if weights in ``quantization`` cannot be used on ``device``."""
    if quantization == "int4" and find_hardware(device).precision != "bf16":
        raise ConfigError.of_field(
            "/teacher/quantization",
            "int4 needs a GPU of the Ampere generation or later, but the device of this run is "
            f"{name_device(device)}.",
            "Set it to int8, or run where torch sees such a GPU.",
        )


def choose_weight_dtype(stored: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the precision in which weights that are ``stored`` so are used on a GPU.

    It is their own where the GPU has matrix units for it. A GPU without bfloat16 (before Ampere)
    uses float16, which holds each bfloat16 number of its range exactly; one without either (before
    Volta) uses float32.
    """
    best = _DTYPES[find_hardware(device).precision]
    lacks_it = stored == torch.bfloat16 or best == torch.float32
    return best if stored.itemsize == 2 and lacks_it else stored


def round_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert the parameters of ``model`` to ``dtype``, in place.

    Buffers stay as they are: rotary frequencies need all of float32.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def allow_tf32(device: torch.device) -> None:
    """Let float32 products use TF32 if the device supports it.

    This switch of torch acts on the whole process and is meant for training. Code that needs all
    of float32 uses ``float32_products``.
    """
    torch.set_float32_matmul_precision("high" if find_hardware(device).tf32 else "highest")


@contextmanager
def float32_products() -> Iterator[None]:
    """Run matrix products in all of float32 inside this context.

    The 10 bits of TF32 would change a teacher's logits by hundredths of a nat.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def computing_in_float32(model: nn.Module) -> Iterator[None]:
    """Let ``model`` compute in float32 inside this context, whatever its parameters are kept in.

    They are kept beside their copies; those in float32 take no more memory.
    """
    kept = {parameter: parameter.data for parameter in model.parameters()}
    round_parameters(model, torch.float32)
    try:
        with float32_products():
            yield
    finally:
        for parameter, own in kept.items():
            parameter.data = own


def compute_target_hidden_states(forward: nn.Module, batch: Batch, precision: Precision) -> Tensor:
    """Return the hidden states (N, D) of positions with a target, in the dtype of ``precision``."""
    with precision.autocast():
        hidden_BLD = compute_hidden_states(forward, batch.tokens_BL, batch.packed)
    return hidden_BLD.flatten(0, 1)[batch.rows_N].to(precision.dtype)


# ---------------------------------------------------------------------- the loss scale

#: The loss scale of the first step.
FIRST_SCALE = 65536.0
#: The number of latest steps in which falls of the scale are counted. A single fall is normal: the
#: scaler finds the right scale by raising it until gradients overflow.
ALARM_STEPS = 20
#: The falls within these steps that are an alarm. Each is an overflow, and a skipped step.
ALARM_FALLS = 4
#: The loss scale at which training stops. Gradients that overflow here are above 6e8, too large for
#: any loss that can still be trained.
LEAST_SCALE = 1e-4


def make_scaler(precision: Precision) -> torch.amp.GradScaler:
    """Make the scaler of the loss; it does nothing if ``precision`` needs none."""
    return torch.amp.GradScaler(
        precision.device,
        init_scale=FIRST_SCALE,
        growth_factor=2.0,
        growth_interval=2000,
        backoff_factor=0.5,
        enabled=precision.scales_loss,
    )


def forget_unscaling(scaler: torch.amp.GradScaler) -> None:
    """Let ``scaler`` unscale gradients anew after a step that was broken off.

    Without this it would refuse: it does so once for each step that it takes.
    """
    # One that is not enabled has no such state.
    if scaler.is_enabled():
        scaler._per_optimizer_states.clear()


@dataclass
class ScalerWatch:
    """The history of the loss scale; its fields are JSON values, for a checkpoint.

    ``skipped`` counts the steps that were not taken because a gradient overflowed; ``falls`` are
    the numbers of the recent ones.
    """

    skipped: int = 0
    falls: list[int] = field(default_factory=list)

    def update(self, scaler: torch.amp.GradScaler, step: int) -> bool:
        """Let ``scaler`` choose the scale after ``step``, and return whether that step was taken.

        Raises ``TrainingError`` where the scale falls below ``LEAST_SCALE``.
        """
        before = scaler.get_scale()
        scaler.update()
        # The scale falls only where gradients overflowed, and then the step was skipped.
        if scaler.get_scale() >= before:
            return True
        self.skipped += 1
        self.falls = [each for each in self.falls if each > step - ALARM_STEPS] + [step]
        if scaler.get_scale() < LEAST_SCALE:
            raise TrainingError(
                f"At step {step} the gradients overflow float16 "
                f"even with the loss scaled by {before:.2g}.",
                "The last checkpoint is whole. Lower train.learning_rate, "
                "or set train.precision to fp32.",
            )
        return False

    def describe_alarm(self) -> str | None:
        """Return a warning if the scale fell ``ALARM_FALLS`` times lately; then count anew."""
        if len(self.falls) < ALARM_FALLS:
            return None
        first, *_, last = self.falls
        self.falls = []
        return (
            f"The loss scale of float16 fell {ALARM_FALLS} times "
            f"from step {first} to {last}: gradients overflow, and {self.skipped} steps "
            "were skipped so far. Lower train.learning_rate, or set train.precision to fp32."
        )
