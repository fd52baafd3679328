"""Wide records on their way to the GPU: in pinned memory of little waste, and beside its work.

Tests that leave something out show that the simulated GPU would see it missing.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.support.small.caches import make_records, make_sequences
from cache.codec import Codec
from kd.pipeline import run_stages
from kd.progress import Event, Monitor
from kd.text import batches
from kd.text.batches import Batch, make_batch
from kd.text.steps.pinned import find_copy_stream
from kd.training.preparing import student
from tests.support.simulated_gpu.streams import WAITS, CudaMisused
from tests.support.simulated_gpu.tensors import SimulatedTensor
from tests.system.simulated.on_the_device.jobs import make_job

# Libraries warn on a GPU of what they do not on a CPU.
pytestmark = pytest.mark.filterwarnings("ignore")

GPU = torch.device("cuda", 0)
VOCABULARY = 300
WIDE = {"dense": "logprobs", "hidden": "hidden", "topk": "top_ids"}


@pytest.fixture(autouse=True)
def small_is_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of a few hundred bytes are as if they had a megabyte."""
    monkeypatch.setattr(batches, "WIDE_BYTES", 100)


def make(profile: str) -> Batch:
    """Make a batch whose records have a wide column."""
    options = {"topk": {"k": 5}, "dense": {"bits": 16}, "hidden": {"bits": 16}}
    sequences = make_sequences(0, 6, 16, VOCABULARY)
    codec = Codec(profile, vocabulary_size=VOCABULARY, **options[profile])
    return make_batch(sequences, make_records(0, sequences.positions, codec))


@pytest.mark.parametrize("profile", WIDE)
def test_wide_columns_waste_little_pinned_memory(profile: str) -> None:
    batch = make(profile)
    pinned = batch.pin()
    assert batch.columns is not None
    for name, pieces in pinned.pieces.items():
        assert all(each.is_pinned() for each in pieces)
        size = batch.columns[name].nbytes
        assert sum(each.nbytes for each in pieces) == size
        assert sum(1 << (each.nbytes - 1).bit_length() for each in pieces) <= size * 16 / 15 + 1
    assert {name for name, each in batch.columns.items() if each.ndim > 1} == set(pinned.pieces)
    assert WIDE[profile] in pinned.pieces


def test_small_columns_are_pinned_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    pinned = make("dense").pin()
    assert not pinned.pieces and pinned.teacher is not None
    assert all(each.is_pinned() for each in pinned.teacher.values())


@pytest.mark.parametrize("profile", WIDE)
def test_wide_columns_come_while_the_device_computes(profile: str) -> None:
    batch = make(profile)
    pinned = batch.pin()
    stream = find_copy_stream(GPU, "records")
    before = WAITS.total()
    moved = pinned.to(GPU)
    assert WAITS.total() == before
    assert not stream.query(), "they are on their way"
    assert moved.teacher is not None and batch.columns is not None
    assert stream.query(), "the device has waited for them"
    assert WAITS.total() == before, "and the host has not"
    assert moved.teacher.keys() == batch.columns.keys()
    for name, column in batch.columns.items():
        assert moved.teacher[name].dtype == column.dtype
        assert torch.equal(moved.teacher[name].cpu(), column)


def test_columns_that_have_not_arrived_would_be_seen() -> None:
    batch = make("dense")
    moved = batch.pin().to(GPU)
    assert moved.columns is not None and batch.columns is not None
    assert not torch.equal(moved.columns["logprobs"].cpu(), batch.columns["logprobs"])


def test_a_batch_may_be_dropped_while_its_columns_come(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = make("dense").pin().to(GPU)
    del moved
    torch.cuda.synchronize()
    monkeypatch.setattr(SimulatedTensor, "record_stream", lambda *_: None)
    moved = make("dense").pin().to(GPU)
    del moved
    with pytest.raises(CudaMisused, match="record_stream"):
        torch.cuda.synchronize()


def test_batches_that_the_host_has_no_room_for_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(student, "read_memory_bytes", lambda: 2**20)
    events: list[Event] = []
    config = make_job(cache={"profile": "dense"}, train={"max_steps": 1})
    run_stages(config, tmp_path / "home", tmp_path / "run", Monitor(events.append))
    warnings = [each.data["message"] for each in events if each.type == "warning"]
    assert any("are kept in this host's memory" in each for each in warnings), warnings
