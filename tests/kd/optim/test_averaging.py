"""Averages of weights: their values, the student that serves them, and its own weights after."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from kd.config.train import TrainConfig
from kd.optim.averaging import Averager, serving, use_served_weights
from kd.optim.optimizers import make_optimizer
from tests.support.kd.students import make_llama

CPU = torch.device("cpu")


def make_student(tied: bool = True) -> LlamaForCausalLM:
    return make_llama(24, 8, layers=1, tie_word_embeddings=tied)


def make_parts(
    optim: str, decay: float | None, student: nn.Module
) -> tuple[torch.optim.Optimizer, Averager | None]:
    options = TrainConfig(
        max_steps=9, optim=optim, learning_rate=0.01, lr_scheduler_type="constant"
    )
    return make_optimizer(student, (), options, CPU), Averager(student, decay) if decay else None


def train(
    student: nn.Module, optimizer: torch.optim.Optimizer, ema: Averager | None, steps: int = 5
) -> list[dict[str, torch.Tensor]]:
    """The weights after each step."""
    seen = []
    for _ in range(steps):
        tokens = torch.randint(24, (2, 6))
        student(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if ema is not None:
            ema.update()
        seen.append(weights(student))
    return seen


def weights(student: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in student.named_parameters()}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.999])
def test_moving_average_is_the_weighted_sum_of_all_weights_so_far(decay: float) -> None:
    student = make_student()
    start = weights(student)
    optimizer, ema = make_parts("adamw", decay, student)
    assert ema is not None
    history = [start, *train(student, optimizer, ema, 12)]
    use_served_weights(student, optimizer, ema)
    decays = [min(decay, (1 + n) / (10 + n)) for n in range(1, 13)]
    shares = [1.0] + [0.0] * 12
    for n, d in enumerate(decays, 1):
        shares = [share * d for share in shares]
        shares[n] = 1 - d
    assert sum(shares) == pytest.approx(1)
    for name, parameter in student.named_parameters():
        expected = sum(
            share * each[name].double() for share, each in zip(shares, history, strict=True)
        )
        assert torch.allclose(parameter.double(), expected, rtol=1e-5, atol=1e-7), name


def test_schedule_free_serves_the_mean_of_its_points() -> None:
    """At a constant rate x_n is the mean of z_1 ... z_n, and y = 0.1 z + 0.9 x trains on."""
    student = make_student()
    optimizer, _ = make_parts("schedule_free", None, student)
    points = []
    for _ in range(4):
        train(student, optimizer, None, 1)
        points.append({p: optimizer.state[p]["z"].double() for p in student.parameters()})
    trained = weights(student)
    with serving(student, optimizer, None):
        for name, parameter in student.named_parameters():
            mean = sum(point[parameter] for point in points) / 4
            assert torch.allclose(parameter.double(), mean, atol=1e-6), name
            mixed = 0.1 * points[-1][parameter] + 0.9 * mean
            assert torch.allclose(trained[name].double(), mixed, atol=1e-6), name


@pytest.mark.parametrize(
    ("optim", "decay"), [("adamw", 0.9), ("schedule_free", None), ("schedule_free", 0.9)]
)
def test_serving_gives_the_weights_back_bit_for_bit_and_training_does_not_notice(
    optim: str, decay: float | None
) -> None:
    ends = []
    for looks in (False, True):
        student = make_student()
        optimizer, ema = make_parts(optim, decay, student)
        torch.manual_seed(1)
        for _ in range(4):
            train(student, optimizer, ema, 2)
            if looks:
                before = weights(student)
                with serving(student, optimizer, ema):
                    assert not same(weights(student), before), (
                        "it serves other weights than it trains"
                    )
                assert same(weights(student), before)
        ends.append(weights(student))
    assert same(*ends)


def test_serving_gives_the_weights_back_when_the_evaluation_fails() -> None:
    student = make_student()
    optimizer, ema = make_parts("schedule_free", 0.9, student)
    train(student, optimizer, ema)
    before = weights(student)
    with pytest.raises(ZeroDivisionError), serving(student, optimizer, ema):
        _ = 1 / 0
    assert same(weights(student), before)
    train(student, optimizer, ema, 1)  # schedule-free refuses a step in its other mode


def test_serve_leaves_what_serving_shows() -> None:
    for optim, decay in (
        ("adamw", 0.9),
        ("schedule_free", None),
        ("schedule_free", 0.9),
        ("adamw", None),
    ):
        student = make_student()
        optimizer, ema = make_parts(optim, decay, student)
        own = train(student, optimizer, ema)[-1]
        with serving(student, optimizer, ema):
            shown = weights(student)
        use_served_weights(student, optimizer, ema)
        assert same(weights(student), shown)
        assert same(shown, own) == ((optim, decay) == ("adamw", None))


def test_without_an_average_the_student_serves_its_own_weights_where_they_lie() -> None:
    student = make_student()
    optimizer, _ = make_parts("adamw", None, student)
    train(student, optimizer, None)
    storage = {name: parameter.data_ptr() for name, parameter in student.named_parameters()}
    before = weights(student)
    with serving(student, optimizer, None):
        assert same(weights(student), before)
    assert storage == {name: parameter.data_ptr() for name, parameter in student.named_parameters()}


def test_tied_weights_are_kept_once_and_frozen_ones_not_at_all() -> None:
    tied = Averager(make_student(), 0.9)
    untied = Averager(make_student(tied=False), 0.9)
    assert "lm_head/weight" in untied.state_dict() and "lm_head/weight" not in tied.state_dict()
    student = make_student()
    student.model.requires_grad_(False)
    student.model.norm.weight.requires_grad_(True)
    assert list(Averager(student, 0.9).state_dict()) == ["model/norm/weight", "updates"]
    assert not list(Averager(student, 0.9).parameters()), "nothing in it is trained"


def test_state_dict_is_all_of_it() -> None:
    student = make_student()
    optimizer, ema = make_parts("adamw", 0.99, student)
    train(student, optimizer, ema, 3)
    assert ema is not None
    kept = {name: tensor.clone() for name, tensor in ema.state_dict().items()}
    train(student, optimizer, ema, 2)
    late = {name: tensor.clone() for name, tensor in ema.state_dict().items()}
    again = make_student()
    optimizer, other = make_parts("adamw", 0.99, again)
    assert other is not None
    other.load_state_dict(kept)
    history = []
    for parameter, found in zip(again.parameters(), student.parameters(), strict=True):
        history.append((parameter, found))
        with torch.no_grad():
            parameter.copy_(found)
    other.update()
    ema.load_state_dict(kept)
    ema.update()
    assert same(dict(other.state_dict()), dict(ema.state_dict())) and not same(late, kept)
    assert int(other.updates) == 4


def test_average_of_half_precision_weights_is_kept_in_float32() -> None:
    layer = nn.Linear(4, 4).bfloat16()
    ema = Averager(layer, 0.999)
    assert ema.get_buffer("weight").dtype == torch.float32
    ema.fill_student()
    assert layer.weight.dtype == torch.bfloat16
