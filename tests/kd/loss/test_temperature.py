"""A learned temperature, against an independent Adam by autograd, on dense models."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from kd.config.jobfile import parse_config
from kd.config.loss import LearnedTemperature, LossConfig, Ramp
from kd.errors import ConfigError
from kd.loss import temperature as rules
from kd.loss.temperature import (
    ADVERSARY_WEIGHT,
    BETAS,
    LEVEL_DECAY,
    StepStatistics,
    TemperatureControl,
)
from kd.training.lookahead import compute_lookahead_gradient

V = 24
WIDTH = 6
ROWS = 64

pytestmark = pytest.mark.usefixtures("one_thread")


def make_learned_config(mode: str, **options: Any) -> LearnedTemperature:
    target = {"target_entropy": 1.5} if mode == "entropy" else {}
    return LearnedTemperature.model_validate({"mode": mode, **target, **options})


def make_control(mode: str, steps: int = 200, **options: Any) -> TemperatureControl:
    return TemperatureControl(make_learned_config(mode, **options), steps)


# ---------------------------------------------------------------------- the task


class Task:
    """A teacher (a fixed random network), and a student too narrow for it; float64 throughout.

    Labels are drawn from softmax(sharpness z), with z the teacher's logits: at 1 the teacher is as
    sure as it is right, at 0.6 it is too sure. ``exact`` uses the expectation over labels, so that
    the loss has no noise but that of its inputs.
    """

    def __init__(self, sharpness: float = 1.0, teacher_only: bool = False, seed: int = 0) -> None:
        self.sharpness = sharpness
        self.teacher_only = teacher_only
        self.generator = torch.Generator().manual_seed(seed)
        self.inner = self.normal(WIDTH, 32) * 0.7
        self.outer = self.normal(32, V) * 0.5
        self.student = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, V)).double()
        for parameter in self.student.parameters():
            nn.init.normal_(parameter, std=0.4, generator=self.generator)
        self.optimizer = torch.optim.Adam(self.student.parameters(), 1e-2)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def draw(self) -> tuple[Tensor, Tensor]:
        """Draw inputs, and the teacher's logits for them."""
        x = self.normal(ROWS, WIDTH)
        return x, torch.tanh(x @ self.inner) @ self.outer

    def kd(self, x: Tensor, z: Tensor, temperature: float | Tensor) -> Tensor:
        """T^2 KL(p_T || q_T), or KL(p_T || q), mean over the rows."""
        own = 1.0 if self.teacher_only else temperature
        logp = (z / temperature).log_softmax(1)
        logq = (self.student(x) / own).log_softmax(1)
        return own**2 * (logp.exp() * (logp - logq)).sum(1).mean()

    def ce(self, x: Tensor, z: Tensor) -> Tensor:
        p = (self.sharpness * z).softmax(1)
        return -(p * self.student(x).log_softmax(1)).sum(1).mean()

    def entropy(self, z: Tensor, temperature: float) -> float:
        logp = (z / temperature).log_softmax(1)
        return float(-(logp.exp() * logp).sum(1).mean())

    def ahead(self, x: Tensor, z: Tensor, temperature: float) -> float:
        def slope() -> float:
            leaf = torch.tensor(temperature, dtype=torch.float64, requires_grad=True)
            return float(torch.autograd.grad(self.kd(x, z, leaf), leaf)[0]) * temperature

        parameters = list(self.student.parameters())
        return compute_lookahead_gradient(
            parameters, lambda: self.kd(x, z, temperature), lambda: self.ce(x, z), slope
        )


def train(task: Task, temperature: TemperatureControl, steps: range) -> list[float]:
    """The shortest possible loop; returns T of every step."""
    used = []
    for step in steps:
        x, z = task.draw()
        T = temperature.track(step)
        loss = task.kd(x, z, T)
        task.optimizer.zero_grad()
        loss.backward()
        value = temperature.evaluate(step)
        ahead = task.ahead(x, z, value) if temperature.is_lookahead_step(step) else None
        task.optimizer.step()
        temperature.step(step, StepStatistics(float(loss.detach()), task.entropy(z, value), ahead))
        used.append(value)
    return used


