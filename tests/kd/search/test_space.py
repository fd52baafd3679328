"""The space of a search: valid fields, and wrong fields, which are named before anything runs."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from bench.support.paths import ROOT
from bench.support.waiting import PATIENCE_SECONDS
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.errors import ConfigError
from kd.search.space import (
    find_space_problems,
    get_search,
    list_ends,
    make_best_job,
    make_trial_job,
)

FINGERPRINT = "0" * 32


def make_job(space: dict[str, Any], **changes: Any) -> JobConfig:
    return parse_config(
        {
            "kind": "search",
            "name": "sweep",
            "teacher": {"model": "teacher"},
            "student": {"init": {"layers": 1, "hidden_size": 16}},
            "data": {"train": "text.txt", "validation_fraction": 0.1},
            "train": {"max_steps": 8},
            "search": {"space": space, "trials": 4},
        }
        | changes
    )


def complaints(space: dict[str, Any], **changes: Any) -> dict[str, str]:
    problems = find_space_problems(make_job(space, **changes))
    return {problem.pointer: f"{problem.detail} {problem.remedy}" for problem in problems}


GOOD: dict[str, Any] = {
    "train.learning_rate": {"min": 1e-4, "max": 1e-2, "log": True},
    "train.batch_size": {"min": 1, "max": 16, "integer": True},
    "train.lr_scheduler_type": {"choices": ["linear", "cosine"]},
    "train.lr_scheduler_kwargs.num_cycles": {"min": 0.5, "max": 1.5},
    "loss.alpha": {"min": 0, "max": 1},
    "student.init.layers": {"min": 1, "max": 4, "integer": True},
    "checks.alarms": {"choices": [True, False]},
}


def test_fields_of_loss_train_student_and_checks_may_be_tried() -> None:
    assert complaints(GOOD) == {}


def test_a_field_of_a_form_of_a_union_may_be_tried() -> None:
    learned = {"mode": "adversarial", "min": 0.5, "max": 2.0}
    job = {
        "loss": {"temperature": learned},
        "cache": {"profile": "tempered", "temperatures": {"min": 0.4, "max": 4}},
    }
    assert complaints({"loss.temperature.max": {"min": 1.5, "max": 3.0}}, **job) == {}
    found = complaints({"loss.temperature.max": {"min": 1.5, "max": 30.0}}, **job)
    assert "with 30.0 the job is not valid" in found["/search/space/loss.temperature.max"]


@pytest.mark.parametrize(
    ("dotted", "dimension", "words"),
    [
        ("train.learning_rat", {"min": 1e-4, "max": 1e-2}, "Did you mean train.learning_rate?"),
        ("trian.learning_rate", {"min": 1e-4, "max": 1e-2}, "Did you mean train.learning_rate?"),
        ("train.zzz", {"min": 0, "max": 1}, "train has: max_steps, epochs"),
        ("train.learning_rate.low", {"min": 0, "max": 1}, "train.learning_rate is one value"),
        ("teacher.batch_size", {"min": 1, "max": 4, "integer": True}, "the same for every trial"),
        ("data.sequence_length", {"choices": [64, 128]}, "the same for every trial"),
        ("cache.threshold", {"min": 0.01, "max": 0.1}, "the same for every trial"),
        ("search.trials", {"min": 1, "max": 4, "integer": True}, "loss, train, student, checks"),
        ("train", {"choices": [1]}, "for example train.max_steps"),
        ("student", {"choices": ["a"]}, "student is a whole section"),
        (
            "train.learning_rate",
            {"min": 1e-4, "max": 100.0},
            "with 100.0 the job is not valid: train.learning_rate",
        ),
        ("loss.alpha", {"min": -0.5, "max": 0.5}, "with -0.5 the job is not valid"),
        ("train.optim", {"choices": ["adamw", "adamm"]}, "with 'adamm' the job is not valid"),
        ("train.batch_size", {"min": 1, "max": 8.5, "integer": True}, "whole numbers"),
        ("loss.temperature", {"min": 1.0, "max": 2.0}, "with 2.0 the job is not valid"),
    ],
)
def test_a_wrong_field_is_named(dotted: str, dimension: dict[str, Any], words: str) -> None:
    found = complaints({"train.weight_decay": {"min": 0, "max": 1}, dotted: dimension})
    assert list(found) == [f"/search/space/{dotted}"]
    assert words in found[f"/search/space/{dotted}"]


def test_all_problems_are_listed() -> None:
    found = complaints(
        {
            "train.zzz": {"min": 0, "max": 1},
            "cache.k": {"choices": [1]},
            "loss.alpha": {"choices": [2]},
        }
    )
    assert len(found) == 3


def test_a_field_and_a_part_of_it_may_not_both_be_tried() -> None:
    space = {
        "loss.temperature": {"choices": [1.0]},
        "loss.temperature.max": {"min": 1.5, "max": 1.8},
    }
    assert "it contains loss.temperature.max" in complaints(space)["/search/space/loss.temperature"]


def test_a_search_needs_held_out_text() -> None:
    found = complaints(
        {"loss.alpha": {"min": 0, "max": 1}}, data={"train": "text.txt", "validation_fraction": 0.0}
    )
    assert list(found) == ["/search"] and "data.validation" in found["/search"]


def test_a_sampler_that_cannot_be_loaded_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "scipy" else object()
    )
    search = {"space": {"loss.alpha": {"min": 0, "max": 1}}, "sampler": "gp"}
    found = complaints({}, search=search)
    assert "gp needs scipy, which is not installed" in found["/search/sampler"]


def test_another_kind_of_job_has_no_space() -> None:
    job = make_job(GOOD)
    assert find_space_problems(make_best_job(job, {})) == []


def test_every_end_and_choice_makes_the_job_that_it_says() -> None:
    job = make_job(GOOD)
    for dotted, dimension in get_search(job).space.items():
        for value in list_ends(dimension):
            found: Any = make_best_job(job, {dotted: value}).model_dump()
            for part in dotted.split("."):
                found = found[part]
            assert found == value and type(found) is type(value)


def test_a_trial_is_the_job_with_its_values_and_the_shared_cache() -> None:
    job = make_job(GOOD)
    values = {"train.learning_rate": 5e-3, "student.init.layers": 3}
    trial = make_trial_job(job, values, FINGERPRINT, 7)
    best = make_best_job(job, values)
    assert (trial.kind, trial.name, trial.cache.fingerprint) == ("train", "sweep-0007", FINGERPRINT)
    assert (best.kind, best.name, best.cache) == ("distill", "sweep-best", job.cache)
    for each in (trial, best):
        assert each.train is not None and each.student is not None and each.student.init is not None
        assert (each.train.learning_rate, each.train.max_steps, each.student.init.layers) == (
            5e-3,
            8,
            3,
        )
        assert (each.search, each.teacher, each.data, each.loss) == (
            None,
            job.teacher,
            job.data,
            job.loss,
        )


def test_trials_leave_costly_measurements_to_the_best_job() -> None:
    evaluation = {
        "teacher": True,
        "baseline": True,
        "prompts": ["It is"],
        "tasks": ["arc_easy"],
    }
    job = make_job(GOOD, evaluation=evaluation)
    found = make_trial_job(job, {}, FINGERPRINT, 0).evaluation
    assert (found.teacher, found.baseline, found.prompts, found.tasks) == (
        False,
        False,
        (),
        (),
    )
    assert make_best_job(job, {}).evaluation == job.evaluation


def test_values_that_do_not_go_together_are_refused() -> None:
    space = {
        "train.max_steps": {"choices": [1, 4]},
        "train.lr_scheduler_kwargs.num_cycles": {"min": 1, "max": 2},
    }
    with pytest.raises(ConfigError, match="num_cycles"):
        make_best_job(
            make_job(space),
            {"train.lr_scheduler_type": "linear", "train.lr_scheduler_kwargs.num_cycles": 1.0},
        )


def test_a_long_name_stays_a_name() -> None:
    job = make_job(GOOD, name="n" * 63)
    names = {make_trial_job(job, {}, FINGERPRINT, number).name for number in (1, 9999)} | {
        make_best_job(job, {}).name,
        job.name,
    }
    assert len(names) == 4


def test_the_space_is_checked_without_torch_and_optuna() -> None:
    program = (
        "import kd.search.space, kd.search.findings, sys; "
        "print(sorted({'torch', 'optuna'} & {*sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.stdout.strip() == "[]", done.stderr
