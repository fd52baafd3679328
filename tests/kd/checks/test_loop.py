"""The loop itself catches and names a planted fault of each kind, on a real student."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from kd.checks import parity as parity_module
from kd.checks.watch import WARM_UP, WINDOW
from kd.config.job import JobConfig
from kd.errors import Interrupted, NotFinite, TrainingError
from kd.loss.fused import compute_distillation_loss
from kd.progress import Event, Monitor
from kd.text.batches import PlainText
from kd.text.corpus import Corpus
from kd.text.packing import Document, pack_documents
from kd.tracking.metrics import read_metrics
from kd.tracking.trackers import Trackers
from kd.training.loop import train
from tests.support.kd.students import make_llama
from tests.support.kd.training import make_text_job

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = 50


def make_job(checks: dict[str, Any] | None = None, **train_options: Any) -> JobConfig:
    options = {
        "max_steps": 30,
        "batch_size": 4,
        "eval_steps": 30,
        "save_steps": 5,
        "learning_rate": 1e-3,
    }
    return make_text_job(options | train_options, checks=checks or {})


def make_source(kind: type[PlainText] = PlainText) -> PlainText:
    rng = np.random.default_rng(0)
    data = make_job().data
    texts = [Document((rng.zipf(1.5, 20) % VOCABULARY).astype(np.uint32)) for _ in range(40)]
    return kind(Corpus(pack_documents(texts, data), pack_documents(texts[:4], data)))


def make_student() -> LlamaForCausalLM:
    return make_llama(VOCABULARY)


class Seen:
    """The events of a run, with a reaction to them."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def checks(self, name: str) -> list[dict[str, Any]]:
        return [
            event.data
            for event in self.events
            if event.type == "check" and event.data["check"] == name
        ]

    def steps(self) -> list[int]:
        return [event.data["done"] for event in self.events if event.type == "progress"]

    def back_at(self, step: int) -> Callable[[], bool]:
        """Whether ``step`` was taken again after a roll-back."""
        return lambda: self.steps().count(step) == 2


def run(
    folder: Path,
    job: JobConfig,
    student: LlamaForCausalLM,
    seen: Seen,
    plant: Any = None,
    source: Any = None,
    stop: Callable[[], bool] = lambda: False,
) -> Any:
    def listen(event: Event) -> None:
        seen.events.append(event)
        if plant is not None:
            plant(event)

    return train(job, source or make_source(), student, VOCABULARY, folder, Monitor(listen, stop))


def test_a_sound_run_says_that_it_is(tmp_path: Path) -> None:
    seen = Seen()
    run(tmp_path, make_job(), make_student(), seen)
    found = {
        event.data["check"]: event.data["ok"] for event in seen.events if event.type == "check"
    }
    assert found == {"parity": True, "initial_loss": True, "gradients": True}


def test_alarms_that_are_switched_off_say_nothing(tmp_path: Path) -> None:
    seen = Seen()
    run(tmp_path, make_job({"alarms": False}), make_student(), seen)
    assert {event.data["check"] for event in seen.events if event.type == "check"} == {"parity"}


def test_a_dead_parameter(tmp_path: Path) -> None:
    seen = Seen()
    student = make_student()
    student.model.layers[1].mlp.register_forward_hook(lambda layer, inputs, output: output * 0.0)
    run(tmp_path, make_job(max_steps=2), student, seen)
    (verdict,) = seen.checks("gradients")
    assert not verdict["ok"]
    assert "model.layers.1.mlp.gate_proj.weight" in verdict["message"]


def test_a_wrong_beginning(tmp_path: Path) -> None:
    seen = Seen()
    student = make_student()
    with torch.no_grad():
        student.lm_head.weight.mul_(100.0)
    run(tmp_path, make_job(max_steps=1), student, seen)
    (verdict,) = seen.checks("initial_loss")
    assert not verdict["ok"] and verdict["facts"]["fresh"]


def test_a_layer_that_computes_nan(tmp_path: Path) -> None:
    seen = Seen()
    student = make_student()

    def spoil(layer: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output * torch.nan if seen.steps() and seen.steps()[-1] >= 7 else output

    student.model.layers[1].mlp.register_forward_hook(spoil)
    with pytest.raises(
        TrainingError, match=r"step 8 .*model\.layers\.1\.mlp \(LlamaMLP\)"
    ) as caught:
        run(tmp_path, make_job(), student, seen)
    assert "step-00000005" in str(caught.value) + caught.value.remedy, (
        "the last good checkpoint is named"
    )


def test_a_wrong_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        parity_module,
        "compute_distillation_loss",
        lambda hidden, head, targets, objective: compute_distillation_loss(
            hidden, head, targets, replace(objective, label_smoothing=0.05)
        ),
    )
    seen = Seen()
    with pytest.raises(TrainingError, match="dense float64"):
        run(tmp_path, make_job(), make_student(), seen)
    assert seen.steps() == [], "before any step"
    assert not seen.checks("parity")[0]["ok"]


