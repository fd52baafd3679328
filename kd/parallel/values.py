"""Parameters that rank 0 alone has the values of, and how the other ranks get them.

Rank 0 reads or draws the student, and all others make a hollow one, whose parameters have a shape
and no memory. So no other rank ever holds the whole student, unless its strategy asks for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from kd.parallel.group import Group


def require_same_parameters(module: nn.Module, group: Group) -> None:
    """Raise ``ValueError`` unless ``module`` has the parameters and buffers of rank 0's."""
    named: Iterable[tuple[str, Tensor]] = (*module.named_parameters(), *module.named_buffers())
    own = [[name, str(each.dtype), [*each.shape]] for name, each in named]
    expected = group.share(own)
    if own != expected:
        different = [each for each in [*own, *expected] if each not in own or each not in expected]
        raise ValueError(f"rank {group.rank} and rank 0 have other parameters: {different[:3]}")


def allocate(module: nn.Module, device: torch.device) -> None:
    """Put all of ``module`` on ``device``, and give hollow parameters memory without values there.

    Parameters of which ranks hold parts stay where they are. One that two modules share stays one.
    """
    made: dict[Tensor, nn.Parameter] = {}
    for owner, name, parameter in _list_whole(module):
        if not parameter.is_meta:
            parameter.data = parameter.data.to(device)
            continue
        if parameter not in made:
            empty = torch.empty_like(parameter, device=device)
            made[parameter] = nn.Parameter(empty, parameter.requires_grad)
        setattr(owner, name, made[parameter])
    for buffer in module.buffers():
        buffer.data = buffer.data.to(device)


def receive_values(module: nn.Module, device: torch.device) -> None:
    """Give the whole parameters and the buffers of ``module`` the values of rank 0, on ``device``.

    All ranks call it. Parameters of which ranks hold parts already are left as they are.
    """
    allocate(module, device)
    parameters = dict.fromkeys(parameter for _, _, parameter in _list_whole(module))
    for tensor in (*parameters, *module.buffers()):
        dist.broadcast(tensor.detach(), 0)


def _list_whole(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Each parameter that is no part, with the modules that own it and its name there."""
    for owner in module.modules():
        for name, parameter in [*owner.named_parameters(recurse=False, remove_duplicate=False)]:
            if not isinstance(parameter, DTensor):
                yield owner, name, parameter
