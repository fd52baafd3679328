"""Matrix products of the layers in float8, on GPUs that have them: ``train.fp8``.

torchao multiplies in e4m3 (gradients of outputs in e5m2), each factor scaled by its largest
magnitude, and sums in float32. Weights, their gradients and the optimiser stay as they are, and so
do names and shapes in checkpoints. Micikevicius et al. 2022, arXiv 2209.05433.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from kd.errors import ConfigError
from kd.models.layers import find_decoder_layers
from kd.models.precision import name_device

#: The least compute capability with products in float8: Ada (RTX 40, L4, L40S) and Hopper.
CAPABILITY = (8, 9)
#: Widths must be multiples of this (cuBLASLt). Numbers of tokens are padded.
TILE = 16


def has_float8(device: torch.device) -> bool:
    """Whether ``device`` has products in float8."""
    return device.type == "cuda" and torch.cuda.get_device_capability() >= CAPABILITY


def require_float8(device: torch.device) -> None:
    """Raise ``ConfigError`` if ``device`` has no products in float8."""
    if has_float8(device):
        return
    raise ConfigError.of_field(
        "/train/fp8",
        "it needs a GPU of the Ada or Hopper generation or later, but the device of this run is "
        f"{name_device(device)}.",
        "Set it to false, or run where torch sees such a GPU.",
    )


def multiply_in_float8(student: PreTrainedModel, emulate: bool = False) -> list[str]:
    """Let the linear modules of the layers multiply in float8; returns their names.

    Modules with a width that is no multiple of 16 stay as they are, and so do experts that are not
    modules of their own. ``emulate`` rounds in the same way and multiplies in the precision at
    hand, on any device.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    found = []

    def suits(module: nn.Module, name: str) -> bool:
        sizes = (module.in_features, module.out_features) if isinstance(module, nn.Linear) else (1,)
        return all(size % TILE == 0 for size in sizes)

    # The gradient of a weight sums over the tokens, of which a pass may have any number.
    config = Float8LinearConfig(emulate=emulate, pad_inner_dim=True)
    for number, layer in enumerate(find_decoder_layers(student)):
        found += [
            f"layer {number}: {name}"
            for name, module in layer.named_modules()
            if isinstance(module, nn.Linear) and suits(module, name)
        ]
        convert_to_float8_training(layer, module_filter_fn=suits, config=config)
    return found
