"""The first line of a report says what the teacher was worth."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from kd.evaluation.doubts import judge_teacher
from kd.evaluation.in_depth import BASELINE, BEFORE, STUDENT
from kd.evaluation.pages import format_verdict
from kd.evaluation.report import judge_report
from kd.evaluation.teacher_comparison import TEACHER
from kd.evaluation.teacher_effect import judge_pair, warn_of_verdict
from kd.progress import Event, Monitor
from kd.search.findings import TrialResult, judge_search


@pytest.mark.parametrize(
    ("pair", "interval", "ok", "text"),
    [
        (
            (110.0, 100.0), (0.05, 0.14), False,
            (
                "worse with the teacher than without it: held-out perplexity 110.00 with it, "
                "100.00 without, 2,500 tokens; 0.095 nats per token worse, "
                "95 % interval 0.050 to 0.140."
            ),
        ),
        (
            (100.0, 110.0), (-0.14, -0.05), True,
            (
                "The teacher helped: held-out perplexity 100.00 with it, 110.00 without, 2,500 "
                "tokens; 0.095 nats per token better, 95 % interval 0.050 to 0.140."
            ),
        ),
        ((110.0, 100.0), (-0.01, 0.2), True, "no difference that can be measured on this text"),
        ((110.0, 100.0), None, False, "0.095 nats per token worse."),
    ],
)  # fmt: skip
def test_two_students_are_judged_by_their_numbers(
    pair: tuple[float, float], interval: tuple[float, float] | None, ok: bool, text: str
) -> None:
    ends = interval and {"low": interval[0], "high": interval[1]}
    verdict = judge_pair(*pair, 2500, ends)
    assert (verdict.ok, verdict.check) == (ok, "teacher") and text in verdict.message
    assert ("another teacher" in verdict.remedy) == ("helped" not in text)


def make_report(student: float, teacher: float, before: float = 900.0, **more: Any) -> Any:
    return {
        "teacher": "t", "student_perplexity": student, "teacher_perplexity": teacher,
        "student_perplexity_before": before, "evaluation": more or None,
    }  # fmt: skip


NGRAMS = {
    "counted_tokens": 1000, "unigram_loss": math.log(500.0), "bigram_loss": math.log(150.0),
}  # fmt: skip


@pytest.mark.parametrize(
    ("report", "text"),
    [
        (make_report(70.0, 36.0, ngrams=NGRAMS), None),
        (make_report(70.0, 36.0), None),
        (make_report(70.0, 160.0, ngrams=NGRAMS), "perplexity is 160.00, and that of a bigram"),
        (make_report(70.0, 80.0, ngrams=NGRAMS), "perplexity 70.00, and 80.00 of the teacher."),
        (make_report(79.9, 80.0, ngrams=NGRAMS), None),
        (make_report(95.0, 36.0, before=90.0), "worse after training than before it"),
        (make_report(70.0, 160.0, ngrams=NGRAMS) | {"teacher": None}, None),
    ],
)
def test_without_a_baseline_it_says_what_it_suspects(report: Any, text: str | None) -> None:
    verdict = judge_teacher(report)
    if text is None:
        assert verdict is None
        return
    assert verdict is not None and not verdict.ok and text in verdict.message
    assert "evaluation.baseline: true" in verdict.remedy


@pytest.mark.parametrize(
    ("report", "shown"),
    [
        (make_report(70.0, 160.0, ngrams=NGRAMS), ["160.00 (1,500 tokens, 95 % interval 150.00"]),
        (
            make_report(70.0, 80.0),
            ["70.00 (1,500 tokens, 95 % interval 60.00 to 79.00), and 80.00 (1,500 tokens"],
        ),
        (make_report(95.0, 36.0, before=90.0), ["95.00 (1,500 tokens", "90.00 (1,500 tokens) b"]),
    ],
)
def test_a_suspicion_counts_the_tokens_of_its_perplexities(report: Any, shown: list[str]) -> None:
    """The figures are those of a run, as its training and its cache leave them in the report."""
    known = {
        "held_out_tokens": 1500,
        "student_perplexity_interval": {"low": 60.0, "high": 79.0},
        "student_perplexity_before_interval": None,
        "teacher_perplexity_tokens": 1500,
        "teacher_perplexity_interval": {"low": 150.0, "high": 170.0},
    }
    verdict = judge_teacher(report | known)
    assert verdict is not None
    assert [text for text in shown if text not in verdict.message] == [], verdict.message
    measured = {"tokens": 38250, "perplexity_interval": {"low": 1.0, "high": 99.0}}
    models = {
        name: {"perplexity": report[key], **measured}
        for name, key in (
            (TEACHER, "teacher_perplexity"),
            (BEFORE, "student_perplexity_before"),
            (STUDENT, "student_perplexity"),
        )
    }
    deeper = report | known | {"evaluation": {**(report["evaluation"] or {}), "models": models}}
    verdict = judge_teacher(deeper)
    assert verdict is not None and "(38,250 tokens)" in verdict.message, "the closer look wins"
    assert "interval" not in verdict.message


def test_after_few_steps_a_longer_training_is_the_first_advice() -> None:
    models = {STUDENT: {"perplexity": 110.0}, BASELINE: {"perplexity": 100.0}}
    found = {"models": models, "tokens": 2500, "teacher_effect": {"nats": 0.1}}
    for steps, first in (
        (80, "Train longer, and with more tokens in a step"),
        (4000, "Try another"),
    ):
        verdict = judge_teacher({"teacher": "t", "steps": steps, "evaluation": found})
        assert verdict is not None and verdict.remedy.startswith(first)
        assert "ry another teacher" in verdict.remedy


def test_a_baseline_is_believed_before_any_suspicion() -> None:
    models = {STUDENT: {"perplexity": 100.0}, BASELINE: {"perplexity": 110.0}}
    effect = {"nats": -0.1, "interval": {"low": -0.14, "high": -0.05}}
    report = make_report(
        100.0, 800.0, ngrams=NGRAMS, models=models, tokens=2500, teacher_effect=effect
    )
    verdict = judge_teacher(report)
    assert verdict is not None and verdict.ok and "The teacher helped" in verdict.message


def test_an_examination_is_judged_by_the_models_it_measured() -> None:
    found = {STUDENT: 90.0, BEFORE: 80.0, TEACHER: 40.0}
    models = {name: {"perplexity": value} for name, value in found.items()}
    verdict = judge_teacher({"teacher": "t", "evaluation": {"models": models}})
    assert verdict is not None and "90.00, and 80.00 before" in verdict.message


def test_the_share_of_quality_counts_from_the_unigram_to_the_teacher() -> None:
    for student, share in ((500.0, 0.0), (36.0, 1.0), (math.sqrt(500.0 * 36.0), 0.5)):
        report = make_report(student, 36.0, ngrams=NGRAMS)
        assert judge_report(report)["quality_kept"] == pytest.approx(share)
    assert judge_report(make_report(70.0, 501.0, ngrams=NGRAMS))["quality_kept"] is None
    assert judge_report(make_report(70.0, 36.0))["quality_kept"] is None


def test_a_warning_is_quoted_on_the_page_and_told_to_the_listener() -> None:
    events: list[Event] = []
    for verdict in (judge_pair(110.0, 100.0, 10), judge_pair(100.0, 110.0, 10)):
        warn_of_verdict({"verdict": verdict.to_json()}, Monitor(events.append))
        line = format_verdict({"verdict": verdict.to_json()})[0]
        assert line.startswith("> Warning: The student is worse") != verdict.ok
    (event,) = events
    assert event.type == "warning" and "Try another teacher" in event.data["message"]
    assert format_verdict({}) == []


def make_trial(
    alpha: Any, loss: float | None, state: str = "complete", steps: int = 1
) -> TrialResult:
    values = {} if alpha is None else {"loss.alpha": alpha}
    return TrialResult(0, state, loss, steps, values, "", None)


def test_a_search_that_tried_the_text_alone_is_judged() -> None:
    trials = [
        make_trial(1.0, 4.5), make_trial(1.0, 4.6), make_trial(0.1, 4.7), make_trial(0.0, 4.8),
        make_trial(0.1, 4.0, "pruned"), make_trial({"schedule": "linear"}, 4.75),
    ]  # fmt: skip
    verdict = judge_search(trials)
    assert (
        verdict is not None and not verdict.ok and "0.200 nats per token worse" in verdict.message
    )
    assert judge_search(trials[2:]) is None and judge_search([make_trial(None, 4.0)]) is None


def test_a_search_of_few_steps_is_told_to_train_longer_first() -> None:
    def find_remedy(*steps: int) -> str:
        plain, taught = steps
        trials = [make_trial(1.0, 4.5, steps=plain), make_trial(0.1, 4.6, steps=taught)]
        # The same points again, which were not trained again: they tell no steps.
        verdict = judge_search([*trials, *(replace(row, steps=0) for row in trials)])
        assert verdict is not None and not verdict.ok
        return verdict.remedy

    for steps in ((20, 20), (20, 1_000), (1_000, 20)):
        assert find_remedy(*steps).startswith("Train longer")
    assert find_remedy(1_000, 1_000).startswith("Try another teacher")
