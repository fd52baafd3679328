"""Times, FLOPs, and the trackers that receive a run's numbers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cache.errors import StorageError
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.errors import TrainingError
from kd.memory.devices import find_device_kind
from kd.progress import Event, Monitor, Notice
from kd.tracking.metrics import MetricsLog, read_metrics
from kd.tracking.scalars import SpeedMeter, StepWork
from kd.tracking.stopwatch import Stopwatch, compute_utilisation, count_flops_per_token
from kd.tracking.trackers import Trackers, add_trackers

CPU = torch.device("cpu")


def test_phases_are_summed_and_shared() -> None:
    clock = Stopwatch(CPU)
    for _ in range(2):
        with clock.phase("long"):
            time.sleep(0.02)
    clock.add("waited", 0.01)
    long, waited = clock.table()
    assert (long.name, long.count, waited.name, waited.count) == ("long", 2, "waited", 1)
    assert long.seconds >= 0.04 and long.mean_milliseconds == pytest.approx(1e3 * long.seconds / 2)
    assert waited.seconds == 0.01 and long.share + waited.share == pytest.approx(1.0)


def test_a_disk_that_is_full_at_a_line_of_the_metrics_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, Monitor(), step=0)
    log.write_line("metrics", 1, loss=2.0)
    path.rename(tmp_path / "written")
    path.symlink_to("/dev/full")
    with pytest.raises(StorageError, match="No space left") as refusal:
        log.write_line("metrics", 2, loss=1.0)
    assert f"Free space on the disk of {tmp_path}" in refusal.value.remedy
    assert [line["step"] for line in read_metrics(tmp_path / "written")] == [1]


def test_a_phase_that_fails_is_not_counted() -> None:
    clock = Stopwatch(CPU)
    with pytest.raises(KeyError, match="inside"), clock.phase("broken"):
        raise KeyError("inside")
    assert clock.table() == []


@pytest.mark.parametrize("tied", [True, False])
def test_flops_are_those_of_the_matrix_products(tied: bool) -> None:
    """Against torch's own count of a forward pass; backward costs twice that."""
    from torch.utils.flop_counter import FlopCounterMode

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=tied,
        attn_implementation="eager",
    )  # fmt: skip
    model = LlamaForCausalLM(shape)
    length = 64
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(1, length, dtype=torch.int64))
    found = count_flops_per_token(model, 96, length)
    # Ours halves attention, which need not look ahead.
    attention = 6 * 3 * 32 * length
    assert found + attention == pytest.approx(3 * counter.get_total_flops() / length, rel=1e-6)


def test_utilisation_needs_a_known_device() -> None:
    assert compute_utilisation(1e6, 1e9, CPU) is None


def test_speed_is_a_mean_since_the_last_report() -> None:
    meter = SpeedMeter(flops_per_token=1.0, device=CPU, devices=2)
    assert meter.report() == {}
    meter.count(StepWork(tokens=300, samples=4, waited=0.5, worked=0.5, pinned=1.0))
    meter.count(StepWork(tokens=100, samples=4, waited=0.0, worked=1.0, pinned=0.5))
    assert meter.report() == {
        "throughput/tokens_per_second": 200.0,
        "throughput/samples_per_second": 4.0,
        "throughput/steps_per_second": 1.0,
        "loader/waited_share": 0.25,
        "loader/late_steps": 0.5,
        "loader/pinned_share": 0.75,
    }
    meter.count(StepWork(tokens=100, samples=4, waited=0.0, worked=0.25, pinned=0.0))
    assert meter.report()["throughput/tokens_per_second"] == 400.0


def test_utilisation_is_that_of_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = find_device_kind("NVIDIA H100 80GB HBM3")
    assert kind is not None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    meter = SpeedMeter(flops_per_token=kind.half / 1000, device=torch.device("cuda"), devices=2)
    meter.count(StepWork(tokens=1000, samples=1, waited=0.0, worked=1.0, pinned=1.0))
    assert meter.report()["throughput/mfu"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100-40gb"),  # they differ in their memory alone
        ("NVIDIA A100 80GB PCIe", "a100-40gb"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("Tesla T4", "t4"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA L40", None),
        ("NVIDIA RTX A1000 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Laptop GPU", None),
        ("NVIDIA T400", None),
        ("NVIDIA A10G", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA GH200 480GB", None),
    ],
)
def test_rates_are_not_those_of_a_gpu_with_a_like_name(name: str, kind: str | None) -> None:
    found = find_device_kind(name)
    assert (found and found.name) == kind


def make_job(**options: Any) -> JobConfig:
    student = {"init": {"layers": 1, "hidden_size": 16, "tokenizer": "."}}
    return parse_config(
        {
            "name": "told",
            "kind": "train",
            "student": student,
            "data": {"train": "x"},
            "loss": {"alpha": 1},
            "train": {"max_steps": 1, **options},
        }
    )


def test_tensorboard_is_told_the_numbers(tmp_path: Path) -> None:
    event_file = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    heard: list[Event] = []
    trackers = Trackers(Monitor(heard.append))
    trackers.start(make_job(), ("tensorboard",), tmp_path)
    monitor = add_trackers(Monitor(heard.append), trackers)
    monitor.emit("metrics", step=3, loss=2.5, kd_loss=None, note="text")
    monitor.emit("evaluation", step=4, validation_loss=1.5)
    monitor.emit("progress", done=4)
    trackers.finish()
    found = {}
    for path in (tmp_path / "tensorboard" / "told").glob("events.out.tfevents.*"):
        for record in event_file.EventFileLoader(str(path)).Load():
            found |= {
                value.tag: (record.step, value.tensor.float_val[0])
                for value in record.summary.value
            }
    assert found["loss"] == (3, 2.5) and found["validation_loss"] == (4, 1.5)
    assert "note" not in found and "done" not in found
    assert [event.type for event in heard] == ["metrics", "evaluation", "progress"], (
        "all others hear the same"
    )


def test_what_training_notices_is_kept_for_the_report() -> None:
    monitor = Monitor()
    notice = Notice("rows without text, left out", 1, "a.jsonl: row 2")
    add_trackers(monitor, Trackers(monitor)).note(notice)
    assert monitor.notices == (notice,)


def test_a_tracker_that_is_not_there_ends_the_run_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mlflow", None)  # as where it is not installed
    with pytest.raises(TrainingError, match=r"train\.report_to mlflow cannot be started") as caught:
        Trackers(Monitor()).start(make_job(), ("mlflow",), tmp_path)
    assert "potstill[track]" in caught.value.remedy


def test_a_tracker_that_fails_later_costs_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    heard: list[Event] = []
    trackers = Trackers(Monitor(heard.append))
    trackers.start(make_job(), ("tensorboard",), tmp_path)
    trackers._trackers["tensorboard"].writer.close()
    trackers._trackers[
        "tensorboard"
    ].writer = None  # what a client that lost its connection amounts to
    trackers.log(1, {"loss": 1.0})
    trackers.log(2, {"loss": 1.0})
    trackers.finish()
    assert [event.type for event in heard] == [
        "warning"
    ] and "tensorboard is not used any more" in heard[0].data["message"]
