"""A study: each trial has its seed; it continues after any stop; its journal survives a crash."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.errors import TrainingError
from kd.search.findings import (
    TrialResult,
    make_search_report,
    render_best_job,
    render_search_report,
    write_search,
)
from kd.search.study import FileJournal, SearchStudy, make_study, should_prune

SPACE = {
    "train.learning_rate": {"min": 1e-4, "max": 1e-1, "log": True},
    "train.batch_size": {"min": 1, "max": 16, "integer": True},
    "train.order": {"choices": ["shuffled", "length"]},
}


def make_job(**search: Any) -> JobConfig:
    return parse_config(
        {
            "kind": "search",
            "teacher": {"model": "teacher"},
            "student": {"init": {"layers": 1, "hidden_size": 16}},
            "data": {"train": "text.txt", "validation_fraction": 0.1},
            "train": {"max_steps": 9, "eval_steps": 1},
            "search": {"space": SPACE, "trials": 8, **search},
        }
    )


def open_study(folder: Path, job: JobConfig) -> SearchStudy:
    return make_study(job, FileJournal(folder / "study.jsonl"))


def loss_of(values: dict[str, Any]) -> float:
    return abs(values["train.learning_rate"] - 0.01) * 10 + 1 / values["train.batch_size"]


def run(folder: Path, job: JobConfig, stop_after: int = 10**6) -> tuple[TrialResult, ...]:
    """Run trials until ``stop_after`` have begun here; the last one stays open."""
    study = open_study(folder, job)
    begun = 0
    while trial := next(iter(study.list_open_trials()), None) or study.start_trial():
        values = study.suggest_values(trial)
        begun += 1
        if begun > stop_after:
            break
        study.report_loss(trial, 0, 99.0)
        study.report_loss(trial, 1, loss_of(values) + 1)
        study.report_loss(trial, 2, loss_of(values))
        study.end_trial(trial, "complete")
    return make_search_report(job, study).trials


GP = pytest.param(
    "gp", marks=pytest.mark.skipif(find_spec("scipy") is None, reason="gp needs scipy")
)


@pytest.mark.long
@pytest.mark.parametrize("sampler", ["tpe", "random", GP])
@pytest.mark.parametrize("cuts", [[1], [3, 2], [1, 1, 1, 1, 1, 1, 1]])
def test_stopped_and_gone_on_with_tries_what_it_would_have_tried(
    tmp_path: Path, sampler: str, cuts: list[int]
) -> None:
    job = make_job(sampler=sampler, trials=14)
    for cut in cuts:
        run(tmp_path / "cut", job, cut)
    found = run(tmp_path / "cut", job)
    whole = run(tmp_path / "whole", job)
    assert found == whole and len(whole) == 14


def test_a_trial_with_some_of_its_values_gets_the_others(tmp_path: Path) -> None:
    """The study is as after kill -9 between two values of a trial."""
    job = make_job()
    run(tmp_path / "whole", job)
    run(tmp_path / "cut", job, 3)
    journal = tmp_path / "cut" / "study.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[:-2]))
    assert len(open_study(tmp_path / "cut", job).list_open_trials()[0].params) == 1
    assert run(tmp_path / "cut", job) == run(tmp_path / "whole", job)


def test_fields_of_a_trial_are_drawn_apart(tmp_path: Path) -> None:
    rows = run(tmp_path, make_job(sampler="random", trials=40))
    rates = sorted(rows, key=lambda row: row.values["train.learning_rate"])
    sizes = sorted(rows, key=lambda row: row.values["train.batch_size"])
    assert [row.number for row in rates] != [row.number for row in sizes]
    assert {row.values["train.order"] for row in rows} == {"shuffled", "length"}
    assert min(row.values["train.learning_rate"] for row in rows) < 1e-3, "on a logarithmic scale"


FEW = {
    "train.batch_size": {"min": 1, "max": 2, "integer": True},
    "train.order": {"choices": ["shuffled", "length"]},
}


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_no_values_are_tried_twice_and_the_end_of_a_small_space_is_said(
    tmp_path: Path, sampler: str
) -> None:
    job = make_job(space=FEW, trials=500, sampler=sampler)
    study = open_study(tmp_path, job)
    trained = []
    while trial := study.start_trial():
        values = study.suggest_values(trial)
        if (twin := study.find_twin(trial)) is not None:
            study.end_as_twin(trial, twin)
            continue
        trained.append(values)
        study.report_loss(trial, 1, 1 / values["train.batch_size"])
        # One of them is stopped early, and one fails once and is tried again.
        outcome: Any = {1: "pruned", 2: "failed"}.get(len(trained), "complete")
        study.end_trial(trial, outcome)
    assert len({str(each) for each in trained}) == 4
    assert all(trained.count(each) == 1 for each in trained if each != trained[1])
    report = make_search_report(job, study)
    assert report.tried_all and len(report.trials) < 100
    text = render_search_report(job, report)
    assert "It ended before 500 trials: the space has no other values." in text
    for row in report.trials:
        if (number := row.same_as) is not None:
            (twin,) = (each for each in report.trials if each.number == number)
            assert (row.values, row.state) == (twin.values, twin.state)
            assert row.loss == twin.loss or row.state == "pruned"
            assert f"Trial {row.number} has the values of trial {number}" in text
    complete = [row for row in report.trials if row.state == "complete"]
    best = report.best
    assert best.number == min(each.number for each in complete if each.loss == best.loss)


def test_tpe_comes_closer_than_chance(tmp_path: Path) -> None:
    best = [
        run(tmp_path / name, make_job(sampler=name, trials=40))[0].loss
        for name in ("tpe", "random")
    ]
    assert best[0] < best[1]


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    job = make_job()
    run(tmp_path / "whole", job)
    run(tmp_path / "cut", job, 3)
    with (tmp_path / "cut" / "study.jsonl").open("ab") as file:
        file.write(b'{"op_code": 4, "work')
    assert run(tmp_path / "cut", job) == run(tmp_path / "whole", job)
    assert all(
        json.loads(line) for line in (tmp_path / "cut" / "study.jsonl").read_text().splitlines()
    )


def test_a_study_of_another_job_is_refused_and_more_trials_are_not(tmp_path: Path) -> None:
    run(tmp_path, make_job(trials=2))
    assert len(run(tmp_path, make_job(trials=5))) == 5
    with pytest.raises(TrainingError, match="Another job"):
        open_study(tmp_path, make_job(sampler="random"))


def test_a_search_that_an_earlier_version_began_goes_on(tmp_path: Path) -> None:
    """That version kept a digest of the fields that a job had then."""
    job = make_job()
    journal = tmp_path / "study.jsonl"
    make_study(job, FileJournal(journal))
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    (own,) = (each for each in lines if "config" in str(each.get("user_attr")))
    own["user_attr"] = {"job": "a" * 64}
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert make_study(job, FileJournal(journal)).study.user_attrs["job"] == "a" * 64
    other = make_job(trials=20)
    make_study(other, FileJournal(journal))  # more trials are no other job
    with pytest.raises(TrainingError, match="Another job"):
        make_study(make_job(sampler="random"), FileJournal(journal))


def test_the_loss_before_the_first_step_and_a_second_one_of_a_step_do_not_count(
    tmp_path: Path,
) -> None:
    study = open_study(tmp_path, make_job())
    trial = study.study.ask()
    for step, loss in ((0, 0.1), (3, 2.0), (3, 1.0), (6, None)):
        study.report_loss(trial, step, loss)
    assert study.list_losses(trial) == {3: 2.0}


def test_a_trial_counts_by_the_loss_of_the_weights_it_saves_and_fails_without_one(
    tmp_path: Path,
) -> None:
    study = open_study(tmp_path, make_job())
    first, second, third, stopped = (study.study.ask() for _ in range(4))
    for trial in (first, stopped):
        for step, loss in ((1, 3.0), (2, 2.0), (3, 2.5)):
            study.report_loss(trial, step, loss)
    study.end_trial(first, "complete")
    study.end_trial(stopped, "complete", keeps_best=True)
    study.end_trial(second, "complete")
    study.end_trial(third, "failed", "It diverged.")
    rows = {row.number: row for row in make_search_report(make_job(), study).trials}
    assert (rows[0].state, rows[0].loss, rows[0].steps) == ("complete", 2.5, 3)
    assert (rows[3].state, rows[3].loss, rows[3].steps) == ("complete", 2.0, 3)
    assert (rows[1].state, rows[1].why) == ("failed", "It has no held-out loss.")
    assert (rows[2].state, rows[2].why) == ("failed", "It diverged.")


def test_what_is_worse_than_the_others_is_stopped(tmp_path: Path) -> None:
    study = open_study(tmp_path, make_job(trials=50))
    for number in range(12):
        trial = study.study.ask()
        stopped = False
        for step in range(1, 10):
            study.report_loss(trial, step, 1.0 + number / 100 + 1 / step)
            stopped = stopped or should_prune(trial)
        study.end_trial(trial, "pruned" if stopped else "complete")
    bad = study.study.ask()
    stopped = False
    for step in range(1, 10):
        study.report_loss(bad, step, 50.0)
        stopped = stopped or should_prune(bad)
    assert stopped


def test_the_report_lists_every_trial_and_the_best_job_runs(tmp_path: Path) -> None:
    job = make_job()
    rows = run(tmp_path, job)
    study = open_study(tmp_path, job)
    found = make_search_report(job, study)
    paths = write_search(tmp_path, job, found)
    best = min(rows, key=lambda row: row.loss)
    assert found.best == best
    report = json.loads(Path(paths["report.json"]).read_text())
    assert report == found.to_json()
    assert report["best"] == {"number": best.number, "loss": best.loss, "values": best.values}
    page = Path(paths["report.md"]).read_text()
    assert page.count("\n| ") == 1 + 1 + len(rows) and f"{best.loss:.4f}" in page
    from kd.config.jobfile import load_config
    from kd.search.space import make_best_job

    assert load_config(Path(paths["best.yaml"])) == make_best_job(job, best.values)


def test_a_search_without_a_finished_trial_fails_with_the_reason(tmp_path: Path) -> None:
    job = make_job()
    study = open_study(tmp_path, job)
    study.end_trial(study.study.ask(), "failed", "train: the first | second\nthird")
    found = make_search_report(job, study)
    with pytest.raises(TrainingError, match="None of the 1 trials completed"):
        write_search(tmp_path, job, found)
    assert (
        "Trial 0 failed" in (tmp_path / "report.md").read_text()
        and not (tmp_path / "best.yaml").exists()
    )
    assert "None completed" in render_search_report(job, found)


def test_best_yaml_says_which_trial_it_is(tmp_path: Path) -> None:
    job = make_job()
    run(tmp_path, job)
    found = make_search_report(job, open_study(tmp_path, job))
    assert found.best is not None
    assert render_best_job(job, found.best).startswith(
        f"# Trial {found.best.number} of search job: held-out loss "
    )


@pytest.mark.parametrize("best", [0.0, 1.0])
def test_best_yaml_says_where_it_captures_another_cache_than_the_search(best: float) -> None:
    job = make_job(space={"loss.entropy_weighting": {"choices": [0.0, 1.0]}})
    row = TrialResult(3, "complete", 1.0, 9, {"loss.entropy_weighting": best}, "", None)
    assert ("captures a smaller cache" in render_best_job(job, row)) == (best == 0.0)
