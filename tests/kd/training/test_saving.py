"""Checkpoints that are written while the training goes on."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from kd.config.job import JobConfig
from kd.errors import TrainingError
from kd.progress import Event, Monitor
from kd.training import checkpoint
from kd.training.loop import train
from tests.support.kd.students import assert_same, make_llama
from tests.support.kd.training import VOCABULARY, make_source, make_text_job, poison_forward

TENSOR_FILES = ("model.safetensors", "optimizer.safetensors", "random.safetensors")


def make_job(**sections: Any) -> JobConfig:
    options = {"max_steps": 8, "batch_size": 4, "eval_steps": 8, "save_steps": 3}
    options["save_total_limit"] = 10
    return make_text_job(options, **sections)


def run(job: JobConfig, folder: Path, monitor: Monitor, student: Any = None) -> None:
    train(job, make_source(), student or make_llama(VOCABULARY), VOCABULARY, folder, monitor)


class StalledDisk:
    """Lets nothing of a checkpoint be written until the training has taken step ``until``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, until: int) -> None:
        self.until = until
        self.events: list[tuple[str, int]] = []
        self.free = threading.Event()
        write = checkpoint.write_tensors

        def wait_and_write(*arguments: Any) -> None:
            assert self.free.wait(60)
            write(*arguments)

        monkeypatch.setattr(checkpoint, "write_tensors", wait_and_write)

    def listen(self, event: Event) -> None:
        if event.type in ("progress", "checkpoint"):
            self.events.append((event.type, event.data.get("step") or event.data["done"]))
        if event.type == "progress" and event.data["done"] == self.until:
            self.free.set()


def test_the_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint holds the state of its own step."""
    run(make_job(), tmp_path / "whole", Monitor())
    disk = StalledDisk(monkeypatch, until=5)
    run(make_job(), tmp_path / "slow", Monitor(disk.listen))
    assert disk.events.index(("checkpoint", 3)) > disk.events.index(("progress", 5))
    assert [step for name, step in disk.events if name == "checkpoint"] == [3, 6, 8]
    for step in ("step-00000003", "step-00000006", "step-00000008"):
        for name in TENSOR_FILES:
            slow, whole = (
                load_file(tmp_path / each / "checkpoints" / step / name)
                for each in ("slow", "whole")
            )
            assert_same(slow, whole)


def test_without_memory_for_a_copy_the_training_waits(tmp_path: Path) -> None:
    events: list[str] = []
    job = make_job(resources={"memory": "64MiB"})  # this process has more already
    run(job, tmp_path, Monitor(lambda event: events.append(event.type)))
    kinds = [each for each in events if each in ("progress", "checkpoint")]
    assert kinds == ["progress"] * 3 + ["checkpoint"] + ["progress"] * 3 + ["checkpoint"] + [
        "progress",
        "progress",
        "checkpoint",
    ]


def test_a_training_that_fails_keeps_the_checkpoint_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    student = make_llama(VOCABULARY)
    poison_forward(student, 4)
    disk = StalledDisk(monkeypatch, until=3)
    with pytest.raises(TrainingError, match=r"step 4 the loss is nan"):
        run(make_job(), tmp_path, Monitor(disk.listen), student)
    assert [each.name for each in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]


def test_a_disk_that_fails_beside_the_training_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder becomes a file, so that the second checkpoint cannot be written."""
    folder = tmp_path / "checkpoints"

    def listen(event: Event) -> None:
        if event.type == "checkpoint":
            shutil.rmtree(folder)
            folder.write_text("")

    with pytest.raises(Exception, match="checkpoints"):
        run(make_job(), tmp_path, Monitor(listen))
    assert folder.read_text() == ""
