"""What a token costs in a model: its products, and the tensors of a pass without gradients.

The model's weights may have no memory (``torch.device("meta")``).
"""

from __future__ import annotations

import math

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from kd.memory.work import ModelWork, count_forward_bytes, find_expert_share
from kd.models.adapters import find_expert_weights, has_adapters
from kd.models.layers import find_decoder_layers, read_layer_sizes
from kd.models.quantization.groups import choose_int4_group
from kd.models.quantization.rounding import find_rounded_layers

#: Rows in int4 are filled up to a multiple of this.
_INT4_TILE = 1024


def count_model_work(model: PreTrainedModel, vocabulary: int) -> ModelWork:
    """Count what a token costs in ``model``, whose weights may have no memory.

    Of the experts of a layer a token meets only those that its router picks.
    """
    config = model.config.get_text_config()
    experts = find_expert_weights(model)
    inside = {id(p) for layer in find_decoder_layers(model) for p in layer.parameters()}
    share = find_expert_share(lambda name: getattr(config, name, None))
    products = sum(
        parameter.numel() * (share if name in experts else 1.0)
        for name, parameter in model.named_parameters()
        if id(parameter) in inside and parameter.ndim >= 2
    )
    return ModelWork(
        products=round(products),
        attention=sum(map(measure_attention_width, find_decoder_layers(model))),
        head=config.hidden_size * vocabulary,
        vocabulary=vocabulary,
        stored=sum(parameter.numel() for parameter in model.parameters()),
        frozen=has_adapters(model),
    )


def count_weight_bytes(model: PreTrainedModel, item_bytes: int, quantization: str | None) -> int:
    """Bytes of the weights of ``model``, ``item_bytes`` a number; those of rounded layers, too."""
    whole = item_bytes * sum(parameter.numel() for parameter in model.parameters())
    if quantization is None:
        return whole
    shapes = [layer.weight.shape for layer in find_rounded_layers(model).values()]
    saved = (
        item_bytes * rows * width - _count_rounded_bytes(rows, width, item_bytes, quantization)
        for rows, width in shapes
    )
    return whole - sum(saved)


def count_shared_bytes(model: PreTrainedModel, item_bytes: int, parallel: str, ranks: int) -> int:
    """Bytes of the weights on rank 0 of ``ranks`` that share ``model``: it has the whole LM head.

    tensor divides all else. fsdp divides the layers, and has two of them whole while it gathers
    the next.
    """
    head = item_bytes * model.get_output_embeddings().weight.numel()
    layers = [_count_numbers(layer) for layer in find_decoder_layers(model)]
    divided = item_bytes * sum(layers)
    rest = item_bytes * _count_numbers(model) - divided
    if parallel == "tensor":
        return math.ceil((divided + rest - head) / ranks) + head
    return math.ceil(divided / ranks) + rest + 2 * item_bytes * max(layers, default=0)


def _count_numbers(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _count_rounded_bytes(rows: int, width: int, item_bytes: int, quantization: str) -> int:
    if quantization == "int8":
        return rows * (width + item_bytes)
    group = choose_int4_group(width)
    if group is None:
        return item_bytes * rows * width
    # torch's kernels want full tiles.
    width = -(-width // _INT4_TILE) * _INT4_TILE
    return rows * (width // 2 + 2 * item_bytes * width // group)


def estimate_forward_bytes(model: PreTrainedModel, tokens: int, item_bytes: int) -> int:
    """Bytes of the tensors of one layer in a pass without gradients over ``tokens``."""
    config = model.config.get_text_config()
    return count_forward_bytes(config.hidden_size, find_mlp_width(config), tokens * item_bytes)


def measure_attention_width(layer: nn.Module) -> int:
    """The width of all heads of a decoder layer: of what the last map of its attention reads.

    0 where its token mixer is no attention.
    """
    found = [0]
    for module in layer.modules():
        if "Attention" in type(module).__name__:
            widths = (getattr(each, "in_features", getattr(each, "nx", 0))
                      for each in module.children())  # fmt: skip
            found += [width for width in widths if width][-1:]
    return max(found)


def find_mlp_width(config: PreTrainedConfig) -> int:
    """The width of the widest MLP; four times that of the hidden states where none is named."""
    width: int = config.hidden_size
    return max(read_layer_sizes(config, "intermediate_size"), default=4 * width)
