"""Steps of whole matrices, for parameters of which each rank holds a part."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from kd.parallel.sharded_files import get_own, make_whole, take_part


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    store = f"file://{tmp_path / 'store'}"
    distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield distributed.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_state_of_weights_on_the_host_stays_there(mesh: DeviceMesh) -> None:
    """As with ``train.fsdp_offload``: the mesh is of GPUs, and the parts lie on the host."""
    whole = torch.arange(12.0).view(4, 3)
    weight = DTensor.from_local(whole.clone(), mesh, [Shard(0)], run_check=False)
    mesh._device_type = "meta"  # a GPU would take the part, and a CPU has none
    part = take_part(whole, weight)
    assert get_own(part).device.type == "cpu"
    mesh._device_type = "cpu"
    assert torch.equal(make_whole(part), whole)
    assert part.placements == weight.placements
    get_own(part).add_(1.0)
    assert whole[0, 0] == 0.0, "the part has memory of its own"
