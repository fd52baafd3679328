"""What a token costs in a model: FLOP of its products, and bytes of a pass without gradients.

For a model whose layers have N parameters that a token meets, D hidden width, V vocabulary, A the
width of all heads of all layers, C tokens of context:

    forward   2 N + 4 A C / 2 for each token (causal attention sees half of the context), and 2 D V
    backward  twice that; once where the weights are frozen
    again     a forward pass of the layers that activation checkpointing recomputes

These are the 2 N D and 6 N D of Kaplan et al. 2020 (arXiv 2001.08361), with the attention and the
LM head apart. The model's weights may have no memory (``torch.device("meta")``).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from kd.models.adapters import find_expert_weights, has_adapters
from kd.models.layers import find_decoder_layers, read_layer_sizes
from kd.models.quantization.groups import choose_int4_group
from kd.models.quantization.rounding import find_rounded_layers

#: Widths of a layer's tensors that are in memory at once in a pass without gradients: of the
#: hidden states (the residual, its norm, queries, output) and of the MLP (gate, up, product).
_HIDDEN_COPIES = 4
_MLP_COPIES = 3
#: Rows in int4 are filled up to a multiple of this.
_INT4_TILE = 1024


@dataclass(frozen=True)
class ModelWork:
    """What one token costs in a model.

    ``products`` are the parameters of its layers that a token meets, ``attention`` is the width of
    all heads, summed over the layers, and ``head`` is D V. ``frozen`` says that adapters are
    trained and not these weights.
    """

    products: int
    attention: int
    head: int
    frozen: bool = False

    def count_forward(self, context: int) -> float:
        """FLOP of a token in a forward pass over rows of ``context`` tokens."""
        return self._count_body(context) + 2 * self.head

    def count_training(self, context: int, recomputed: float = 0.0) -> float:
        """FLOP of a token in a training; ``recomputed`` layers, as a share, run forward twice."""
        passes = 2 if self.frozen else 3
        return self._count_body(context) * (passes + recomputed) + 2 * self.head * passes

    def _count_body(self, context: int) -> int:
        return 2 * self.products + 2 * self.attention * context


def count_model_work(model: PreTrainedModel, vocabulary: int) -> ModelWork:
    """Count what a token costs in ``model``, whose weights may have no memory.

    Of the experts of a layer a token meets only those that its router picks.
    """
    config = model.config.get_text_config()
    experts = find_expert_weights(model)
    inside = {id(p) for layer in find_decoder_layers(model) for p in layer.parameters()}
    share = find_expert_share(config)
    products = sum(
        parameter.numel() * (share if name in experts else 1.0)
        for name, parameter in model.named_parameters()
        if id(parameter) in inside and parameter.ndim >= 2
    )
    return ModelWork(
        products=round(products),
        attention=sum(map(measure_attention_width, find_decoder_layers(model))),
        head=config.hidden_size * vocabulary,
        frozen=has_adapters(model),
    )


def count_weight_bytes(model: PreTrainedModel, item_bytes: int, quantization: str | None) -> int:
    """Bytes of the weights of ``model``, ``item_bytes`` a number; those of rounded layers, too."""
    whole = item_bytes * sum(parameter.numel() for parameter in model.parameters())
    if quantization is None:
        return whole
    saved = (
        item_bytes * rows * width - _count_rounded_bytes(rows, width, item_bytes, quantization)
        for rows, width in [layer.weight.shape for layer in find_rounded_layers(model).values()]
    )
    return whole - sum(saved)


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
    # The widest MLP; four times the width of the hidden states where none is named.
    mlp: int = max(read_layer_sizes(config, "intermediate_size"), default=4 * config.hidden_size)
    return tokens * item_bytes * (_HIDDEN_COPIES * config.hidden_size + _MLP_COPIES * mlp)


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


def find_expert_share(config: PreTrainedConfig) -> float:
    """The share of a layer's experts that a token meets; 1 without experts."""
    counts = ("num_local_experts", "num_experts", "n_routed_experts")
    picks = ("num_experts_per_tok", "experts_per_token", "moe_topk", "moe_k", "top_k_experts")
    count = next((n for name in counts if isinstance(n := getattr(config, name, None), int)), 1)
    picked = next((n for name in picks if isinstance(n := getattr(config, name, None), int)), 1)
    return min(picked / max(count, 1), 1.0)
