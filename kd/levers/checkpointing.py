"""Activation checkpointing: decoder layers forget their activations and compute them again in the backward pass.

A group of consecutive layers is one checkpoint: of its forward pass only the hidden states that enter it are kept. With
L layers, none keeps the activations of all; full keeps L hidden states and one layer's activations while it is
recomputed; sqrt keeps about sqrt(L) of both; n spares every n-th layer's. The numbers stay what they were, bit for
bit: the random state of dropout is kept and set again.

Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost (arXiv 1604.06174).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from kd.config.train import Checkpointing
from kd.errors import ModelError
from kd.models import decoder_layers, hidden_states


def checkpoint_activations(student: PreTrainedModel, how: Checkpointing) -> None:
    """Make ``student``'s layers checkpoint themselves while it trains; it is otherwise the model that it was.

    Raises ``ModelError``, and leaves the model alone, where it has no such layers or its numbers would change.
    """
    if how == "none":
        return
    layers = decoder_layers(student)
    if not getattr(student, "supports_gradient_checkpointing", True) or not layers:
        raise _refusal(student, how, "does not support it")
    if how == "sqrt" and getattr(student.config, "layerdrop", 0.0) > 0:
        raise _refusal(student, how, "drops layers at random (layerdrop), which a group of layers cannot")
    before = _probe(student, layers)
    for group in _groups(layers, how):
        _Group(group).install()
    if (problem := _difference(student, layers, before)) is not None:
        for layer in layers:
            layer.__dict__.pop("forward", None)
        raise _refusal(student, how, problem)


def group_sizes(count: int, how: Checkpointing) -> list[int]:
    """Layers in each checkpoint, of ``count`` layers."""
    if how == "none":
        return []
    if how == "sqrt":
        size = math.ceil(count / math.ceil(math.sqrt(count)))
        return [min(size, count - start) for start in range(0, count, size)]
    return [1] * (count if how == "full" else math.ceil(count / how))


def _groups(layers: list[nn.Module], how: Checkpointing) -> list[list[nn.Module]]:
    """The layers of each checkpoint; of n, the first of every n layers."""
    if how == "sqrt":
        size = group_sizes(len(layers), how)[0]
        return [layers[start : start + size] for start in range(0, len(layers), size)]
    return [[layer] for layer in layers[:: 1 if isinstance(how, str) else how]]


def _refusal(student: PreTrainedModel, how: Checkpointing, why: str) -> ModelError:
    return ModelError(
        f"train.gradient_checkpointing is {how}, but student.model, a {type(student).__name__}, {why}.",
        "Set train.gradient_checkpointing to none, or use another student.",
    )


# ---------------------------------------------------------------------- a group of layers


Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class _Group:
    """Layers that follow each other, as one checkpoint, and what they were called with in the pass that goes on."""

    layers: list[nn.Module]
    calls: list[Call] = field(default_factory=list)

    def install(self) -> None:
        """Put ourselves before the layers' own ``forward``; their parameters keep their names."""
        for place, layer in enumerate(self.layers):
            layer.forward = _Step(self, place)  # type: ignore[method-assign]


@dataclass
class _Step:
    """``forward`` of one layer of a group: an object and no closure, so that a copy of the model is whole.

    The model calls layer after layer. All but the last of a group only note what they were called with and hand on the
    hidden states that entered; the last computes them all.
    """

    group: _Group
    place: int

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        layers, calls = self.group.layers, self.group.calls
        layer = layers[self.place]
        if not (layer.training and torch.is_grad_enabled()):
            return type(layer).forward(layer, hidden, *args, **kwargs)
        if self.place == 0:
            calls.clear()  # also of a pass that an error cut short
        calls.append((args, kwargs))
        if self.place < len(layers) - 1:
            return hidden
        whole = tuple(calls)
        calls.clear()
        return checkpoint(_in_turn, hidden, layers, whole, use_reentrant=False)


def _in_turn(hidden: Tensor, layers: list[nn.Module], calls: tuple[Call, ...]) -> Any:
    for layer, (args, kwargs) in zip(layers, calls, strict=True):
        hidden = type(layer).forward(layer, hidden, *args, **kwargs)
    return hidden


# ---------------------------------------------------------------------- does it change the numbers?


def _difference(student: PreTrainedModel, layers: list[nn.Module], before: list[Tensor]) -> str | None:
    """What is wrong with the checkpointed model on a few tokens, if anything."""
    try:
        after = _probe(student, layers)
    except Exception as error:  # whatever a model does that finds other hidden states than it made
        return f"fails with it ({type(error).__name__}: {str(error).strip().partition(chr(10))[0]})"
    if not torch.equal(before[0], after[0]):
        return f"computes something else with it (hidden states differ by {_distance(before[0], after[0]):.3g})"
    # A GPU may add up a gradient in another order each time.
    if not all(torch.allclose(*pair, rtol=1e-3, atol=1e-6) for pair in zip(before[1:], after[1:], strict=True)):
        return "has other gradients with it"
    return None


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max()) if one.shape == other.shape else math.inf


def _probe(student: PreTrainedModel, layers: list[nn.Module]) -> list[Tensor]:
    """Hidden states of a few tokens in training mode, and their gradient for the first layer; no state is changed."""
    training, device = student.training, student.device
    trained = [parameter for parameter in layers[0].parameters() if parameter.requires_grad][:1]
    tokens_BT = torch.arange(8, device=device).remainder(student.config.get_text_config().vocab_size)[None]
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
        torch.manual_seed(0)
        try:
            hidden_BTD = hidden_states(student.train(), tokens_BT)
            gradients = torch.autograd.grad(hidden_BTD.square().sum(), trained, allow_unused=True) if trained else ()
        finally:
            student.train(training)
    return [hidden_BTD.detach(), *(each for each in gradients if each is not None)]
