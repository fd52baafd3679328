"""A batch whose loss or gradient is not finite is left out; weights that are not end the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from bench.support.ranks import run_ranks
from cache.records import Sequences
from kd.config.job import JobConfig
from kd.errors import Interrupted, NotFinite
from kd.evaluation.report import make_report, render_report
from kd.parallel.group import Group
from kd.progress import Event, Monitor
from kd.text.batches import PlainText
from kd.text.corpus import Corpus
from kd.text.packing import Document, pack_documents
from kd.text.steps.order import list_step_indices
from kd.tracking.metrics import read_metrics
from kd.training.checkpoint import list_checkpoints
from kd.training.loop import train
from kd.training.saved.state import SkippedBatch, TrainingProgress
from tests.support.kd.students import assert_same, copy_weights, make_llama
from tests.support.kd.training import (
    make_text_job,
    poison_forward,
    read_history,
    stop_after,
)

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = 50
#: A token that stands in one training sequence alone; the students of these tests fail on it.
RARE = VOCABULARY - 1
#: The training sequence in which it stands, and the number of them all.
PLACE = 5
COUNT = 24


def make_job(checks: dict[str, Any] | None = None, **train_options: Any) -> JobConfig:
    options = {
        "max_steps": 12,
        "batch_size": 2,
        "gradient_accumulation_steps": 2,
        "eval_steps": 5,
        "save_steps": 3,
        "logging_steps": 1,
    }
    return make_text_job(options | train_options, checks=checks or {})


def make_source(places: tuple[int, ...] = (PLACE,)) -> PlainText:
    rng = np.random.default_rng(0)
    data = make_job().data
    texts = [Document(rng.integers(0, RARE, 16).astype(np.uint32)) for _ in range(COUNT + 2)]
    train_part = pack_documents(texts[:COUNT], data)
    tokens = train_part.tokens.copy()
    for place in places:
        tokens[place, 3] = RARE
    spoiled = Sequences(tokens, train_part.document_start, train_part.target_mask)
    return PlainText(Corpus(spoiled, pack_documents(texts[COUNT:], data)))


def spoil_value(output: Tensor) -> Tensor:
    return output * torch.nan


def spoil_gradient(output: Tensor) -> Tensor:
    """Return ``output``; its gradient is NaN, because the square root of 0 has an infinite one."""
    return output + torch.sqrt(output * 0.0) * 0.0


def make_student(
    spoil: Callable[[Tensor], Tensor] = spoil_value, dropout: float = 0.2
) -> LlamaForCausalLM:
    """Return a student whose first layer fails on every batch that holds the rare token."""
    student = make_llama(VOCABULARY, attention_dropout=dropout)
    state = {"rare": False}

    def look(module: nn.Module, inputs: tuple[Tensor]) -> None:
        state["rare"] = bool((inputs[0] == RARE).any())

    def fail(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return spoil(output) if state["rare"] else output

    student.model.embed_tokens.register_forward_pre_hook(look)
    student.model.layers[0].mlp.register_forward_hook(fail)
    return student


def run(
    folder: Path,
    student: LlamaForCausalLM,
    job: JobConfig | None = None,
    monitor: Monitor | None = None,
    source: PlainText | None = None,
) -> TrainingProgress:
    return train(
        job or make_job(),
        source or make_source(),
        student,
        VOCABULARY,
        folder,
        monitor or Monitor(),
    )


def find_steps(places: tuple[int, ...] = (PLACE,), steps: int = 12) -> list[int]:
    """Return the steps, counted from 1, whose batch holds one of the sequences ``places``."""
    return [
        step + 1
        for step in range(steps)
        if set(places) & set(list_step_indices(COUNT, 4, 42, step).tolist())
    ]


@pytest.mark.parametrize("spoil", [spoil_value, spoil_gradient])
def test_one_bad_sequence_costs_its_batches_and_is_named(
    tmp_path: Path, spoil: Callable[[Tensor], Tensor]
) -> None:
    events: list[Event] = []
    progress = run(tmp_path, make_student(spoil), monitor=Monitor(events.append))
    expected = [SkippedBatch(step, [PLACE]) for step in find_steps()]
    assert len(expected) == 2, "one in each epoch"
    assert progress.skipped == expected
    assert progress.step == 12
    tokens = make_source().corpus.train.target_mask.sum(axis=1)
    taken = [
        index
        for step in range(12)
        if step + 1 not in find_steps()
        for index in list_step_indices(COUNT, 4, 42, step)
    ]
    assert progress.tokens == int(tokens[taken].sum()), "only tokens that were learnt count"
    warnings = [event.data["message"] for event in events if event.type == "warning"]
    assert len(warnings) == 2
    assert f"step {expected[0].step}" in warnings[0] and "counted from 0: 5." in warnings[0]
    assert "model.layers.0.mlp (LlamaMLP)" in warnings[0]
    assert "2 of at most 10" in warnings[1]
    lines = read_metrics(tmp_path / "metrics.jsonl")
    verdicts = [line for line in lines if line.get("check") == "finite"]
    assert [verdict["facts"]["skipped"] for verdict in verdicts] == [1, 2]
    reported = [line["step"] for line in lines if line["type"] == "metrics"]
    assert reported == [step for step in range(1, 13) if step not in find_steps()]


def run_shared(group: Group, folder: str, spoil: Callable[[Tensor], Tensor]) -> Any:
    """Train as one of the ranks that share the parts of a student."""
    messages: list[Event] = []
    job = make_job(strategy="fsdp")
    student = make_student(spoil)
    listening = Monitor(messages.append)
    progress = train(job, make_source(), student, VOCABULARY, Path(folder), listening, group)
    warnings = [each.data["message"] for each in messages if each.type == "warning"]
    return progress.skipped, warnings


@pytest.mark.long
@pytest.mark.parametrize("spoil", [spoil_value, spoil_gradient])
def test_ranks_with_parts_of_the_student_leave_the_same_batches_out(
    tmp_path: Path, spoil: Callable[[Tensor], Tensor]
) -> None:
    expected = [SkippedBatch(step, [PLACE]) for step in find_steps()]
    for skipped, warnings in run_ranks(2, run_shared, str(tmp_path), spoil):
        assert skipped == expected
        assert len(warnings) == 2 and "the place of the fault is not searched" in warnings[0]


def test_weights_move_as_if_the_batch_were_not_there(tmp_path: Path) -> None:
    """A batch that is left out draws no part of a step: the others are those of a sound run."""
    job = make_job(max_steps=find_steps()[0], lr_scheduler_type="constant")
    student = make_student(dropout=0.0)
    run(tmp_path / "bad", student, job)
    short = make_student(dropout=0.0)
    run(
        tmp_path / "short",
        short,
        make_job(max_steps=find_steps()[0] - 1, lr_scheduler_type="constant"),
    )
    assert_same(copy_weights(student), copy_weights(short))


@pytest.mark.long
@pytest.mark.parametrize("moment", [-1, 0, 1])
def test_stopped_around_it_and_resumed_equals_uninterrupted(tmp_path: Path, moment: int) -> None:
    whole = make_student()
    first = run(tmp_path / "whole", whole)
    stop = find_steps()[0] + moment
    with pytest.raises(Interrupted, match=f"step {stop} of 12"):
        run(tmp_path / "cut", make_student(), monitor=stop_after(stop))
    resumed = make_student()
    second = run(tmp_path / "cut", resumed)
    assert second.skipped == first.skipped
    assert_same(copy_weights(resumed), copy_weights(whole))
    lines = [read_history(tmp_path / name) for name in ("cut", "whole")]
    assert lines[0] == lines[1]


def test_more_than_max_skipped_is_an_error_that_names_the_sequences(tmp_path: Path) -> None:
    places = (1, 5, 9, 13)
    steps = find_steps(places)
    job = make_job({"max_skipped": 2})
    with pytest.raises(NotFinite, match=rf"At step {steps[2]} the loss is nan") as caught:
        run(tmp_path, make_student(), job, source=make_source(places))
    assert "counted from 0: " in caught.value.detail
    assert "2 of at most 2 batches were left out before" in caught.value.remedy
    assert "checks.max_skipped" in caught.value.remedy and "data.train" in caught.value.remedy


def test_a_fault_that_does_not_come_again_leaves_nothing_out(tmp_path: Path) -> None:
    """A bit flips once: the second computation of the batch is the step."""
    student = make_llama(VOCABULARY)
    calls: list[int] = []

    def fail_once(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        if not module.training:
            return output
        calls.append(1)
        return output * torch.nan if len(calls) == 8 else output

    student.model.layers[0].mlp.register_forward_hook(fail_once)
    progress = run(tmp_path / "once", student)
    sound = make_llama(VOCABULARY)
    run(tmp_path / "sound", sound)
    assert progress.skipped == []
    assert_same(copy_weights(student), copy_weights(sound))


def test_weights_that_are_not_finite_end_the_run_at_once(tmp_path: Path) -> None:
    student = make_llama(VOCABULARY)
    poison_forward(student, 7)
    with pytest.raises(NotFinite, match=r"step 4 the loss is nan.*model\.norm") as caught:
        run(tmp_path, student)
    assert "step-00000003" in caught.value.remedy and "learning_rate" in caught.value.remedy


def test_weights_that_are_far_too_large_end_the_run_as_well(tmp_path: Path) -> None:
    """They are finite, and every batch overflows: the run does not go on to its end without one."""
    student = make_llama(VOCABULARY)
    steps: list[int] = []

    def enlarge(event: Event) -> None:
        if event.type == "progress":
            steps.append(event.data["done"])
            if event.data["done"] == 3:
                with torch.no_grad():
                    student.model.norm.weight.fill_(3e38)

    with pytest.raises(NotFinite, match=r"At step 4 the loss is.*No other text is free"):
        run(tmp_path, student, make_job(), Monitor(enlarge))
    assert steps == [1, 2, 3]


def test_a_bad_first_batch_ends_neither_the_start_nor_a_new_attempt(tmp_path: Path) -> None:
    """The loss is compared with a dense one on the first batch whose loss is finite."""
    places = tuple(list_step_indices(COUNT, 4, 42, 0)[:1].tolist())
    source = make_source(places)
    events: list[Event] = []
    progress = run(tmp_path, make_student(), make_job(), Monitor(events.append), source)
    assert progress.skipped[0] == SkippedBatch(1, list(places))
    found = [event.data for event in events if event.type == "check"]
    assert [each["ok"] for each in found if each["check"] == "parity"] == [True]
    assert len([each for each in found if each["check"] == "gradients"]) == 1
    assert list_checkpoints(tmp_path / "checkpoints")


def test_two_bad_batches_of_one_sequence_in_a_row_are_both_left_out(tmp_path: Path) -> None:
    order = [int(list_step_indices(COUNT, 1, 42, step)[0]) for step in range(6)]
    job = make_job(batch_size=1, gradient_accumulation_steps=1, max_steps=6)
    progress = run(tmp_path, make_student(), job, source=make_source((order[2], order[3])))
    assert [each.step for each in progress.skipped] == [3, 4]


def test_the_report_counts_what_was_left_out(tmp_path: Path) -> None:
    student = make_student()
    progress = run(tmp_path, student)
    report = make_report(make_job(), make_source(), make_llama(VOCABULARY), progress, VOCABULARY)
    assert report["skipped_batches"] == [asdict(each) for each in progress.skipped]
    assert "without the 2 batch(es) whose loss or gradient was not finite" in render_report(report)
    sound = replace(progress, skipped=[])
    whole = make_report(make_job(), make_source(), make_llama(VOCABULARY), sound, VOCABULARY)
    assert "batch(es)" not in render_report(whole)