# ---------------------------------------------------------------------- numbers and schedules


@pytest.mark.parametrize("config", [1.5, Ramp(schedule="linear", start=2.0, end=1.0)])
def test_what_is_not_learned_has_no_state_and_no_gradient(config: float | Ramp) -> None:
    temperature = TemperatureControl(config, 11)
    assert [temperature.track(0), temperature.track(10)] == (
        [1.5, 1.5] if config == 1.5 else [2.0, 1.0]
    )
    before = temperature.evaluate(5)
    temperature.step(5, StepStatistics(kd=1.0, entropy=2.0))
    assert temperature.evaluate(5) == before
    assert (
        not temperature.state_dict()
        and not temperature.learned
        and not temperature.is_lookahead_step(9)
    )
    assert temperature.report() == {
        "temperature": before,
        "temperature_gradient": None,
        "temperature_margin": None,
    }
    assert temperature.describe_alarm() is None


# ---------------------------------------------------------------------- how theta moves


def test_the_leaf_gathers_what_every_micro_batch_says() -> None:
    task = Task()
    temperature = make_control("adversarial")
    T = temperature.track(0)
    assert (
        isinstance(T, Tensor)
        and T.requires_grad
        and T.dtype == torch.float64
        and float(T.detach()) == 1.0
    )
    batches = [task.draw(), task.draw()]
    for x, z in batches:
        task.kd(x, z, T).backward()
    h = 1e-5
    with torch.no_grad():
        expected = sum(
            float(task.kd(x, z, 1.0 + h) - task.kd(x, z, 1.0 - h)) for x, z in batches
        ) / (2 * h)
    assert T.grad is not None and T.grad.item() == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("mode", ["entropy", "lookahead", "teacher_only"])
def test_modes_that_do_not_follow_the_loss_do_not_pay_for_its_gradient(mode: str) -> None:
    assert isinstance(make_control(mode).track(0), float)


