"""Optimisers that need whole matrices, for parameters of which each rank holds a part.

One parameter at a time is whole on every rank, with its gradient and its state. The optimiser steps
it as in one process, and each rank keeps its own part of what comes out. State of another shape
than the parameter, such as the factors of Adafactor, is whole on every rank.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import Optimizer

from kd.parallel.sharded_files import make_whole, take_part

#: A group of an optimiser as torch has it: its ``params``, its rate ``lr``, and its own fields.
ParameterGroup = dict[str, Any]


class WholeSteps(Optimizer):
    """``inner`` for parameters of which each rank holds a part; its groups are the same."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step of every parameter that has a gradient. All ranks call it."""
        assert closure is None, "the loop computes gradients itself"
        for group in self.param_groups:
            own = {key: value for key, value in group.items() if key != "params"}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    # Some optimisers count their steps in the group.
                    own = self._step_parameter(parameter, parameter.grad, {**group})
            group.update(own)

    def _step_parameter(
        self, parameter: Parameter, gradient: Tensor, group: ParameterGroup
    ) -> ParameterGroup:
        """Step one parameter, and return its group without parameters as the step left it."""
        whole = Parameter(make_whole(parameter.detach()))
        whole.grad = make_whole(gradient)
        state = {
            key: make_whole(value) if isinstance(value, Tensor) else value
            for key, value in self.state[parameter].items()
        }
        group["params"] = [whole]
        self.inner.param_groups = [group]
        self.inner.state = defaultdict(dict, {whole: state} if state else {})
        self.inner.step()
        parameter.copy_(take_part(whole.detach(), parameter))
        self.state[parameter] = {
            key: take_part(value, parameter) if _is_shaped_like(value, parameter) else value
            for key, value in self.inner.state[whole].items()
        }
        del group["params"]
        return group


def needs_whole_steps(groups: list[ParameterGroup]) -> bool:
    """Return whether some parameter of ``groups`` is in parts."""
    return any(isinstance(each, DTensor) for group in groups for each in group["params"])


def _is_shaped_like(value: Any, parameter: Parameter) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape
