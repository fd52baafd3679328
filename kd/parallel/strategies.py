"""How the ranks share the work of a student: ``train.strategy``.

    single   one rank, one device
    ddp      every rank holds the whole student; gradients are averaged over the ranks
    fsdp     every rank holds a part of each parameter, and gets the others when it needs them

Body, LM head and loss are one module, ``WholeLoss``, because torch's wrappers act in the forward
pass of the module that they wrap: whatever was computed outside of it would not be synchronised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class WholeLoss(nn.Module):
    """A function of all parameters in ``parts``, as one module."""

    def __init__(self, parts: Sequence[nn.Module], compute: Callable[..., Any]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self._compute = compute

    def forward(self, *inputs: Any) -> Any:
        """Return the loss of ``inputs``."""
        return self._compute(*inputs)


def replicate(loss: WholeLoss) -> DistributedDataParallel:
    """Let the gradients of ``loss`` become their mean over the ranks, as they are computed.

    The parameters of rank 0 are copied to all ranks.
    """
    names = [name for name, parameter in loss.named_parameters() if parameter.requires_grad]
    device = next(loss.parameters()).device
    return DistributedDataParallel(
        loss,
        device_ids=[torch.cuda.current_device()] if device.type == "cuda" else None,
        forward_sync_buffers=False,
        gradient_as_bucket_view=True,
        # An expert that no token of a step reaches has no gradient, for which DDP would wait.
        find_unused_parameters=any("experts" in name for name in names),
    )


def synchronising(loss: nn.Module, last: bool) -> AbstractContextManager[Any]:
    """Return the context of a micro-batch: gradients are exchanged in the ``last`` one alone."""
    if isinstance(loss, DistributedDataParallel) and not last:
        return loss.no_sync()
    return nullcontext()