def compute_reference(
    config: LearnedTemperature, slopes: Callable[[int, Tensor], Tensor | None], steps: int
) -> list[float]:
    """T of every step, by torch's Adam and autograd through theta, for a given slope in log T."""
    share = math.log(config.init / config.min) / math.log(config.max / config.min)
    theta = torch.tensor(math.log(share / (1 - share)), dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([theta], config.learning_rate, betas=BETAS, eps=1e-12)
    found = []
    for step in range(steps):
        T = config.min * (config.max / config.min) ** torch.sigmoid(theta)
        found.append(T.item())
        slope = slopes(step, T)
        if slope is not None:
            adam.zero_grad()
            prior = 0.0 if config.mode == "entropy" else rules.PRIOR * (T / config.init).log() ** 2
            (slope.detach() * T.log() + prior).backward()
            adam.step()
    return found


def test_adversarial_is_adam_on_the_reversed_gradient_of_the_log_of_the_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ramp = 20
    monkeypatch.setattr(rules, "RAMP_STEPS", ramp)
    monkeypatch.setattr(rules, "PRIOR", 0.3)
    config = make_learned_config("adversarial", learning_rate=0.05)
    task = Task()
    level = [0.0]

    def slope(step: int, T: Tensor) -> Tensor:
        x, z = task.draw()
        leaf = T.detach().clone().requires_grad_()
        loss = task.kd(x, z, leaf)
        loss.backward()
        task.optimizer.step()
        task.optimizer.zero_grad()
        level[0] = LEVEL_DECAY * level[0] + (1 - LEVEL_DECAY) * loss.item()
        mean = level[0] / (1 - LEVEL_DECAY ** (step + 1))
        assert leaf.grad is not None
        return -ADVERSARY_WEIGHT * min(step / ramp, 1.0) * leaf.grad * T / mean

    expected = compute_reference(config, slope, 60)
    found = train(Task(), TemperatureControl(config, 60), range(60))
    assert found == pytest.approx(expected, rel=1e-9)
    assert max(found) > 1.01, "and it has moved"


def test_entropy_is_adam_on_what_is_above_the_target() -> None:
    config = make_learned_config("entropy", target_entropy=1.2, learning_rate=0.05)
    task = Task()
    expected = compute_reference(
        config, lambda _, T: torch.tensor(task.entropy(task.draw()[1], T.item()) - 1.2), 60
    )
    assert train(Task(), TemperatureControl(config, 60), range(60)) == pytest.approx(
        expected, rel=1e-9
    )


@pytest.mark.parametrize("mode", ["lookahead", "teacher_only"])
def test_held_out_modes_move_every_interval_with_as_much_as_its_steps(mode: str) -> None:
    config = make_learned_config(mode, interval=3, learning_rate=0.02)
    faster = config.model_copy(update={"learning_rate": 0.06})
    temperature = TemperatureControl(config, 30)
    found = []
    for step in range(30):
        found.append(temperature.evaluate(step))
        temperature.step(
            step,
            StepStatistics(
                1.0,
                1.0,
                lookahead_slope=math.cos(step) - 1.5
                if temperature.is_lookahead_step(step)
                else None,
            ),
        )
    expected = compute_reference(
        faster, lambda at, _: torch.tensor(math.cos(at) - 1.5) if at % 3 == 2 else None, 30
    )
    assert found == pytest.approx(expected, rel=1e-9) and found[2] != found[3] == found[5]


def test_the_scale_of_the_loss_changes_nothing_and_an_overflow_moves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rules, "RAMP_STEPS", 0)
    moved = []
    for scale in (1.0, 2.0**16):
        temperature = make_control("adversarial")
        for step in range(5):
            T = temperature.track(step)
            assert isinstance(T, Tensor)
            (T**2 * scale).backward()
            temperature.step(step, StepStatistics(0.5, 1.0, loss_scale=scale))
        moved.append(temperature.evaluate(5))
    assert moved[0] == moved[1] > 1.0
    T = temperature.track(5)
    assert isinstance(T, Tensor)
    (T * math.inf).backward()
    temperature.step(5, StepStatistics(math.nan, math.nan, loss_scale=2.0**16))
    assert temperature.evaluate(6) == moved[0]
    assert all(bool(value.isfinite()) for value in temperature.state_dict().values())


def test_the_prior_alone_brings_it_back_to_where_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "PRIOR", 1.0)
    temperature = make_control("teacher_only", interval=1, init=0.8, learning_rate=0.03)
    for step in range(40):
        temperature.step(step, StepStatistics(1.0, 1.0, lookahead_slope=-1.5))
    assert temperature.evaluate(0) > 1.1
    for step in range(400):
        temperature.step(step, StepStatistics(1.0, 1.0, lookahead_slope=0.0))
    assert temperature.evaluate(0) == pytest.approx(0.8, rel=0.02)


# ---------------------------------------------------------------------- where the modes end


def test_the_adversary_makes_the_loss_larger_and_settles_between_the_bounds() -> None:
    task = Task()
    temperature = make_control("adversarial", 500)
    used = train(task, temperature, range(500))
    x, z = task.draw()
    assert task.kd(x, z, used[-1]) > task.kd(x, z, 1.0)
    assert 1.05 < used[-1] < 1.8 and abs(used[-1] / used[-100] - 1) < 0.03


