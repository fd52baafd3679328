"""The axes of an ablation, and the jobs that they make of a job."""

from __future__ import annotations

from typing import Any

import pytest

from bench.support.paths import AUSTEN
from kd.config.job import JobConfig
from kd.config.jobfile import load_config
from kd.errors import ConfigError, Problem
from kd.experiments.axes import (
    READY,
    STEPS,
    Axis,
    cross_axes,
    make_setting_job,
    make_short_job,
    parse_axis,
)
from kd.experiments.plan import ITSELF, AblationPlan, make_plan_of_axes


def load_base(*overrides: str, steps: int | None = None) -> JobConfig:
    return make_short_job(load_config(AUSTEN / "job.yaml", overrides), steps)


def plan_axes(base: JobConfig, *texts: str) -> AblationPlan:
    axes = [parse_axis(text, base) for text in texts]
    return make_plan_of_axes(base, axes, lambda job: [])


def count_tokens(job: JobConfig) -> int:
    train = job.require_train()
    assert train.max_steps is not None
    return train.max_steps * train.sequences_per_step


def test_a_short_job_keeps_the_shape_of_its_schedule() -> None:
    schedule = (
        "train.lr_scheduler_type=multistep",
        "train.lr_scheduler_kwargs={milestones: [200, 300], gamma: 0.5}",
        "train.early_stopping_patience=3",
        "evaluation.baseline=true",
    )
    short = load_base(*schedule, steps=100)
    train = short.require_train()
    assert (train.max_steps, train.warmup_steps) == (100, 10)
    assert train.lr_scheduler_kwargs == {"milestones": (50, 75), "gamma": 0.5}
    assert train.early_stopping_patience is None and not short.evaluation.baseline
    assert load_base().require_train().max_steps == STEPS, "the job has 400 steps"
    assert load_base("train.max_steps=20").require_train().max_steps == 20


def test_optimisers_have_a_rate_that_suits_them() -> None:
    axis = parse_axis("optimisers", load_base("train.learning_rate=7e-5"))
    rates = {each.label: each.overrides.get("train.learning_rate") for each in axis.settings}
    assert rates["lion"] == 7e-5 / 5 and rates["lars"] == 7e-5 * 1000 and rates["adamw"] is None
    assert "lion 1/5 times it, lars 1000 times it, schedule_free a constant one" in axis.why


@pytest.mark.parametrize("name", READY)
def test_every_ready_axis_makes_jobs_of_the_same_tokens_seed_and_order(name: str) -> None:
    base = load_base()
    plan = plan_axes(base, name)
    assert not list(plan.list_refused()) and len(plan.jobs) > 2
    for job in plan.jobs.values():
        train = job.config.require_train()
        assert count_tokens(job.config) == count_tokens(base)
        assert (train.seed, train.order) == (base.require_train().seed, base.require_train().order)
        assert job.config.data == base.data


def test_values_are_yaml_and_ready_names_take_other_values() -> None:
    base = load_base()
    axis = parse_axis("alpha=0, {schedule: linear, start: 1, end: 0}", base)
    assert [each.overrides for each in axis.settings] == [
        {"loss.alpha": 0}, {"loss.alpha": {"schedule": "linear", "start": 1, "end": 0}},
    ]  # fmt: skip
    assert [each.label for each in axis.settings][1] == "{end: 0, schedule: linear, start: 1}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("optimizers", "Did you mean optimisers?"),
        ("nonsense", "Ready axes: schedules"),
        ("loss.alpha", "a field needs values. Example: loss.alpha=value,value"),
        ("loss.alpha=", "an axis is field=value,value"),
        ("loss.alpha=[1", "not YAML"),
        ("loss.alfa=1,2", "no setting that can run: loss.alfa: unknown key 'alfa'"),
        ("loss.alpha=2,3", "less than or equal to 1, but got 2"),
    ],
)
def test_an_axis_that_nothing_can_run_is_an_error(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("?", r"\?")):
        plan_axes(load_base(), text)


def test_other_batches_take_other_steps_for_the_same_tokens() -> None:
    base = load_base(steps=100)
    jobs = [
        make_setting_job(base, {"train.batch_size": size}).require_train() for size in (4, 8, 16)
    ]
    assert [(job.max_steps, job.warmup_steps, job.eval_steps) for job in jobs] == [
        (200, 20, 25), (100, 10, 20), (50, 5, 20),
    ]  # fmt: skip
    short = make_setting_job(load_base(steps=20), {"train.batch_size": 8}).require_train()
    assert short.eval_steps == 20, "before the first step and after the last one"
    longer = make_setting_job(base, {"train.max_steps": 150, "train.batch_size": 16})
    assert longer.require_train().max_steps == 150


def test_equal_jobs_share_a_run_and_the_job_itself_is_a_row_of_each_axis() -> None:
    plan = plan_axes(load_base(), "alpha=0,0.1", "train.seed=1", "loss.alpha=0,1.5")
    first, second, third = plan.axes
    assert len(plan.jobs) == 3
    assert [row.label for row in first.rows] == ["0", "0.1"]
    assert first.rows[1].run == plan.base_digest
    assert [row.label for row in second.rows] == [ITSELF, "1"]
    assert third.rows[1].run == first.rows[0].run
    (refused,) = plan.list_refused()
    assert refused[0] == "loss.alpha" and "got 1.5" in refused[1].refusal
    other = plan_axes(load_base("name=other"), "train.seed=1")
    assert set(other.jobs) < set(plan.jobs), "a name changes nothing of a run"


def test_what_a_machine_lacks_refuses_one_setting() -> None:
    def find(job: JobConfig) -> list[Problem]:
        return [Problem("/train/precision", "no.")] * (job.require_train().precision == "fp16")

    base = load_base()
    plan = make_plan_of_axes(base, [parse_axis("precision", base)], find)
    assert [row.label for _, row in plan.list_refused()] == ["fp16"]


def test_a_grid_has_every_combination() -> None:
    base = load_base()
    axes = [parse_axis(text, base) for text in ("alpha=0,1", "train.seed=1,2,3")]
    grid: Axis = cross_axes(axes)
    found: list[Any] = [dict(each.overrides) for each in grid.settings]
    assert grid.name == "alpha × train.seed" and len(found) == 6
    assert found[1] == {"loss.alpha": 0, "train.seed": 2}


def test_a_job_that_trains_no_student_is_refused() -> None:
    config = load_config(AUSTEN / "job.yaml", ["kind=precompute"])
    with pytest.raises(ConfigError, match="does not train one student"):
        make_short_job(config)