def spoil_after(student: nn.Module, seen: Seen, at: int, times: int) -> Any:
    """After step ``at``, the first few times that it is taken, make the LM head far too large."""

    def plant(event: Event) -> None:
        if (
            event.type == "progress"
            and event.data["done"] == at
            and seen.steps().count(at) <= times
        ):
            with torch.no_grad():
                student.get_submodule("lm_head").weight.mul_(300.0)  # type: ignore[union-attr, operator]

    return plant


def test_a_spike_is_rolled_back_and_the_run_ends_well(tmp_path: Path) -> None:
    seen = Seen()
    student = make_student()
    progress = run(tmp_path, make_job(), student, seen, spoil_after(student, seen, at=18, times=1))
    (verdict,) = seen.checks("spike")
    assert (
        verdict["ok"] and verdict["facts"]["step"] == 19 and "step-00000015" in verdict["message"]
    )
    assert progress.step == 30 and progress.rollbacks == 1 and progress.learning_rate_factor == 0.5
    assert seen.steps() == [*range(1, 19), *range(16, 31)], "what is done counts from there, too"
    losses = [
        line["loss"]
        for line in read_metrics(tmp_path / "metrics.jsonl")
        if line["type"] == "metrics"
    ]
    assert max(losses) < 5.0, "nothing of the spike is left"


def test_stopped_after_a_roll_back_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    whole = make_student()
    cut = make_student()
    resumed = make_student()
    seen = Seen()
    run(tmp_path / "whole", make_job(), whole, seen, spoil_after(whole, seen, at=18, times=1))
    assert len(seen.checks("spike")) == 1
    seen = Seen()
    with pytest.raises(Interrupted, match="step 17 of 30"):
        run(
            tmp_path / "cut",
            make_job(),
            cut,
            seen,
            spoil_after(cut, seen, at=18, times=1),
            stop=seen.back_at(17),
        )
    progress = run(tmp_path / "cut", make_job(), resumed, Seen())
    assert progress.rollbacks == 1 and progress.learning_rate_factor == 0.5
    for name, tensor in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], tensor), name


def test_a_run_that_keeps_spiking_fails_with_its_last_good_checkpoint(tmp_path: Path) -> None:
    seen = Seen()
    student = make_student()
    with pytest.raises(TrainingError, match=r"after 2 of at most 2 roll-backs.*step-00000015"):
        run(tmp_path, make_job(), student, seen, spoil_after(student, seen, at=18, times=9))
    assert [verdict["ok"] for verdict in seen.checks("spike")] == [True, True, False]


class Slow(PlainText):
    """Text on a slow disk."""

    def read(self, indices: np.ndarray, draws: np.ndarray | int = 0) -> Any:
        time.sleep(0.05)
        return super().read(indices, draws)


@pytest.mark.parametrize("end", ["stopped", "diverged", "whole"])
def test_trackers_are_closed_however_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Left open, they would disturb the next run of the process, such as a search's next trial."""
    closed: list[str] = []
    real = Trackers.finish
    monkeypatch.setattr(Trackers, "finish", lambda self: (closed.append("finish"), real(self))[1])
    seen = Seen()
    student = make_student()

    def spoil(event: Event) -> None:
        if event.type == "progress" and end == "diverged":
            with torch.no_grad():
                student.lm_head.weight.fill_(torch.nan)

    job = make_job(max_steps=6)
    with (
        nullcontext()
        if end == "whole"
        else pytest.raises(NotFinite if end == "diverged" else Interrupted)
    ):
        run(
            tmp_path,
            job,
            student,
            seen,
            spoil,
            stop=lambda: end == "stopped" and len(seen.steps()) > 3,
        )
    assert closed == ["finish"]


@pytest.mark.long
def test_a_starved_loop(tmp_path: Path) -> None:
    seen = Seen()
    steps = WARM_UP + WINDOW
    job = make_job(max_steps=steps, eval_steps=steps, save_steps=steps, dataloader_num_workers=0)
    run(tmp_path, job, make_student(), seen, source=make_source(Slow))
    (verdict,) = seen.checks("starvation")
    assert not verdict["ok"] and "train.dataloader_num_workers (now 0)" in verdict["remedy"]


def test_a_run_that_is_always_clipped(tmp_path: Path) -> None:
    seen = Seen()
    run(
        tmp_path,
        make_job(max_steps=WINDOW, save_steps=WINDOW, max_grad_norm=1e-3),
        make_student(),
        seen,
    )
    (verdict,) = seen.checks("clipping")
    assert verdict["facts"]["share"] == 1.0
