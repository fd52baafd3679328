"""AdamW for weights in bfloat16 of which there is no copy in float32: it rounds stochastically.

A number of bfloat16 has 8 significant bits. Where it is rounded to the nearest one, a step below
1/512 of a weight is lost, and most steps of a training are. Here the step is taken in float32, and
its result becomes the number above or the one below, with the probability that makes their mean
exact. The state is float32. The random numbers are those of torch's generator, whose state is in
every checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch
from pytorch_optimizer.optimizer.utils import copy_stochastic
from torch import Tensor
from torch.nn import Parameter
from torch.optim import AdamW
from torch.optim.adamw import adamw

from kd.optim.whole_steps import ParameterGroup
from kd.parallel.sharded_files import get_own


class RoundedAdamW(AdamW):
    """torch's AdamW that rounds its steps stochastically if parameters are in bfloat16.

    One parameter at a time is in memory in float32 too. Others than bfloat16 are stepped as by
    ``AdamW``.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step of every parameter that has a gradient."""
        assert closure is None, "the loop computes gradients itself"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_parameter(parameter, parameter.grad, group)

    def _step_parameter(
        self, parameter: Parameter, gradient: Tensor, group: ParameterGroup
    ) -> None:
        state = self.state[parameter] or self._begin_state(parameter, group)
        wide = parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32))
        largest = [state["max_exp_avg_sq"]] if group["amsgrad"] else []
        beta1, beta2 = group["betas"]
        settings = {key: group[key] for key in ("amsgrad", "lr", "weight_decay", "eps")}
        adamw(
            [wide],
            [gradient.to(wide.dtype)],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            largest,
            [state["step"]],
            foreach=False,
            fused=bool(group["fused"]),
            beta1=beta1,
            beta2=beta2,
            maximize=False,
            **settings,
        )
        if wide.dtype != parameter.dtype:
            copy_stochastic(get_own(parameter.detach()), get_own(wide))

    def _begin_state(self, parameter: Parameter, group: ParameterGroup) -> dict[str, Tensor]:
        """An empty state in float32 or better, as ``AdamW`` makes it for such parameters."""
        state: dict[str, Tensor] = self.state[parameter]
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        # The fused kernel reads the count on the device.
        place = parameter.device if group["fused"] else torch.device("cpu")
        state["step"] = torch.zeros((), dtype=torch.float32, device=place)
        for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 3 if group["amsgrad"] else 2]:
            state[key] = torch.zeros_like(parameter, dtype=dtype)
        return state
