"""A sound student learns a few sequences by heart, down to the floor; an obstacle is reported."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

import kd.training.step_loss
from kd.checks.verdict import Verdict
from kd.config.job import JobConfig
from kd.errors import Interrupted, TrainingError
from kd.evaluation.overfit import LossRange, RepeatedSubset, check_overfit
from kd.progress import Event, Monitor
from kd.text.batches import PlainText
from kd.text.corpus import Corpus
from kd.text.packing import Document, pack_documents
from tests.support.kd.students import make_llama
from tests.support.kd.training import make_text_job

VOCABULARY = 50

pytestmark = pytest.mark.usefixtures("one_thread")


def make_job(**train: Any) -> JobConfig:
    options = {"max_steps": 1000, "warmup_steps": 500, "learning_rate": 1e-2, "weight_decay": 0.5}
    return make_text_job(options | train)


def make_source(documents: int = 40) -> PlainText:
    rng = np.random.default_rng(0)
    data = make_job().data
    texts = [Document(rng.integers(0, VOCABULARY, 12).astype(np.uint32)) for _ in range(documents)]
    return PlainText(Corpus(pack_documents(texts, data), pack_documents(texts[:2], data)))


def make_student(width: int = 32) -> LlamaForCausalLM:
    """Return a student with dropout, which the check must switch off to learn anything by heart."""
    return make_llama(VOCABULARY + 6, width, intermediate_size=2 * width, attention_dropout=0.5)


def check(tmp_path: Path, student: LlamaForCausalLM, **train: Any) -> Verdict:
    return check_overfit(make_job(**train), make_source(), student, VOCABULARY, tmp_path, Monitor())


@pytest.mark.long
def test_a_sound_student_comes_near_the_floor(tmp_path: Path) -> None:
    student = make_student()
    before = copy.deepcopy(student.state_dict())
    verdict = check(tmp_path, student, dropout=0.5)
    assert verdict.ok and verdict.remedy == "", verdict
    facts = verdict.facts
    rows = VOCABULARY + 6
    assert facts["before"] == pytest.approx(np.log(rows), abs=0.02), "of all rows of its LM head"
    assert facts["floor"] == pytest.approx(0.0, abs=1e-9), "hard labels can be known"
    assert facts["after"] < 0.1 * facts["before"]
    assert list(facts["tried"]) == ["0.01"], "at the job's own rate"
    assert "4 sequence(s)" in verdict.message
    assert all(torch.equal(student.state_dict()[name], tensor) for name, tensor in before.items())
    assert student.model.layers[0].self_attn.attention_dropout == 0.5, "of the student itself"


@pytest.mark.long
@pytest.mark.parametrize(("rate", "side", "works"), [(1e-3, "low", "0.01"), (1.0, "high", "0.1")])
def test_a_rate_that_does_not_learn_is_told_from_parts_that_cannot(
    tmp_path: Path, rate: float, side: str, works: str
) -> None:
    verdict = check(tmp_path, make_student(), learning_rate=rate)
    assert verdict.ok, verdict
    assert f"train.learning_rate {rate:g} is {side}: it learnt at {works}" in verdict.remedy


def alter_loss(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """Make the loop train on ``factor`` times its loss."""
    real = kd.training.step_loss.compute_distillation_loss

    def wrong(*arguments: Any, **more: Any) -> Any:
        terms = real(*arguments, **more)
        return terms._replace(total=terms.total * factor)

    monkeypatch.setattr(kd.training.step_loss, "compute_distillation_loss", wrong)


@pytest.mark.long
def test_a_loss_of_the_wrong_sign_goes_uphill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alter_loss(monkeypatch, -1.0)
    verdict = check(tmp_path, make_student())
    assert not verdict.ok and "uphill" in verdict.remedy, verdict
    assert len(verdict.facts["tried"]) == 3


@pytest.mark.long
def test_a_student_with_no_say_in_the_loss_does_not_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alter_loss(monkeypatch, 0.0)
    verdict = check(tmp_path, make_student())
    assert not verdict.ok, verdict
    assert "the gradient is 0 in" in verdict.remedy


@pytest.mark.parametrize("rate", [1e-12, 1e-9, 1e-7, 1e-6, 1e-5])
@pytest.mark.long
def test_a_rate_that_is_far_too_low_is_named(tmp_path: Path, rate: float) -> None:
    verdict = check(tmp_path, make_student(), learning_rate=rate)
    assert not verdict.ok and "train.learning_rate" in verdict.remedy, verdict
    assert f"{rate:g}" in verdict.remedy and "lora.rank" not in verdict.remedy, verdict
    assert "uphill" not in verdict.remedy and "affect the loss" not in verdict.remedy


def test_a_nan_of_the_backward_pass_is_a_finding_with_its_operation(tmp_path: Path) -> None:
    student = make_student()
    student.model.layers[1].mlp.register_forward_hook(
        lambda layer, inputs, output: output + torch.sqrt(output * 0.0)
    )
    verdict = check(tmp_path, student)
    assert not verdict.ok and "by Sqrt in model.layers.1.mlp" in verdict.remedy, verdict
    assert "embed" not in verdict.remedy


@pytest.mark.long
def test_a_student_that_is_mostly_frozen_is_too_small(tmp_path: Path) -> None:
    student = make_student()
    for name, parameter in student.named_parameters():
        parameter.requires_grad_("norm" in name)
    verdict = check(tmp_path, student)
    assert not verdict.ok and "lora.rank, is too small" in verdict.remedy, verdict


def test_a_student_that_computes_nan_is_a_finding(tmp_path: Path) -> None:
    student = make_student()

    def spoil(layer: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output * float("nan") if layer.training else output

    student.model.layers[1].mlp.register_forward_hook(spoil)
    verdict = check(tmp_path, student)
    assert not verdict.ok and "is nan" in verdict.remedy, verdict


@pytest.mark.parametrize(
    ("before", "after", "learnt"),
    [
        (5.0, 0.4, True),
        (5.0, 0.6, False),
        (0.7, 0.28, True),
        (0.7, 0.32, False),  # not near
        (0.4, 0.25, False),  # near from the beginning, and hardly moved
        (0.01, 0.015, True),  # nothing to learn
        (5.0, -0.1, True),
        (5.0, float("nan"), False),
    ],
)
def test_what_counts_as_learnt(before: float, after: float, learnt: bool) -> None:
    assert LossRange(before, 0.0).is_learnt(after) == learnt


def test_text_without_a_target_is_refused(tmp_path: Path) -> None:
    source = make_source()
    source.corpus.train.target_mask[:] = False
    with pytest.raises(TrainingError, match="No position of the training text is a target"):
        check_overfit(make_job(), source, make_student(), VOCABULARY, tmp_path, Monitor())


def test_progress_is_passed_on_and_a_stop_is_obeyed(tmp_path: Path) -> None:
    seen: list[Event] = []
    monitor = Monitor(seen.append, lambda: len(seen) == 7)
    with pytest.raises(Interrupted, match="step 7 of 100"):
        check_overfit(make_job(), make_source(), make_student(), VOCABULARY, tmp_path, monitor)
    assert {event.type for event in seen} == {"progress"}


def test_few_sequences_are_the_same_at_every_draw() -> None:
    source = make_source()
    few = RepeatedSubset(source, np.array([3, 5]))
    assert (few.train_count, few.validation_count, few.codec) == (2, 0, None)
    for draws in (0, np.array([7, 2])):
        sequences, records = few.read(np.array([1, 0]), draws)
        assert records is None
        assert np.array_equal(sequences.tokens, source.read(np.array([5, 3]))[0].tokens)
    assert few.fingerprint != RepeatedSubset(source, np.array([3, 6])).fingerprint
