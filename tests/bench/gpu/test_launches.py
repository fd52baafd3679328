"""The launches and waits of the hot path do not grow. They are counted on a CPU.

Each bound is the count of today. A change that lowers a count lowers its bound too.
"""

from __future__ import annotations

import importlib.util
import os
from collections import Counter

import pytest
import torch

from bench.gpu.launches import count_capture, count_training, render
from bench.support.launches import DeviceWork, as_on_a_gpu, count_device_work
from bench.support.paths import ROOT

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off beside a GPU"),
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None and not os.environ.get("CI"),
        reason="needs triton",
    ),
]
#: Launches and waits of today.
CAPTURE = {
    "capture: a chunk, threshold": (427, 17),
    "capture: a chunk, tempered": (152, 4),
    "capture: a chunk, topk": (20, 0),
    "capture: a chunk, dense": (17, 0),
    "capture: a chunk, hidden": (20, 0),
    "capture: a chunk, threshold, positions of 4 sequences": (476, 17),
}
TRAINING = {
    "loss: a chunk with records": (92, 0),
    "training: a layer of the student": (99, 0),
    "training: a micro-batch, without its layers": (272, 1),
    "training: a micro-batch of packed rows, waits alone": (0, 2),
    "training: a step, without its micro-batches": (21, 2),
}


def require_no_more(counts: dict[str, DeviceWork], bounds: dict[str, tuple[int, int]]) -> None:
    assert counts.keys() == bounds.keys()
    for what, (launches, waits) in bounds.items():
        found = counts[what]
        assert found.launches.total() <= launches, (what, found.launches)
        assert found.waits.total() <= waits, (what, found.waits)


def require_printed(counts: dict[str, DeviceWork]) -> None:
    """The page has the rows that the command prints."""
    page = (ROOT / "docs/benchmarks/gpu.md").read_text(encoding="utf-8")
    lines = render(counts).splitlines()
    assert len(lines) == len(counts) + 2
    for line in lines:
        assert line in page


@pytest.mark.long
def test_a_chunk_of_a_capture_launches_and_waits_no_oftener() -> None:
    counts = count_capture()
    require_no_more(counts, CAPTURE)
    require_printed(counts)


@pytest.mark.long
def test_a_micro_batch_and_a_step_launch_and_wait_no_oftener() -> None:
    counts = count_training()
    require_no_more(counts, TRAINING)
    require_printed(counts)
    kernels = counts["loss: a chunk with records"].launches
    assert kernels["_reduce_rows_kernel"] == kernels["_write_gradient_kernel"] == 1


def test_what_waits_is_seen() -> None:
    values_N = torch.arange(6.0)
    mask_N = values_N > 2
    ids_N = torch.tensor([1, 2])
    waits = {
        "item": values_N[0].item,
        "float": lambda: float(values_N.sum()),
        "bool": lambda: bool(mask_N.all()),
        "nonzero": mask_N.nonzero,
        "where": lambda: torch.where(mask_N),
        "index by a mask": lambda: values_N[mask_N],
        "write by a mask": lambda: values_N.clone().__setitem__(mask_N, 1.0),
        "masked_select": lambda: values_N.masked_select(mask_N),
        "unique": values_N.unique,
        "equal": lambda: torch.equal(values_N, values_N),
        "repeat_interleave": lambda: ids_N.repeat_interleave(ids_N),
        "tolist": values_N.tolist,
        "cpu": values_N.cpu,
        "tensor": lambda: torch.tensor([1.0, 2.0]),
        "new_tensor": lambda: values_N.new_tensor([1.0]),
    }
    for name, run in waits.items():
        assert count_device_work(run).waits.total() == 1, name


def test_what_does_not_wait_is_no_wait() -> None:
    values_NK = torch.arange(6.0).view(2, 3)
    ids_N = torch.tensor([1, 1])

    def run() -> None:
        values_NK[:, 1:].T.unsqueeze(0)
        values_NK[ids_N]
        ids_N.repeat_interleave(ids_N, output_size=2)
        torch.empty(3)
        torch.tensor(())

    work = count_device_work(run)
    assert not work.waits
    # Views and memory launch nothing.
    assert work.launches == Counter(index=1, repeat_interleave=1, index_select=1)


def test_an_operation_in_the_backward_pass_counts() -> None:
    values_N = torch.ones(3, requires_grad=True)
    work = count_device_work(lambda: values_N.exp().sum().backward())
    assert work.launches["exp"] == 1 and work.launches["mul"] == 1


def test_afterwards_a_tensor_is_on_the_cpu_again() -> None:
    with as_on_a_gpu():
        assert torch.ones(1).is_cuda
    assert not torch.ones(1).is_cuda