@pytest.mark.parametrize("target", [1.6, 2.4])
def test_the_entropy_is_held_at_its_target_for_any_student(target: float) -> None:
    task = Task()
    temperature = make_control("entropy", 500, target_entropy=target, learning_rate=0.03)
    used = train(task, temperature, range(500))
    assert (used[-1] < 0.95) if target == 1.6 else (used[-1] > 1.05)
    z = torch.cat([task.draw()[1] for _ in range(50)])
    late = sum(used[-100:]) / 100
    assert task.entropy(z, late) == pytest.approx(target, abs=0.02)


def test_a_target_that_no_temperature_meets_rings_the_alarm() -> None:
    temperature = make_control("entropy", 300, target_entropy=3.1, learning_rate=0.1)
    messages = []
    for step in range(300):
        train(Task(), temperature, range(step, step + 1))
        messages += [message for message in [temperature.describe_alarm()] if message]
    assert len(messages) == 1 and "target_entropy (now 3.1)" in messages[0]


@pytest.mark.parametrize(("sharpness", "best"), [(0.6, 1 / 0.6), (1.0, 1.0), (1.6, 1 / 1.6)])
def test_a_teacher_alone_tempered_is_made_as_sure_as_it_is_right(
    sharpness: float, best: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "PRIOR", 0.001)
    task = Task(sharpness, teacher_only=True)
    used = train(
        task,
        make_control("teacher_only", 300, interval=5, learning_rate=0.02),
        range(300),
    )
    assert used[-1] == pytest.approx(best, rel=0.03)


@pytest.mark.parametrize(("sharpness", "side"), [(0.6, -1), (1.0, 0), (1.6, 1)])
def test_looking_ahead_moves_both_temperatures_towards_the_truth(
    sharpness: float, side: int
) -> None:
    """With the student tempered too, a teacher that is too sure needs T < 1: s = z / T is less
    sure.
    """
    used = train(Task(sharpness), make_control("lookahead", 300, interval=5), range(300))
    if side == 0:
        assert used[-1] == pytest.approx(1.0, abs=0.03)
    else:
        assert side * math.log(used[-1]) > 0.1


