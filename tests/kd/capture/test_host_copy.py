"""Tensors reach the host as they are: packed into one buffer, or as they lie on a CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.support.small.caches import make_codec, make_identity
from kd.capture.host_copy import HostCopy, pack_tensors, unpack_arrays
from kd.capture.recording import SequenceStates
from kd.models.lm_head import LMHead
from kd.text.steps.pinned import copy_to_device
from tests.support.kd.samples import make_recorder

TENSORS = {
    "odd bytes": torch.arange(7, dtype=torch.uint8),
    "no rows": torch.zeros(0, 3),
    "whether": torch.tensor(True),
    "longs": torch.arange(6).view(3, 2).T,  # not contiguous
    "floats": torch.randn(5),
    "shorts": torch.arange(3, dtype=torch.int16),
    "doubles": torch.randn(2, 2, 2, dtype=torch.float64),
}


def same(found: dict[str, np.ndarray], tensors: dict[str, Tensor]) -> None:
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        expected = tensor.numpy()
        assert found[name].dtype == expected.dtype and found[name].shape == expected.shape
        np.testing.assert_array_equal(found[name], expected)


def test_a_packed_buffer_holds_each_tensor_at_a_multiple_of_its_width() -> None:
    packed, forms = pack_tensors(TENSORS)
    assert packed.nbytes == sum(tensor.nbytes for tensor in TENSORS.values())
    found = unpack_arrays(packed, forms)
    begin = packed.data_ptr()
    assert all((array.ctypes.data - begin) % array.itemsize == 0 for array in found.values())
    same(found, TENSORS)


def test_on_a_cpu_nothing_is_copied() -> None:
    copy = HostCopy.start(TENSORS)
    found = copy.wait()
    same(found, TENSORS)
    assert found["floats"].ctypes.data == TENSORS["floats"].data_ptr()
    assert copy.nbytes == sum(tensor.nbytes for tensor in TENSORS.values())
    values = np.arange(3.0)
    assert copy_to_device(values, torch.device("cpu")).data_ptr() == values.ctypes.data


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_copies_once_beside_its_other_work() -> None:
    device = torch.device("cuda")
    tensors = {name: tensor.to(device) for name, tensor in TENSORS.items()}
    copies = [HostCopy.start(tensors) for _ in range(3)]
    for tensor in tensors.values():
        tensor.zero_()  # the packed copy holds what was there before
    for copy in copies:
        same(copy.wait(), TENSORS)
    sent = copy_to_device(np.arange(3.0), device)
    assert sent.device.type == "cuda" and sent.tolist() == [0.0, 1.0, 2.0]


def count_waits(run: Callable[[], object]) -> int:
    """Count how often ``run`` waits for the device, as torch itself tells."""
    run()  # kernels are compiled, and memory is taken
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(each.message) for each in caught)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("profile", "most"), [("threshold", 17), ("tempered", 4), ("topk", 0)])
def test_a_gpu_is_waited_for_no_oftener_than_is_counted_on_a_cpu(profile: str, most: int) -> None:
    """``tests/bench/gpu/test_launches.py`` pins the same numbers."""
    options = {} if profile == "topk" else {"always_keep": (3,)}
    codec = make_identity(5000, codec=make_codec(profile, **options)).record_codec()
    weight_VD = torch.randn(5000, 64, device="cuda", dtype=torch.bfloat16)
    lm_head = LMHead(weight_VD, None, 1.0, None, 5000)
    recorder = make_recorder(lm_head, codec, 64, 5 if profile == "tempered" else 0)
    hidden_ND = torch.randn(40, 64, device="cuda", dtype=torch.bfloat16)
    states = SequenceStates(0, hidden_ND, torch.arange(40, device="cuda"), np.arange(40))
    with torch.no_grad():
        assert count_waits(lambda: recorder.read([states])) <= most
