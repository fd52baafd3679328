"""Which layers of a teacher are rounded, and how torchao rounds them.

Shapes: a linear layer has a weight (rows, width); groups of int4 are cut out of its rows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

import torch
from torch import nn
from transformers import PreTrainedModel, TorchAoConfig

from kd.config.extras import NO_QUANTIZER, require_torchao
from kd.models.precision import require_quantization
from kd.models.quantization.groups import choose_int4_group, read_quantization, read_smallest_group

#: The one packing whose products are kernels of torch itself. It exists only on CUDA.
_PACKING = "tile_packed_to_4d"


def find_rounded_layers(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return the linear layers that may be rounded, by path: all but the LM head."""
    head = model.get_output_embeddings()
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }


def read_widths(model: PreTrainedModel) -> dict[str, int]:
    """Return the input width of each layer of ``find_rounded_layers``, by path."""
    return {path: layer.in_features for path, layer in find_rounded_layers(model).items()}


def make_quantization_config(
    name: str, widths: Mapping[str, int], device: torch.device
) -> TorchAoConfig:
    """Return transformers' configuration that rounds linear layers, the LM head left out.

    ``name`` is that of a quantisation (``kd.models.quantization.groups``), ``widths`` the input
    widths of the layers by path. Products of int8 are computed in the dtype of the model. Raises
    ``ConfigError`` if torchao is missing, or ``device`` cannot compute with int4.
    """
    require_torchao(NO_QUANTIZER)
    require_quantization(read_quantization(name) or "", device)
    from torchao.quantization import FqnToConfig, Int4WeightOnlyConfig, Int8WeightOnlyConfig

    if name == "int8":
        return TorchAoConfig(Int8WeightOnlyConfig())
    smallest = read_smallest_group(name)
    chosen = OrderedDict(
        (path, Int4WeightOnlyConfig(group, int4_packing_format=_PACKING))
        for path, width in widths.items()
        if (group := choose_int4_group(width, smallest)) is not None
    )
    return TorchAoConfig(FqnToConfig(chosen))


def describe_plain_layers(model: PreTrainedModel, name: str) -> str | None:
    """Say how many layers of ``model`` the quantisation ``name`` leaves as they are.

    None if it rounds all of them.
    """
    if name in ("", "int8"):
        return None
    smallest = read_smallest_group(name)
    widths = read_widths(model).values()
    plain = [width for width in widths if choose_int4_group(width, smallest) is None]
    if not plain:
        return None
    return (
        f"{len(plain)} of {len(widths)} linear layers of the teacher stay in bfloat16, because no "
        f"group of int4 divides their input width ({', '.join(map(str, sorted(set(plain))))}): "
        f"a group has {smallest} numbers at least."
    )
