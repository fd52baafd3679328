"""Activation checkpointing: the backward pass recomputes what decoder layers do not keep.

A group of consecutive layers is one checkpoint: of its forward pass only the hidden states that
enter it are kept. ``none`` keeps the activations of all n layers. ``full`` keeps n hidden states,
and the activations of one layer while it is recomputed. ``sqrt`` keeps about sqrt(n) of both. A
number k drops the activations of every k-th layer. All results stay the same, bit for bit: the
random state of dropout is stored and set again.

Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost (arXiv 1604.06174).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from kd.config.train import Checkpointing
from kd.errors import ModelError, format_first_line
from kd.memory.step_bytes import compute_group_sizes
from kd.models.layers import compute_hidden_states, find_decoder_layers, is_hollow


def checkpoint_activations(
    student: PreTrainedModel, how: Checkpointing, own: Sequence[nn.Module] | None = None
) -> None:
    """Let ``student``'s layers checkpoint their activations in training.

    They are all of them, or the consecutive layers ``own``. Nothing else of the model changes.
    Raises ``ModelError``, with the model as it was, where it has no such layers or its results
    would change; those of a model without values are not known.
    """
    if how == "none":
        return
    layers = find_decoder_layers(student)
    if not getattr(student, "supports_gradient_checkpointing", True) or not layers:
        raise _make_refusal(student, how, "does not support it")
    if how == "sqrt" and getattr(student.config, "layerdrop", 0.0) > 0:
        raise _make_refusal(
            student, how, "drops layers at random (layerdrop), which a group of layers cannot"
        )
    hollow = is_hollow(student)
    before = [] if hollow else _run_probe(student, layers)
    for group in group_layers(layers if own is None else list(own), how):
        together = _CheckpointGroup(group)
        # In place, so that the parameters of the layers keep their names.
        for place, layer in enumerate(group):
            layer.forward = _CheckpointedForward(together, place)  # type: ignore[method-assign]
    if not hollow and (problem := _find_difference(student, layers, before)) is not None:
        for layer in layers:
            layer.__dict__.pop("forward", None)
        raise _make_refusal(student, how, problem)


def group_layers(layers: list[nn.Module], how: Checkpointing) -> list[list[nn.Module]]:
    """The layers of each checkpoint; for a number n, the first of every n layers.

    Those of a group are computed together, in the call of the last one.
    """
    if how == "none":
        return []
    if how == "sqrt":
        size = compute_group_sizes(len(layers), how)[0]
        return [layers[start : start + size] for start in range(0, len(layers), size)]
    return [[layer] for layer in layers[:: 1 if isinstance(how, str) else how]]


def _make_refusal(student: PreTrainedModel, how: Checkpointing, why: str) -> ModelError:
    return ModelError(
        f"train.gradient_checkpointing is {how}, but student.model, a {type(student).__name__}, "
        f"{why}.",
        "Set train.gradient_checkpointing to none, or use another student.",
    )


# ---------------------------------------------------------------------- a group of layers


#: The positional and the named arguments of a layer's ``forward``, after its hidden states.
Call = tuple[tuple[Any, ...], Mapping[str, Any]]


@dataclass
class _CheckpointGroup:
    """Consecutive layers as one checkpoint, and their arguments in the present pass."""

    layers: list[nn.Module]
    calls: list[Call] = field(default_factory=list)


@dataclass
class _CheckpointedForward:
    """The ``forward`` of one layer of a group.

    The model calls one layer after the other. All but the last of a group only store their
    arguments and return the hidden states that entered; the last one computes the whole group. This
    is an object and not a closure, because a copy of the model must refer to its own layers.
    """

    group: _CheckpointGroup
    place: int

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        layers = self.group.layers
        calls = self.group.calls
        layer = layers[self.place]
        if not (layer.training and torch.is_grad_enabled()):
            return type(layer).forward(layer, hidden, *args, **kwargs)
        if self.place == 0:
            # A pass that an error cut short may have left some.
            calls.clear()
        calls.append((args, kwargs))
        if self.place < len(layers) - 1:
            return hidden
        whole = tuple(calls)
        calls.clear()
        return checkpoint(_run_layers, hidden, layers, whole, use_reentrant=False)


def _run_layers(hidden: Tensor, layers: list[nn.Module], calls: tuple[Call, ...]) -> Any:
    for layer, (args, kwargs) in zip(layers, calls, strict=True):
        hidden = type(layer).forward(layer, hidden, *args, **kwargs)
    return hidden


# ---------------------------------------------------------------------- does it change the numbers?


def _find_difference(
    student: PreTrainedModel, layers: list[nn.Module], before: list[Tensor]
) -> str | None:
    """How the checkpointed model differs from ``before`` on a few tokens; None if it does not."""
    try:
        after = _run_probe(student, layers)
    # A model may raise anything when it gets back hidden states that it did not make.
    except Exception as error:
        return f"fails with it ({format_first_line(error)})"
    one, other = before[0], after[0]
    if not torch.equal(one, other):
        distance = float((one - other).abs().max()) if one.shape == other.shape else math.inf
        return f"computes something else with it (hidden states differ by {distance:.3g})"
    # A GPU may add up a gradient in another order each time.
    if not all(
        torch.allclose(*pair, rtol=1e-3, atol=1e-6)
        for pair in zip(before[1:], after[1:], strict=True)
    ):
        return "has other gradients with it"
    return None


def _run_probe(student: PreTrainedModel, layers: list[nn.Module]) -> list[Tensor]:
    """Hidden states of a few tokens in training mode, and a gradient of the first layer.

    Random state, mode and gradients of the student stay as they were.
    """
    training = student.training
    device = student.device
    trained = [parameter for parameter in layers[0].parameters() if parameter.requires_grad][:1]
    size = student.config.get_text_config().vocab_size
    tokens_BL = torch.arange(8, device=device).remainder(size)[None]
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
        torch.manual_seed(0)
        try:
            hidden_BLD = compute_hidden_states(student.train(), tokens_BL)
            total = hidden_BLD.square().sum()
            gradients = torch.autograd.grad(total, trained, allow_unused=True) if trained else ()
        finally:
            student.train(training)
    return [hidden_BLD.detach(), *(each for each in gradients if each is not None)]
