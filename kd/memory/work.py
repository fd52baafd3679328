"""The arithmetic of a job's work: FLOP, bytes that are moved, seconds and cost. Imports no torch.

For a model whose layers have N parameters that a token meets, D hidden width, V vocabulary, A the
width of all heads of all layers, C tokens of context:

    forward   2 N + 4 A C / 2 for each token (causal attention sees half of the context),
              2 D V for each position with a target
    backward  twice that; once where the weights are frozen
    again     a forward pass of the layers that activation checkpointing recomputes

Between memory and processor move the weights, the logits, the activations that are kept, the state
of the optimiser, and the gradient of the LM head's weight once more for each chunk of logits.

These are the 6 N D of Kaplan et al. 2020 (arXiv 2001.08361), with the attention and the LM head
apart. A phase takes the longer of two times, that of its FLOP and that of its bytes, and after it
that of copies to and from the host, each at a share of the device's rate, the utilisation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kd.memory.devices import DeviceRates

#: Share of a device's rate that a phase is expected to reach where no step of it was timed. Dense
#: transformers are trained at 0.3 to 0.5 of the rate (PaLM: 0.46, Chowdhery et al. 2022).
ASSUMED_UTILIZATION = 0.4
#: Times that the logits of a chunk are written or read, with and without their gradient.
_LOGIT_PASSES = {True: 4, False: 2}
#: Bytes of a logit.
_LOGIT_BYTES = 4
#: Bytes of a number of the gradient of the LM head's weight.
_GRADIENT_BYTES = 4
#: Widths of a layer's tensors that are in memory at once in a pass without gradients: of the
#: hidden states (the residual, its norm, queries, output) and of the MLP (gate, up, product).
_HIDDEN_COPIES = 4
_MLP_COPIES = 3


@dataclass(frozen=True)
class ModelWork:
    """What one token costs in a model.

    ``products`` are the parameters of its layers that a token meets, ``attention`` is the width of
    all heads, summed over the layers, ``head`` is D V, and ``stored`` counts all parameters.
    ``frozen`` says that adapters are trained and not these weights.
    """

    products: int
    attention: int
    head: int
    vocabulary: int
    stored: int
    frozen: bool = False


@dataclass(frozen=True)
class Pass:
    """One pass over ``tokens`` in rows of ``context`` tokens, of which ``targets`` are scored.

    ``micro_batches`` is how often the weights are read. ``recomputed`` is the share of the layers
    whose forward pass runs twice; ``saved_bytes`` are the activations that are kept for the
    backward pass of all tokens.
    """

    tokens: float
    targets: float
    context: int
    micro_batches: float
    trains: bool = False
    #: Chunks of logits of a micro-batch.
    chunks: int = 1
    recomputed: float = 0.0
    saved_bytes: float = 0.0
    #: Bytes that the optimiser reads and writes, in all steps.
    updated_bytes: float = 0.0
    #: Bytes of activations that go to the host's memory and come back.
    offloaded_bytes: float = 0.0


@dataclass(frozen=True)
class Work:
    """FLOP of products, bytes between memory and processor, and bytes between device and host.

    ``head_gradient`` are those of ``bytes`` that the gradient of the LM head's weight takes.
    """

    flops: float
    bytes: float
    head_gradient: float = 0.0
    transferred: float = 0.0

    @classmethod
    def of(cls, model: ModelWork, run: Pass, weight_bytes: int) -> Work:
        """Count the work of ``run``; ``weight_bytes`` are those of a number of the weights."""
        body = run.tokens * (2 * model.products + 2 * model.attention * run.context)
        head = run.targets * 2 * model.head
        backward = (1 if model.frozen else 2) if run.trains else 0
        reads = 1 + 2 * run.trains + run.recomputed
        gradient = 0.0
        if run.trains and not model.frozen:
            gradient = run.micro_batches * count_head_gradient_bytes(model.head, run.chunks)
        moved = (
            run.micro_batches * reads * model.stored * weight_bytes
            + run.targets * model.vocabulary * _LOGIT_BYTES * _LOGIT_PASSES[run.trains]
            + 2 * run.saved_bytes
            + run.updated_bytes
            + gradient
        )
        flops = body * (1 + backward + run.recomputed) + head * (1 + backward)
        return cls(flops, moved, gradient, 2 * run.offloaded_bytes)

    def seconds(self, rates: DeviceRates, dtype: str, tf32: bool, utilization: float) -> float:
        """The time on a device of these ``rates`` at the share ``utilization`` of them."""
        products = self.flops / rates.find_rate(dtype, tf32)
        own = max(products, self.bytes / rates.bandwidth)
        # Copies to and from the host are in the order of the other work, not beside it.
        return (own + self.transferred / rates.link) / utilization


def count_head_gradient_bytes(numbers: int, chunks: int) -> int:
    """Count the bytes that the gradient of an LM head's weight of ``numbers`` moves, in float32.

    The first chunk of logits writes it, every other one reads and writes it, and the backward pass
    scales it. The least is that of one chunk.
    """
    return _GRADIENT_BYTES * numbers * (1 + 2 * (chunks - 1) + 2)


def compute_cost(seconds: float, price: float | None) -> float | None:
    """The cost of ``seconds`` at ``price`` an hour, in the currency of the price."""
    return None if price is None else seconds / 3600 * price


def count_forward_bytes(width: int, inner: int, token_bytes: int) -> int:
    """Bytes of the tensors of one layer in a pass without gradients.

    ``width`` is that of the hidden states and ``inner`` that of the MLP; ``token_bytes`` are the
    tokens times the bytes of a number.
    """
    return token_bytes * (_HIDDEN_COPIES * width + _MLP_COPIES * inner)


def find_expert_share(find: Callable[[str], Any]) -> float:
    """The share of a layer's experts that a token meets; 1 without experts.

    ``find`` returns a field of the model's configuration, or None.
    """
    counts = ("num_local_experts", "num_experts", "n_routed_experts")
    picks = ("num_experts_per_tok", "experts_per_token", "moe_topk", "moe_k", "top_k_experts")
    count = next((n for name in counts if isinstance(n := find(name), int)), 1)
    picked = next((n for name in picks if isinstance(n := find(name), int)), 1)
    return min(picked / max(count, 1), 1.0)
