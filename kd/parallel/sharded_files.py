"""Tensors of which every rank holds a part, in safetensors files that any number of ranks reads.

The files are those of ``torch.distributed.checkpoint`` with its Hugging Face writer: each rank
writes one file with its parts, whose headers say where in the whole tensors they lie. Plain
safetensors files in the same folder are read too. No file is a pickle.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import Size, Tensor, dtype
from torch.distributed.checkpoint import hf_storage
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from kd.parallel.group import Group


def make_whole(tensor: Tensor) -> Tensor:
    """Return all of ``tensor``; where ranks hold parts of it, all of them must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def get_own(tensor: Tensor) -> Tensor:
    """Return what this rank holds of ``tensor``, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def take_part(whole: Tensor, like: Tensor) -> Tensor:
    """Return the part of ``whole``, which every rank has, that lies where ``like`` does.

    Both have one shape.
    """
    if not isinstance(like, DTensor):
        return whole
    place = (like.device_mesh, like.placements)
    shape, offset = compute_local_shape_and_global_offset(whole.shape, *place)
    own = whole[tuple(slice(at, at + size) for at, size in zip(offset, shape, strict=True))]
    # Not ``distribute_tensor``: it would move the part to the mesh's GPU, also beside a parameter
    # that lies on the host.
    part = torch.empty_like(like, dtype=whole.dtype, requires_grad=False)
    get_own(part).copy_(own)
    return part


def write_shards(folder: Path, tensors: dict[str, Tensor], group: Group) -> None:
    """Write ``tensors`` into ``folder``, which exists. All ranks of ``group`` call it.

    Raises the error of the first rank that failed, on every rank.
    """
    # The writer would pickle anything else.
    assert all(isinstance(each, Tensor) for each in tensors.values())
    writer = hf_storage.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        save(dict(tensors), storage_writer=writer, process_group=group.channel)
    except CheckpointException as error:
        _, (first, _) = min(error.failures.items())
        raise first from error


def list_stored(folder: Path) -> dict[str, tuple[Size, dtype]]:
    """List the shape and the type of every tensor in ``folder``."""
    metadata = hf_storage.HuggingFaceStorageReader(str(folder)).read_metadata()
    return {
        name: (each.size, each.properties.dtype)
        for name, each in metadata.state_dict_metadata.items()
        if isinstance(each, TensorStorageMetadata)
    }


def fill_tensors(folder: Path, tensors: dict[str, Tensor], group: Group) -> None:
    """Fill ``tensors`` from ``folder`` in place, each rank its own parts. All ranks call it."""
    with warnings.catch_warnings():
        # torch tells a process without others that it is alone.
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        reader = hf_storage.HuggingFaceStorageReader(str(folder))
        load(dict(tensors), storage_reader=reader, no_dist=group.alone)
