"""How the ranks share the work of a student: ``train.strategy``.

    single   one rank, one device
    ddp      every rank holds the whole student; gradients are added over the ranks
    fsdp     every rank holds a part of each parameter, of its gradient and of the optimiser's
             state; a layer is whole on a rank only while it computes (FSDP2, ZeRO stage 3)
    hsdp     fsdp among the ranks of a host; each host holds all parts, and gradients are added
             over the hosts
    pipeline every rank holds some consecutive layers (kd/parallel/stages.py)

Body, LM head and loss are one module, ``WholeLoss``, because torch's wrappers act in the forward
pass of the module that they wrap: whatever was computed outside of it would not be synchronised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from kd.parallel.group import Group
from kd.parallel.sharded_files import make_whole
from kd.parallel.stages import StageLoss
from kd.parallel.values import receive_values

Result = TypeVar("Result")


class WholeLoss(nn.Module):
    """A module that has all parameters of a run in ``parts``, and computes what it is given."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, work: Callable[..., Result], *inputs: Any) -> Result:
        """Return ``work(*inputs)``, which may use every parameter."""
        return work(*inputs)


def replicate(loss: WholeLoss) -> DistributedDataParallel:
    """Let the gradients of ``loss`` become their sum over the ranks, as they are computed.

    The parameters and buffers of rank 0 are copied to all ranks.
    """
    names = [name for name, parameter in loss.named_parameters() if parameter.requires_grad]
    device = next(loss.parameters()).device
    replicas = DistributedDataParallel(
        loss,
        device_ids=[torch.cuda.current_device()] if device.type == "cuda" else None,
        forward_sync_buffers=False,
        gradient_as_bucket_view=True,
        # An expert that no token of a step reaches has no gradient, for which DDP would wait.
        find_unused_parameters=any("experts" in name for name in names),
    )
    # By itself it takes means: to undo that would round the share of a token in the loss.
    replicas.register_comm_hook(None, lambda _, bucket: _add_bucket(bucket))
    return replicas


def _add_bucket(bucket: Any) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda found: found.value()[0])


def shard(
    loss: WholeLoss,
    groups: Sequence[Sequence[nn.Module]],
    dtype: torch.dtype,
    device: torch.device,
    mesh_shape: tuple[int, ...],
    offload: bool = False,
) -> WholeLoss:
    """Let every rank keep a part of each parameter of ``loss``; it becomes a ``FSDPModule``.

    The values are those of rank 0. The layers of each of ``groups`` are gathered for their own
    forward and backward pass, and compute in ``dtype`` on ``device``. All other parameters, those
    of the embeddings and the LM head, are gathered for the whole pass and stay in their own type:
    the loss rounds the LM head itself. Gradients are summed in float32. ``mesh_shape`` is (ranks,),
    or (hosts, ranks of a host) for parts that each host has. With ``offload`` the parts, their
    gradients and what an optimiser keeps of them lie in the host's memory between the passes.
    """
    names = ("hosts", "ranks")[-len(mesh_shape) :]
    mesh = init_device_mesh(device.type, mesh_shape, mesh_dim_names=names)
    reduced = fsdp.MixedPrecisionPolicy(
        param_dtype=None if dtype.itemsize >= 4 else dtype,
        reduce_dtype=None if dtype.itemsize >= 4 else torch.float32,
        # As without FSDP, hidden states between the layers stay in float32.
        cast_forward_inputs=False,
    )
    hosted = fsdp.CPUOffloadPolicy(pin_memory=device.type == "cuda")
    place = hosted if offload else fsdp.OffloadPolicy()
    # One group at a time is whole on a rank, as in every pass.
    for layers in groups:
        for layer in layers:
            receive_values(layer, device)
        fsdp.fully_shard([*layers], mesh=mesh, mp_policy=reduced, offload_policy=place)
    receive_values(loss, device)
    # What lies outside of the layers keeps its own type, and is summed in float32 at least.
    narrow = any(each.dtype.itemsize < 4 for each in loss.parameters() if each.requires_grad)
    summed = torch.float32 if narrow else None
    outside = fsdp.MixedPrecisionPolicy(reduce_dtype=summed, cast_forward_inputs=False)
    fsdp.fully_shard(loss, mesh=mesh, mp_policy=outside, offload_policy=place)
    for each in loss.modules():
        if isinstance(each, fsdp.FSDPModule):
            # Sums, as those of ``replicate``.
            each.set_gradient_divide_factor(1.0)
            each.set_force_sum_reduction_for_comms(True)
    return loss


def synchronising(loss: nn.Module, last: bool) -> AbstractContextManager[Any]:
    """Return the context of a micro-batch: replicas exchange gradients in the ``last`` one alone.

    Sharded gradients are exchanged in each one, because whole ones of all parameters would take the
    memory that sharding saves. By hsdp that is among the ranks of a host.
    """
    if isinstance(loss, DistributedDataParallel) and not last:
        return loss.no_sync()
    if isinstance(loss, fsdp.FSDPModule):
        loss.set_requires_all_reduce(last)
    return nullcontext()


def is_sharded(loss: nn.Module) -> bool:
    """Whether the ranks hold parts of the parameters of ``loss``."""
    return isinstance(loss, fsdp.FSDPModule)


def call_whole(loss: nn.Module, work: Callable[..., Result], *inputs: Any) -> Result | None:
    """Return ``work(*inputs)``, without a backward pass to follow, where parameters are whole.

    In a pipeline the first input is the batch, and all stages but the last get None.
    """
    if isinstance(loss, StageLoss):
        return loss.call(work, *inputs)
    if not isinstance(loss, fsdp.FSDPModule):
        return work(*inputs)
    found: Result = loss(work, *inputs)
    reshard(loss)
    return found


def reshard(loss: nn.Module) -> None:
    """Let each rank keep its part alone after a pass that no backward pass follows."""
    if isinstance(loss, fsdp.FSDPModule):
        loss.reshard()


def collect_weights(module: nn.Module, group: Group) -> dict[str, Tensor]:
    """Return all parameters of ``module``, whole and in the host's memory; empty but on rank 0.

    What rank 0 lacks is sent by the first rank that has it.
    """
    found = {}
    own = dict(module.named_parameters())
    shapes = [[name, list(each.shape), str(each.dtype)[6:]] for name, each in own.items()]
    # Of each parameter of all ranks: the first rank that has it, shape and type.
    sources: dict[str, tuple[int, list[int], str]] = {}
    for rank, stage in enumerate(group.gather(shapes)):
        for name, shape, dtype in stage:
            sources.setdefault(name, (rank, shape, dtype))
    for name, (source, shape, dtype) in sources.items():
        # Where each rank has a part, all of them take part in making it whole.
        whole = make_whole(own[name].detach()) if name in own else None
        if group.leads and whole is not None:
            found[name] = whole.cpu()
        elif group.leads:
            found[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            dist.recv(found[name], source)
        elif group.rank == source and whole is not None:
            dist.send(whole.cpu().contiguous(), 0)
    return found
