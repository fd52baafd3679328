"""AdamW with a state of 8 bits a number, by torchao: pip install 'potstill[quantization]'.

Blocks of 256 numbers are stored as codes of a byte and one scale (Dettmers et al. 2022, arXiv
2110.02861). Import this module only if a job asks for it: torchao takes seconds to import.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torchao.optim import AdamW8bit
from torchao.optim.subclass_8bit import OptimState8bit

from kd.optim.state_size import BLOCK_NUMBERS
from kd.optim.whole_steps import ParameterGroup


class EightBitAdamW(AdamW8bit):
    """torchao's ``AdamW8bit`` with rates that are numbers, as schedules and checkpoints need them.

    torchao compiles its step; on a CPU it runs as it is written, so that no compiler is needed.
    """

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, block_size=BLOCK_NUMBERS, **settings)

    def add_param_group(self, param_group: ParameterGroup) -> None:
        """Add a group whose rate stays the number that it is."""
        rate = param_group.get("lr", self.defaults["lr"])
        super().add_param_group(param_group)
        self.param_groups[-1]["lr"] = rate

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take a step of every parameter that has a gradient."""
        assert closure is None, "the loop computes gradients itself"
        on_cpu = self.param_groups[0]["params"][0].device.type == "cpu"
        stance = torch.compiler.set_stance("force_eager") if on_cpu else nullcontext()
        # torchao's compiled step reads rates that are tensors.
        rates = [group["lr"] for group in self.param_groups]
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = torch.tensor(rate, dtype=torch.float32)
        try:
            with stance:
                super().step()
        finally:
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate


def join_state(parts: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Make a state of 8 bits from its plain tensors, for a parameter of ``dtype``.

    They are ``codes``, ``scale`` and ``qmap``, the values of the codes. Only the values of a signed
    state begin below 0.
    """
    qmap = parts["qmap"]
    signed = bool(qmap[0] < 0)
    return OptimState8bit(parts["codes"], parts["scale"], qmap, signed=signed, dtype=dtype)
