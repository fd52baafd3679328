"""Find dead units: channels of a layer's MLP that no token of a batch activates.

A channel is an input of the projection back to the hidden width. Its activation is what the
nonlinearity, times the gate where there is one, gives. Mixtures of experts are left out: a token
meets few of their channels.

Shapes: C channels of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from kd.checks.verdict import Verdict, format_names
from kd.models.layers import find_decoder_layers, removing

#: A channel is dead if its activation stays below the first number over a batch. More than the
#: second share of a layer's channels are an alarm.
DEAD_ACTIVATION = 1e-6
DEAD_SHARE = 0.1
_REMEDY = (
    "These channels learn nothing: lower train.learning_rate, add train.warmup_steps, or lower "
    "train.weight_decay. A student cut out of its teacher may have inherited them."
)


@dataclass
class UnitWatch:
    """The largest magnitude of each channel (C,) so far, by the number of its layer."""

    largest: dict[int, Tensor] = field(default_factory=dict)

    def find_dead_shares(self) -> dict[str, float]:
        """Return the share of the channels of each layer that are dead."""
        return {
            f"layer {number}": float((most < DEAD_ACTIVATION).float().mean())
            for number, most in sorted(self.largest.items())
        }

    def observe(self, number: int, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Record the inputs (..., C) of ``module``, the projection of layer ``number``."""
        most = inputs[0].detach().abs().flatten(0, -2).amax(0).float()
        seen = self.largest.get(number)
        self.largest[number] = most if seen is None else torch.maximum(seen, most)


@contextmanager
def watching_units(student: PreTrainedModel) -> Iterator[UnitWatch]:
    """Watch the MLPs of ``student`` in the forward passes of the block."""
    watch = UnitWatch()
    handles = []
    width = student.config.get_text_config().hidden_size
    for number, layer in enumerate(find_decoder_layers(student)):
        projection = _find_projection(layer, width)
        if projection is not None:
            handles.append(projection.register_forward_pre_hook(partial(watch.observe, number)))
    with removing(handles):
        yield watch


def _find_projection(layer: nn.Module, width: int) -> nn.Module | None:
    """Return the projection from the widest inputs of ``layer`` to ``width``; None without one."""
    found = [
        (inputs, module)
        for name, module in layer.named_modules()
        if "expert" not in name
        for inputs, outputs in [_read_sizes(module)]
        if outputs == width and inputs > width
    ]
    return max(found, key=lambda each: each[0])[1] if found else None


def _read_sizes(module: nn.Module) -> tuple[int, int]:
    """The widths of a linear module's inputs and outputs; zeros for other modules."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if isinstance(module, Conv1D):  # the linear module of GPT-2
        return int(module.nx), int(module.nf)
    return 0, 0


def find_dead_layers(shares: dict[str, float]) -> list[str]:
    """Return the layers of which more than ``DEAD_SHARE`` is dead."""
    return [name for name, share in shares.items() if share > DEAD_SHARE]


def check_dead_units(shares: dict[str, float]) -> Verdict:
    """Make the verdict on the shares of dead units by layer."""
    over = find_dead_layers(shares)
    facts = {"shares": shares, "activation": DEAD_ACTIVATION}
    if not over:
        return Verdict("dead_units", True, "The units of the MLPs are alive.", facts=facts)
    shown = format_names([f"{name} ({shares[name]:.0%})" for name in over])
    message = (
        f"More than {DEAD_SHARE:.0%} of the MLP's channels stay below {DEAD_ACTIVATION:g} over an "
        f"evaluation batch in {shown}."
    )
    return Verdict("dead_units", False, message, _REMEDY, facts)