@pytest.mark.long
@pytest.mark.parametrize(("teacher_only", "bound"), [(False, 0.5), (True, 2.0)])
def test_plain_minimisation_which_is_not_offered_runs_to_a_bound(
    teacher_only: bool, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason that there is no such mode: theta that descends the loss ends where T ends."""
    monkeypatch.setattr(rules, "PRIOR", 0.0)
    task = Task(teacher_only=teacher_only)
    temperature = make_control("teacher_only", interval=1, learning_rate=0.02)
    for step in range(500):
        x, z = task.draw()
        leaf = torch.tensor(temperature.evaluate(step), dtype=torch.float64, requires_grad=True)
        loss = task.kd(x, z, leaf)
        task.optimizer.zero_grad()
        loss.backward()
        task.optimizer.step()
        assert leaf.grad is not None
        temperature.step(
            step, StepStatistics(loss.item(), 1.0, lookahead_slope=leaf.grad.item() * leaf.item())
        )
    assert abs(math.log(temperature.evaluate(0) / bound)) < 0.05 * math.log(4)


@pytest.mark.parametrize("slope", [-1e9, 1e9])
def test_it_stays_inside_its_bounds_and_comes_back_from_them(slope: float) -> None:
    temperature = make_control(
        "teacher_only", interval=1, min=0.8, max=1.6, init=1.0, learning_rate=1.0
    )
    for step in range(100):
        temperature.step(step, StepStatistics(1.0, 1.0, lookahead_slope=slope))
        assert 0.8 < temperature.evaluate(step) < 1.6
    assert temperature.report()["temperature_margin"] == pytest.approx(0.01, rel=1e-6)
    for step in range(100):
        temperature.step(step, StepStatistics(1.0, 1.0, lookahead_slope=-slope))
    assert temperature.evaluate(100) > 1.5 if slope > 0 else temperature.evaluate(100) < 0.9


# ---------------------------------------------------------------------- report and alarm


def test_the_report_tells_of_the_step_that_was_taken() -> None:
    temperature = make_control("entropy", min=0.5, max=4.0, init=2.0, target_entropy=1.0)
    temperature.step(0, StepStatistics(1.0, 1.5))
    share = math.log(2.0 / 0.5) / math.log(8)
    assert temperature.report() == {
        "temperature": pytest.approx(2.0, rel=1e-12),
        "temperature_gradient": pytest.approx(0.5 * math.log(8) * share * (1 - share), rel=1e-9),
        "temperature_margin": pytest.approx(1 - share, rel=1e-9),
    }
    assert temperature.evaluate(1) < 2.0, "while the next one has moved on"


def test_the_alarm_rings_once_each_time_the_share_of_steps_at_a_bound_crosses() -> None:
    temperature = make_control("teacher_only", interval=1, learning_rate=0.5)
    rung = []
    slopes = [-1.0] * 12 + [1.0] * 8 + [0.0] * 200 + [-1.0] * 80
    for step, slope in enumerate(slopes):
        if step == 100:
            temperature.taken += 8000  # enough quiet steps to bring the share down again
        temperature.step(step, StepStatistics(1.0, 1.0, lookahead_slope=slope))
        if message := temperature.describe_alarm():
            rung.append((step, message))
    assert len(rung) == 2 and rung[0][0] < 12 and rung[1][0] > 220
    assert all("loss.temperature.max (now 2), or set a fixed" in message for _, message in rung)


@pytest.mark.long
def test_no_alarm_rings_where_no_mode_hugs_a_bound() -> None:
    for mode in ("adversarial", "lookahead", "teacher_only"):
        temperature = make_control(mode, 200)
        task = Task(teacher_only=mode == "teacher_only")
        for step in range(200):
            train(task, temperature, range(step, step + 1))
            assert temperature.describe_alarm() is None, mode


# ---------------------------------------------------------------------- resume


@pytest.mark.parametrize("mode", ["adversarial", "entropy", "lookahead", "teacher_only"])
def test_stopped_and_resumed_equals_uninterrupted_bit_for_bit(mode: str, tmp_path: Path) -> None:
    """Through safetensors into a new control, with the alarm's memory."""
    options = {"interval": 7, "max": 1.2, "learning_rate": 0.5}
    whole = make_control(mode, **options)
    train(Task(), whole, range(60))

    first = make_control(mode, **options)
    task = Task()
    train(task, first, range(23))
    save_file(first.state_dict(), tmp_path / "extras.safetensors")
    second = make_control(mode, **options)
    second.load_state_dict(load_file(tmp_path / "extras.safetensors"))
    train(task, second, range(23, 60))

    expected = whole.state_dict()
    assert expected.keys() == second.state_dict().keys() and expected["moves"] > 0
    for name, tensor in second.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    assert second.report() == whole.report() and second.evaluate(60) == whole.evaluate(60)


@pytest.mark.parametrize("mode", ["minimise", "minimize"])
def test_plain_minimisation_is_refused_with_the_reason(mode: str) -> None:
    job = {
        "kind": "precompute",
        "teacher": {"model": "teacher"},
        "data": {"train": "text.txt"},
        "loss": {"temperature": {"mode": mode}},
    }
    reason = r"loss\.temperature\.mode: .*for every student.*moves to a bound.*Use adversarial"
    with pytest.raises(ConfigError, match=reason):
        parse_config(job)


def test_the_students_optimiser_has_nothing_to_train_in_it() -> None:
    assert not any(
        parameter.requires_grad for parameter in make_control("adversarial").parameters()
    )


def test_the_configuration_is_where_it_comes_from() -> None:
    config = LossConfig.model_validate({"temperature": {"mode": "teacher_only", "init": 1.3}})
    temperature = TemperatureControl(config.temperature, 10)
    assert temperature.follows_held_out and temperature.evaluate(0) == pytest.approx(1.3)
