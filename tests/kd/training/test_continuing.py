"""A finished run goes on: the schedules, the equality with a longer run, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from kd.errors import ConfigError, Interrupted, TrainingError
from kd.models.precision import Precision
from kd.progress import SILENT, Monitor
from kd.tracking.metrics import read_metrics
from kd.training.loop import train
from tests.support.kd.students import copy_weights, make_llama
from tests.support.kd.training import VOCABULARY, make_source, make_text_job, stop_after

pytestmark = pytest.mark.usefixtures("one_thread")

FLAT = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2}
STEP = {"lr_scheduler_type": "step", "lr_scheduler_kwargs": {"step_size": 3}, "warmup_steps": 2}
PLATEAU = {"lr_scheduler_type": "reduce_lr_on_plateau", "warmup_steps": 2}
COSINE = {"lr_scheduler_type": "cosine", "warmup_steps": 2}
ONE_CYCLE = {"lr_scheduler_type": "onecycle"}


def run(
    folder: Path,
    steps: int,
    resume: dict[str, Any] | None = None,
    monitor: Monitor = SILENT,
    **train_options: Any,
) -> dict[str, Tensor]:
    options = {
        "max_steps": steps, "batch_size": 4, "eval_steps": 4, "save_steps": 100,
        "logging_steps": 1, "learning_rate": 1e-2, **train_options,
    }  # fmt: skip
    job = make_text_job(options, **({} if resume is None else {"resume": resume}))
    student = make_llama(VOCABULARY, attention_dropout=0.2)
    train(job, make_source(), student, VOCABULARY, folder, monitor)
    return copy_weights(student)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(one[name].equal(other[name]) for name in one)


def rates(folder: Path) -> list[float]:
    lines = read_metrics(folder / "metrics.jsonl")
    return [line["learning_rate"] for line in lines if line["type"] == "metrics"]


@pytest.mark.long
@pytest.mark.parametrize("schedule", [FLAT, STEP, PLATEAU], ids=["flat", "step", "plateau"])
def test_an_extended_run_is_one_that_was_so_long_from_the_start(
    schedule: dict[str, Any], tmp_path: Path
) -> None:
    whole = run(tmp_path / "whole", 12, **schedule)
    run(tmp_path / "parts", 4, **schedule)
    longer = run(tmp_path / "parts", 8, {"schedule": "extend"}, **schedule)
    assert not same(longer, whole)
    assert same(run(tmp_path / "parts", 12, {"schedule": "extend"}, **schedule), whole)
    assert rates(tmp_path / "parts") == rates(tmp_path / "whole")


@pytest.mark.long
@pytest.mark.parametrize("schedule", [COSINE, ONE_CYCLE], ids=["cosine", "one cycle"])
def test_an_extended_schedule_goes_on_at_the_step_where_the_longer_one_is(
    schedule: dict[str, Any], tmp_path: Path
) -> None:
    run(tmp_path / "whole", 12, **schedule)
    run(tmp_path / "parts", 6, **schedule)
    first = rates(tmp_path / "parts")
    run(tmp_path / "parts", 12, {"schedule": "extend"}, **schedule)
    assert rates(tmp_path / "parts") == pytest.approx(first + rates(tmp_path / "whole")[6:])


@pytest.mark.long
@pytest.mark.parametrize("how", ["extend", "restart", "constant"])
def test_a_continued_run_that_is_stopped_goes_on_bit_for_bit(how: str, tmp_path: Path) -> None:
    for name in ("whole", "cut"):
        run(tmp_path / name, 5, **STEP)
    whole = run(tmp_path / "whole", 12, {"schedule": how}, **STEP)
    for stop in (6, 9):
        with pytest.raises(Interrupted):
            run(tmp_path / "cut", 12, {"schedule": how}, stop_after(stop), **STEP)
    assert same(run(tmp_path / "cut", 12, {"schedule": how}, **STEP), whole)
    assert rates(tmp_path / "cut") == rates(tmp_path / "whole")


def test_a_restarted_schedule_rises_and_falls_over_the_added_steps(tmp_path: Path) -> None:
    run(tmp_path / "run", 6, **COSINE)
    first = rates(tmp_path / "run")
    # With restart the learning rate may change too.
    again = {**COSINE, "learning_rate": 5e-3}
    run(tmp_path / "run", 14, {"schedule": "restart"}, **again)
    run(tmp_path / "eight", 8, **again)
    assert rates(tmp_path / "run") == pytest.approx(first + rates(tmp_path / "eight"))


def test_a_constant_rate_is_that_of_the_last_step(tmp_path: Path) -> None:
    run(tmp_path / "run", 6, **STEP)
    last = rates(tmp_path / "run")[-1]
    run(tmp_path / "run", 9, {"schedule": "constant"}, **STEP)
    assert rates(tmp_path / "run")[6:] == pytest.approx([last] * 3)


@pytest.mark.long
def test_a_plateau_begins_anew_or_stays_where_it_fell(tmp_path: Path) -> None:
    # Every evaluation but the first is worse than the one before, and lowers the rate.
    falling = {
        **PLATEAU, "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5}, "learning_rate": 3.0,
        "eval_steps": 1,
    }  # fmt: skip
    for how in ("restart", "constant"):
        run(tmp_path / how, 6, **falling)
        assert rates(tmp_path / how)[-1] == pytest.approx(3.0 / 8)
        run(tmp_path / how, 9, {"schedule": how}, **falling)
    assert rates(tmp_path / "restart")[6:] == pytest.approx([0.0, 1.5, 3.0])
    assert rates(tmp_path / "constant")[6:] == pytest.approx([3.0 / 16] * 3)


def test_the_peak_of_an_earlier_schedule_is_none_of_a_later_one(tmp_path: Path) -> None:
    run(tmp_path / "run", 4, **ONE_CYCLE)
    low = {**FLAT, "learning_rate": 1e-3}
    run(tmp_path / "run", 8, {"schedule": "restart"}, **low)
    run(tmp_path / "run", 12, {"schedule": "extend"}, **low)
    assert rates(tmp_path / "run")[4:] == pytest.approx([0.0, 5e-4] + [1e-3] * 6)


@pytest.mark.long
def test_an_extended_schedule_does_not_count_steps_that_overflowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The product refuses float16 on a CPU.
    monkeypatch.setattr(Precision, "choose", lambda *_: Precision("cpu", torch.float16))
    monkeypatch.setattr("kd.models.precision.FIRST_SCALE", 2.0**22)
    half = {**STEP, "precision": "fp16"}
    whole = run(tmp_path / "whole", 14, **half)
    overflowed = rates(tmp_path / "whole").count(0.0) - 1
    assert overflowed in range(1, 5)
    run(tmp_path / "parts", 7, **half)
    assert same(run(tmp_path / "parts", 14, {"schedule": "extend"}, **half), whole)
    assert rates(tmp_path / "parts") == rates(tmp_path / "whole")


def test_a_rate_that_has_fallen_to_0_cannot_stay_constant(tmp_path: Path) -> None:
    run(tmp_path / "run", 4, **COSINE)
    with pytest.raises(TrainingError, match="would train at a rate of 0, to which cosine") as error:
        run(tmp_path / "run", 8, {"schedule": "constant"}, **COSINE)
    assert "restart or extend" in error.value.remedy


@pytest.mark.long
def test_another_run_goes_on_in_a_folder_of_its_own(tmp_path: Path) -> None:
    run(tmp_path / "first", 4, **FLAT)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "first").rglob("*")}
    longer = run(tmp_path / "second", 8, {"run": "first"}, **FLAT)
    assert same(longer, run(tmp_path / "whole", 8, **FLAT))
    assert rates(tmp_path / "second") == rates(tmp_path / "whole"), "with the history of the first"
    assert kept == {path: path.stat().st_mtime_ns for path in (tmp_path / "first").rglob("*")}


@pytest.mark.long
def test_a_run_that_early_stopping_ended_goes_on(tmp_path: Path) -> None:
    stopping = {**FLAT, "early_stopping_patience": 1, "learning_rate": 10.0, "eval_steps": 1}
    run(tmp_path / "run", 30, **stopping)
    ended = len(rates(tmp_path / "run"))
    assert ended < 30
    run(tmp_path / "run", 31, {"schedule": "extend"}, **{**stopping, "early_stopping_patience": 50})
    assert len(rates(tmp_path / "run")) == 31


#: At this rate the evaluation after the first step is the best.
WORSE = {**FLAT, "learning_rate": 3.0, "eval_steps": 1, "save_total_limit": 1}


@pytest.mark.long
def test_a_longer_run_keeps_the_best_weights_of_the_run_that_it_continues(tmp_path: Path) -> None:
    stopping = {**WORSE, "early_stopping_patience": 50}
    first = run(tmp_path / "first", 6, **stopping)
    assert same(run(tmp_path / "second", 9, {"run": "first"}, **stopping), first)
    # It is stopped as soon as its first checkpoint is there, and finds the best once more.
    with pytest.raises(Interrupted):
        run(tmp_path / "third", 9, {"run": "first"}, stop_after(7), **stopping)
    assert same(run(tmp_path / "third", 9, {"run": "first"}, **stopping), first)


def test_best_weights_that_the_earlier_run_did_not_keep_count_for_nothing(tmp_path: Path) -> None:
    warnings: list[str] = []
    heard = Monitor(
        lambda event: event.type == "warning" and warnings.append(event.data["message"])
    )
    run(tmp_path / "run", 6, **WORSE)
    stopping = {**WORSE, "early_stopping_patience": 50}
    kept = run(tmp_path / "run", 9, {"schedule": "extend"}, heard, **stopping)
    assert any("best at step 1, of which it kept no checkpoint" in each for each in warnings)
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    losses = {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}
    best = min((7, 8, 9), key=losses.__getitem__)
    assert losses[best] > losses[1]
    path = tmp_path / "run" / "checkpoints" / f"step-{best:08d}" / "model.safetensors"
    assert same(load_file(path), kept)


@pytest.mark.parametrize(
    ("steps", "resume", "changed", "message"),
    [
        (4, {"run": "first"}, {"weight_decay": 0.2}, "trained another student"),
        (8, {"run": "missing"}, {}, "the run missing has no checkpoint"),
        (3, {"run": "first"}, {}, "has taken 4 steps already, and this job has 3"),
        (8, {"run": "first"}, {"learning_rate": 0.5}, "trained another student"),
    ],
)
def test_what_cannot_go_on_is_refused_with_its_reason(
    steps: int, resume: dict[str, Any], changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    run(tmp_path / "first", 4, **FLAT)
    with pytest.raises(ConfigError, match=message):
        run(tmp_path / "second", steps, resume, **{**FLAT, **changed})
    assert not (tmp_path / "second" / "checkpoints").exists()


def test_without_the_section_a_longer_job_is_another_job(tmp_path: Path) -> None:
    run(tmp_path / "run", 4, **FLAT)
    with pytest.raises(TrainingError, match="was written by another job"):
        run(tmp_path / "run", 8, **FLAT)
