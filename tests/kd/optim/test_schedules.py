"""Schedules: the rates against their formulas, the groups' proportions, and a permanent cut."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from kd.config.optimisation.rates import SCHEDULER_KWARGS, ScheduleArgument
from kd.config.train import TrainConfig
from kd.errors import TrainingError
from kd.optim.schedules import list_rates, make_scheduler, observe_evaluation, scale_rates

STEPS = 40
WARMUP = 8
CASES: dict[str, dict[str, ScheduleArgument]] = {
    "linear": {},
    "cosine": {},
    "cosine_with_restarts": {"num_cycles": 2},
    "polynomial": {"power": 2.0, "lr_end": 0.1},
    "constant": {},
    "constant_with_warmup": {},
    "inverse_sqrt": {"timescale": 10},
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr": 0.2},
    "warmup_stable_decay": {"num_decay_steps": 10, "min_lr_ratio": 0.2},
    "onecycle": {"div_factor": 10.0, "final_div_factor": 100.0},
    "step": {"step_size": 10, "gamma": 0.5},
    "multistep": {"milestones": (12, 30), "gamma": 0.2},
    "reduce_lr_on_plateau": {"patience": 3},
}


def bend(progress: float) -> float:
    return (1 + math.cos(math.pi * progress)) / 2


# The rate before step t, as a share of the peak; of the steps after the warm-up, p have passed.
AFTER_WARMUP: dict[str, Callable[[int, float], float]] = {
    "linear": lambda t, p: 1 - p,
    "cosine": lambda t, p: bend(p),
    "cosine_with_restarts": lambda t, p: bend(2 * p % 1),
    "polynomial": lambda t, p: 0.05 + 0.95 * (1 - p) ** 2,
    "constant_with_warmup": lambda t, p: 1.0,
    "inverse_sqrt": lambda t, p: math.sqrt(10 / (t + 10 - WARMUP)),
    "cosine_with_min_lr": lambda t, p: 0.1 + 0.9 * bend(p),
    "cosine_warmup_with_min_lr": lambda t, p: 0.1 + 0.9 * bend(p),
    "step": lambda t, p: 0.5 ** ((t - WARMUP) // 10),
    "multistep": lambda t, p: 0.2 ** ((t >= 12) + (t >= 30)),
    "reduce_lr_on_plateau": lambda t, p: 1.0,  # without evaluations
    "warmup_stable_decay": lambda t, p: 1.0 if t < 30 else 0.2 + 0.8 * bend((t - 30) / 10),
}


def expected(name: str, t: int) -> float:
    if name == "constant":
        return 1.0
    if name == "onecycle":
        rise = WARMUP - 1  # torch's cycle peaks on the last step of the rise
        if t <= rise:
            return 1 + (0.1 - 1) * bend(t / rise)
        return 0.001 + (1 - 0.001) * bend((t - rise) / (STEPS - 1 - rise))
    if name == "cosine_warmup_with_min_lr":
        t += 1  # it begins above zero: what others have before step t + 1, it has before step t
        return t / WARMUP if t <= WARMUP else AFTER_WARMUP[name](t, (t - WARMUP) / (STEPS - WARMUP))
    lowest = 0.2 if name == "warmup_stable_decay" else 0.0  # its floor holds for the warm-up too
    if t < WARMUP:
        return lowest + (1 - lowest) * t / WARMUP
    return AFTER_WARMUP[name](t, (t - WARMUP) / (STEPS - WARMUP))


def make_options(
    name: str, arguments: dict[str, ScheduleArgument], warmup: int = WARMUP, **changes: object
) -> TrainConfig:
    asked = {
        "lr_scheduler_type": name,
        "lr_scheduler_kwargs": arguments,
        "warmup_steps": warmup,
        **changes,
    }
    return TrainConfig(max_steps=STEPS, learning_rate=2.0).model_copy(update=asked)


def make_parts(options: TrainConfig, steps: int = STEPS) -> tuple[torch.optim.Optimizer, object]:
    """Two groups, of which the second learns at a quarter of the first one's rate."""
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (2.0, 0.5)]
    optimizer = torch.optim.SGD(groups, lr=2.0)
    return optimizer, make_scheduler(optimizer, options, steps)


def rates(
    optimizer: torch.optim.Optimizer, scheduler: object, steps: int = STEPS
) -> list[list[float]]:
    seen = []
    for _ in range(steps):
        seen.append([group["lr"] for group in optimizer.param_groups])
        assert scheduler.get_last_lr() == seen[-1]
        optimizer.step()
        scheduler.step()
    return seen


def test_every_schedule_of_the_configuration_is_tested() -> None:
    assert CASES.keys() == SCHEDULER_KWARGS.keys()


@pytest.mark.parametrize("name", CASES)
def test_rates_are_those_of_the_formula_in_every_group(name: str) -> None:
    found = rates(*make_parts(make_options(name, CASES[name])))
    for t, (head, embeddings) in enumerate(found):
        assert head == pytest.approx(2.0 * expected(name, t), rel=1e-9, abs=1e-12), t
        assert embeddings == pytest.approx(0.5 * expected(name, t), rel=1e-9, abs=1e-12), t


