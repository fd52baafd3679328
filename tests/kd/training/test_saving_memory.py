"""A checkpoint is written without a second copy of its tensors, and names itself in its errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kd.errors import OutOfMemory
from kd.memory.auto_batch import saving_errors
from kd.training.saved.tensor_file import write_tensors
from tests.support.kd.memory_script import run_memory_script

TENSORS = {
    "matrix": torch.randn(3, 5),
    "turned": torch.randn(4, 6, dtype=torch.float64).t(),
    "cut": torch.randn(6, 8)[::2, 1:3],
    "number": torch.tensor(3.0),
    "half": torch.randn(7).bfloat16(),
    "counts": torch.arange(5),
    "generator": torch.get_rng_state(),
    "empty": torch.empty(0, 3),
    "flags": torch.tensor([True, False, True]),
    "größe": torch.randn(2),
    # More than one block.
    "long": torch.randn(2**23 + 3, 2).half(),
    "long and turned": torch.randn(3, 2**21 + 5).t(),
}


def test_what_is_written_is_what_the_library_reads(tmp_path: Path) -> None:
    write_tensors(tmp_path / "file", TENSORS)
    found = load_file(tmp_path / "file")
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_of_one_dtype_the_bytes_are_those_of_the_library(tmp_path: Path) -> None:
    tensors = {
        name: tensor.contiguous()
        for name, tensor in TENSORS.items()
        if tensor.dtype == torch.float32 and name.isascii()
    }
    write_tensors(tmp_path / "ours", tensors)
    save_file(tensors, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_no_tensors_at_all(tmp_path: Path) -> None:
    write_tensors(tmp_path / "file", {})
    assert load_file(tmp_path / "file") == {}


def test_an_error_of_memory_names_what_was_saved() -> None:
    named = pytest.raises(OutOfMemory, match="while the student was saved")
    with named as caught, saving_errors("the student"):
        torch.empty(2**55)
    assert "resources.memory" in caught.value.remedy and "batch_size" not in caught.value.remedy
    with pytest.raises(RuntimeError, match="something else"), saving_errors("the student"):
        raise RuntimeError("something else")


CHILD = """
import json, resource, sys
from pathlib import Path
import numpy as np
import torch
from kd.errors import OutOfMemory
from kd.progress import Monitor
from kd.training import checkpoint
from kd.training.saved.state import TrainingProgress, TrainState
from kd.training.loop import train
from kd.text.batches import PlainText
from kd.text.corpus import Corpus
from kd.text.packing import Document, pack_documents
from tests.support.kd.students import make_llama
from tests.support.kd.training import make_text_job

folder = Path(sys.argv[1])

def limit(spare):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + spare, resource.RLIM_INFINITY))

def free():
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

model = torch.nn.Linear(4096, 4096)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 4096)).sum().backward()
optimizer.step()
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
scaler = torch.amp.GradScaler("cpu", enabled=False)
state = TrainState(model, optimizer, scheduler, scaler, TrainingProgress())
checkpoint.save_checkpoint(folder / "first", state, "a")  # what the interpreter needs once
limit(2**19)
path = checkpoint.save_checkpoint(folder / "second", state, "a")
free()
found = {"saved": sum(each.stat().st_size for each in path.iterdir())}

job = make_text_job({"max_steps": 8, "batch_size": 4, "eval_steps": 100, "save_steps": 3})
rng = np.random.default_rng(0)
texts = [Document(rng.integers(0, 50, 16).astype(np.uint32)) for _ in range(20)]
source = PlainText(Corpus(*(pack_documents(part, job.data) for part in (texts[2:], texts[:2]))))
student = make_llama(50)
# One row that is not contiguous must be copied to be written.
student.register_buffer("wide", torch.zeros(2**24, 2).t()[:1])

def listen(event):
    if event.type == "alive" and not event.data["stepping"] and taken:
        limit(2**24)
    if event.type == "progress":
        taken.append(event.data["done"])

taken = []
try:
    train(job, source, student, 50, folder, Monitor(listen))
except OutOfMemory as error:
    free()
    found["error"] = error.detail
    found["left"] = [each.name for each in (folder / "checkpoints").iterdir()]
    found["taken"] = taken
print(json.dumps(found))
"""


@pytest.mark.long
def test_saving_needs_half_a_mebibyte_and_an_error_of_it_names_itself(tmp_path: Path) -> None:
    found = run_memory_script(CHILD, str(tmp_path))
    assert found["saved"] > 3 * 64 * 2**20, "weights and two moments"
    assert "Memory ran out while the checkpoint of step 3 was saved" in found["error"]
    assert found["taken"] == [1, 2, 3] and found["left"] == []