@pytest.mark.parametrize("steps", [1, 2, 3, 10, 33])
@pytest.mark.parametrize("warmup", [0, 1, 2, 9])
def test_one_cycle_of_any_length(steps: int, warmup: int) -> None:
    options = make_options("onecycle", {}, warmup)
    if warmup >= steps:
        with pytest.raises(TrainingError, match="onecycle cannot be made"):
            make_parts(options, steps)
        return
    found = [head for head, _ in rates(*make_parts(options, steps), steps)]
    assert all(0 < rate <= 2.0 for rate in found)
    if steps >= 10:
        assert max(found) == pytest.approx(2.0, rel=0.1) and found[-1] < 0.01


def test_one_cycle_keeps_the_momentum() -> None:
    adam = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=2.0, betas=(0.9, 0.95))
    scheduler = make_scheduler(adam, make_options("onecycle", {}), STEPS)
    for _ in range(STEPS):
        adam.step()
        scheduler.step()
        assert adam.param_groups[0]["betas"] == (0.9, 0.95)


@pytest.mark.parametrize(
    ("arguments", "warmup", "message"),
    [
        ({"pct_start": 0.3}, 5, "give one of them"),
        ({"pct_start": 1.0}, 0, "less than 1"),
        ({}, STEPS, "less than 1"),
    ],
)
def test_rise_of_one_cycle_that_makes_no_sense_is_refused(
    arguments: dict[str, float], warmup: int, message: str
) -> None:
    asked = {"lr_scheduler_kwargs": arguments, "warmup_steps": warmup}
    # A job with epochs has no number of steps that the configuration could check.
    with pytest.raises(TrainingError, match=message) as caught:
        make_parts(make_options("onecycle", {}, 0).model_copy(update=asked))
    assert "lr_scheduler_kwargs" in caught.value.remedy


def test_schedule_that_lacks_an_argument_says_so() -> None:
    options = make_options("cosine", {}).model_copy(
        update={"lr_scheduler_type": "warmup_stable_decay"}
    )
    with pytest.raises(TrainingError, match="warmup_stable_decay cannot be made") as caught:
        make_parts(options)
    assert "lr_scheduler_kwargs" in caught.value.remedy


@pytest.mark.parametrize("name", CASES)
def test_a_cut_rate_stays_cut(name: str) -> None:
    whole = rates(*make_parts(make_options(name, CASES[name])))
    optimizer, scheduler = make_parts(make_options(name, CASES[name]))
    before = rates(optimizer, scheduler, 15)
    scale_rates(scheduler, 0.25)
    after = rates(optimizer, scheduler, STEPS - 15)
    assert before == whole[:15]
    assert after == [[0.25 * rate for rate in step] for step in whole[15:]]


# ---------------------------------------------------------------------- falls of the rate


def test_milestones_outside_of_the_run_are_refused() -> None:
    for milestones in ((WARMUP, 20), (20, STEPS)):
        with pytest.raises(TrainingError, match="must be steps after the 8 of the warm-up"):
            make_parts(make_options("multistep", {"milestones": milestones}))


def test_falls_without_a_warm_up_are_those_of_torch() -> None:
    options = make_options("step", {"step_size": 7}, 0)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    own = rates(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 7))
    assert list_rates(options, STEPS) == pytest.approx([rate for (rate,) in own])
    options = make_options("multistep", {"milestones": (3, 20)}, 0)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    own = rates(optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 20]))
    assert list_rates(options, STEPS) == pytest.approx([rate for (rate,) in own])


#: Held-out losses of evaluations, one after every third step.
LOSSES = [5.0, 4.0, 4.1, 4.2, 3.0, 3.1, 3.2, 3.3, 3.4, 3.5, 3.6, 3.7]


def follow(losses: list[float], cut: int | None = None) -> list[float]:
    """The rate after each evaluation; saved and restored after ``cut`` of them."""
    options = make_options("reduce_lr_on_plateau", {"patience": 1, "factor": 0.5, "min_lr": 0.3})
    optimizer, scheduler = make_parts(options)
    seen = []
    for number, loss in enumerate(losses):
        if number == cut:
            saved = json.loads(json.dumps(scheduler.state_dict(), allow_nan=False))
            groups = optimizer.state_dict()
            optimizer, scheduler = make_parts(options)
            optimizer.load_state_dict(groups)
            scheduler.load_state_dict(saved)
        for _ in range(3):
            optimizer.step()
            scheduler.step()
        observe_evaluation(scheduler, loss)
        seen.append(scheduler.get_last_lr()[0])
    return seen


def test_the_rate_falls_where_the_held_out_loss_does_not() -> None:
    found = follow(LOSSES)
    assert found[:2] == [0.75, 1.5], "the warm-up"
    # An evaluation of the warm-up counts for nothing: 4.1 is the first, and 4.2 the first that is
    # worse; then every second one.
    assert found[2:] == [2.0, 2.0, 2.0, 2.0, 1.0, 1.0, 0.5, 0.5, 0.3, 0.3]


@pytest.mark.parametrize("cut", range(0, len(LOSSES), 2))
def test_a_restored_plateau_goes_on_as_it_was(cut: int) -> None:
    assert follow(LOSSES, cut) == follow(LOSSES)
