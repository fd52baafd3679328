"""The slope of the look-ahead: against autograd's second derivative, and on real models."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from cache.codec import Codec
from cache.profiles.whole import DenseReading
from cache.records import Records, Sequences
from cache.rounding import RecordPositions
from kd.config.data import DataConfig
from kd.config.loss import LearnedTemperature, LossConfig
from kd.errors import TrainingError
from kd.loss.decoder import TargetDecoder
from kd.loss.fused import compute_distillation_loss
from kd.loss.objective import Objective
from kd.loss.temperature import TemperatureControl
from kd.models.layers import compute_hidden_states
from kd.models.lm_head import find_lm_head
from kd.models.precision import Precision
from kd.text.batches import PlainText, make_batch
from kd.text.corpus import Corpus
from kd.text.packing import Document, pack_documents
from kd.training import lookahead
from kd.training.lookahead import LookAhead, compute_lookahead_gradient
from tests.support.kd.students import make_llama

V = 40
CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("one_thread")


def cosine_slope(
    parameters: list[Tensor],
    loss: Callable[[Tensor], Tensor],
    held_out_loss: Tensor,
    temperature: float,
) -> float:
    """-d cos(h, g(T)) / d log T by differentiating the gradient itself."""
    leaf = torch.tensor(temperature, dtype=torch.float64, requires_grad=True)
    g = torch.autograd.grad(loss(leaf), parameters, create_graph=True)
    h = torch.autograd.grad(held_out_loss, parameters)
    flat_g, flat_h = (torch.cat([part.flatten() for part in each]) for each in (g, h))
    (slope,) = torch.autograd.grad(
        torch.nn.functional.cosine_similarity(flat_g, flat_h, dim=0), leaf
    )
    return -slope.item() * temperature


def kd(z: Tensor, s: Tensor, temperature: float | Tensor, teacher_only: bool) -> Tensor:
    own = 1.0 if teacher_only else temperature
    logp = (z / temperature).log_softmax(1)
    logq = (s / own).log_softmax(1)
    return own**2 * (logp.exp() * (logp - logq)).sum()


# ---------------------------------------------------------------------- the formula


class Toy:
    def __init__(self) -> None:
        torch.manual_seed(3)
        self.student = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 11)).double()
        self.x = torch.randn(2, 30, 5).double()
        self.z = torch.randn(2, 30, 11).double() * 2
        self.gold = torch.randint(0, 11, (30,))
        self.parameters = list(self.student.parameters())

    def loss(self, temperature: float | Tensor, teacher_only: bool = False) -> Tensor:
        return kd(self.z[0], self.student(self.x[0]), temperature, teacher_only)

    def held_out(self) -> Tensor:
        """On other inputs: the formula does not need them to be the same."""
        return nn.functional.cross_entropy(self.student(self.x[1]), self.gold)

    def slope(self, temperature: float, teacher_only: bool = False) -> float:
        leaf = torch.tensor(temperature, dtype=torch.float64, requires_grad=True)
        return float(torch.autograd.grad(self.loss(leaf, teacher_only), leaf)[0]) * temperature

    def gradient(
        self, temperature: float, teacher_only: bool = False, factor: float = 1.0
    ) -> float:
        return compute_lookahead_gradient(
            self.parameters,
            lambda: factor * self.loss(temperature, teacher_only),
            lambda: 7.0 * self.held_out(),
            lambda: factor * self.slope(temperature, teacher_only),
        )


@pytest.mark.parametrize("teacher_only", [False, True])
@pytest.mark.parametrize("temperature", [0.5, 0.9, 1.0, 1.7])
def test_it_is_the_derivative_of_the_cosine(temperature: float, teacher_only: bool) -> None:
    toy = Toy()
    expected = cosine_slope(
        toy.parameters, lambda t: toy.loss(t, teacher_only), toy.held_out(), temperature
    )
    assert abs(expected) > 1e-4
    assert toy.gradient(temperature, teacher_only) == pytest.approx(expected, rel=1e-4)


def test_how_long_a_step_is_does_not_count() -> None:
    toy = Toy()
    assert toy.gradient(1.3, factor=50.0) == pytest.approx(toy.gradient(1.3), rel=1e-9)


def test_the_student_is_left_as_it_was() -> None:
    toy = Toy()
    toy.loss(1.0).backward()
    before = [
        (parameter.detach().clone(), parameter.grad.clone())
        for parameter in toy.parameters
        if parameter.grad is not None
    ]
    toy.gradient(1.2)
    for parameter, (value, gradient) in zip(toy.parameters, before, strict=True):
        assert (
            torch.equal(parameter, value)
            and parameter.grad is not None
            and torch.equal(parameter.grad, gradient)
        )


def test_the_student_is_put_back_when_a_pass_fails() -> None:
    toy = Toy()
    before = [parameter.detach().clone() for parameter in toy.parameters]

    def fails() -> float:
        raise MemoryError

    with pytest.raises(MemoryError):
        compute_lookahead_gradient(toy.parameters, lambda: toy.loss(1.0), toy.held_out, fails)
    assert all(
        torch.equal(parameter, value)
        for parameter, value in zip(toy.parameters, before, strict=True)
    )


def test_without_a_gradient_there_is_no_slope() -> None:
    toy = Toy()
    unused = compute_lookahead_gradient(
        toy.parameters, lambda: 0.0 * toy.loss(1.0), toy.held_out, lambda: toy.slope(1.0)
    )
    same = compute_lookahead_gradient(
        toy.parameters, lambda: toy.loss(1.0), lambda: toy.loss(1.0), lambda: toy.slope(1.0)
    )
    assert unused == same == 0.0


@pytest.mark.parametrize("factor", [math.inf, math.nan])
def test_an_overflow_is_no_slope_and_touches_nothing(factor: float) -> None:
    toy = Toy()
    before = [parameter.detach().clone() for parameter in toy.parameters]
    slope = compute_lookahead_gradient(
        toy.parameters, lambda: factor * toy.loss(1.0), toy.held_out, pytest.fail
    )
    assert math.isnan(slope)
    assert all(
        torch.equal(parameter, value)
        for parameter, value in zip(toy.parameters, before, strict=True)
    )


# ---------------------------------------------------------------------- as the loop calls it


@dataclass(frozen=True)
class DenseText(PlainText):
    """Text with dense records: a teacher that knows only the last token."""

    sharpness: float = 1.0

    codec = property(lambda self: Codec("dense", V, bits=32))  # type: ignore[assignment]

    def read(self, indices: Any, draws: Any = 0) -> Any:
        sequences, _ = super().read(indices)
        return sequences, self.records(sequences)

    def records(self, sequences: Sequences) -> Records:
        rows = np.flatnonzero(sequences.target_mask)
        last = torch.from_numpy(sequences.tokens.reshape(-1)[rows].astype(np.int64))
        gold = torch.from_numpy(sequences.tokens.reshape(-1)[rows + 1].astype(np.int64))
        logp = teacher_logits(self.sharpness)[last].log_softmax(1)
        known = logp.gather(1, gold[:, None]).numpy()
        entropy = -(logp.exp() * logp).sum(1).numpy()
        places = RecordPositions(np.zeros_like(rows), np.arange(len(rows)))
        common = {"known_logprobs": known, "entropy": entropy}
        return self.codec.encode(DenseReading(**common, logprobs=logp.numpy()), places)


def teacher_logits(sharpness: float = 1.0) -> Tensor:
    return (
        sharpness
        * 2.0
        * torch.randn(V, V, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    )


def make_source(sharpness: float = 1.0, held_out: int = 6) -> DenseText:
    """A chain drawn from the teacher's distribution at sharpness 1."""
    rng = np.random.default_rng(0)
    p = teacher_logits().softmax(1).numpy()

    def document(length: int) -> Document:
        tokens = [int(rng.integers(V))]
        while len(tokens) < length:
            tokens.append(int(rng.choice(V, p=p[tokens[-1]])))
        return Document(np.array(tokens, np.uint32))

    config = DataConfig(train=("unused.txt",), sequence_length=16)
    train = pack_documents([document(160)], config)
    validation = pack_documents([document(16 * max(held_out, 1))], config)
    return DenseText(Corpus(train, validation.select(slice(held_out))), sharpness)


def make_student(dropout: float = 0.0) -> LlamaForCausalLM:
    """Return a student of one layer whose LM head is padded."""
    return make_llama(
        V + 8,
        layers=1,
        attention_dropout=dropout,
        max_position_embeddings=32,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )


def look_ahead(student: LlamaForCausalLM, source: DenseText, batch_size: int = 4) -> LookAhead:
    decoder = TargetDecoder.of(source, CPU)
    return LookAhead(
        student,
        find_lm_head(student, V),
        source,
        decoder,
        batch_size,
        Precision("cpu", torch.float32),
        CPU,
    )


def temperature(mode: str, **options: Any) -> TemperatureControl:
    return TemperatureControl(LearnedTemperature.model_validate({"mode": mode, **options}), 100)


def objective(mode: str) -> Objective:
    return Objective.of(LossConfig.model_validate({"alpha": 0.4, "temperature": {"mode": mode}}))


@pytest.mark.parametrize(("mode", "init"), [("lookahead", 1.4), ("teacher_only", 0.7)])
def test_it_equals_the_second_derivative_of_a_dense_float64_model(mode: str, init: float) -> None:
    student = make_student()
    source = make_source()
    step = 11
    found = look_ahead(student, source).compute_slope(
        temperature(mode, init=init, interval=4), step, objective(mode)
    )

    wide = make_student().double()
    first = source.train_count
    indices = first + np.arange(step * 4, step * 4 + 4) % source.validation_count
    batch = make_batch(*source.read(indices))
    assert batch.teacher is not None and batch.positions_BL is None
    z = batch.teacher["logprobs"].double()

    def logits() -> Tensor:
        return wide(input_ids=batch.tokens_BL).logits.flatten(0, 1)[batch.rows_N][:, :V]

    ce = nn.functional.cross_entropy(logits(), batch.gold_N)
    expected = cosine_slope(
        list(wide.parameters()), lambda t: kd(z, logits(), t, mode == "teacher_only"), ce, init
    )
    assert abs(expected) > 1e-3
    assert found == pytest.approx(expected, rel=2e-3)


def test_a_step_that_needs_none_takes_none() -> None:
    look = look_ahead(make_student(), make_source())
    mode = temperature("lookahead", interval=4)
    assert [
        look.compute_slope(mode, step, objective("lookahead")) is None for step in range(8)
    ] == [
        True,
        True,
        True,
        False,
    ] * 2


def test_weights_gradients_dropout_and_random_state_are_left_alone() -> None:
    student = make_student(dropout=0.3)
    source = make_source()
    look = look_ahead(student, source)
    mode = temperature("lookahead", interval=1)
    student.train()
    weights = {name: parameter.detach().clone() for name, parameter in student.named_parameters()}
    state = torch.get_rng_state()
    first = look.compute_slope(mode, 5, objective("lookahead"))
    assert torch.equal(torch.get_rng_state(), state) and student.training
    assert all(
        torch.equal(parameter, weights[name]) for name, parameter in student.named_parameters()
    )
    assert all(parameter.grad is None for parameter in student.parameters())
    assert look.compute_slope(mode, 5, objective("lookahead")) == first, (
        "and the same weights give the same slope"
    )
    torch.rand(1)
    assert look.compute_slope(mode, 5, objective("lookahead")) != first, (
        "dropout is on, as in the step itself"
    )


def test_the_held_out_sequences_come_in_turn_as_a_function_of_the_step() -> None:
    source = make_source(held_out=6)
    look = look_ahead(make_student(), source, batch_size=4)
    tokens = [
        source.read(np.array([source.train_count + at]))[0].tokens[0].tolist() for at in range(6)
    ]
    for step, expected in [
        (0, [0, 1, 2, 3]),
        (1, [4, 5, 0, 1]),
        (2, [2, 3, 4, 5]),
        (3, [0, 1, 2, 3]),
    ]:
        assert look._read_batch(step).tokens_BL.tolist() == [tokens[at] for at in expected]
    assert len(look_ahead(make_student(), source, batch_size=9)._read_batch(1).tokens_BL) == 6


def test_nothing_held_out_is_refused() -> None:
    with pytest.raises(TrainingError, match=r"nothing is held out.*data\.validation_fraction"):
        look_ahead(make_student(), make_source(held_out=0))


@pytest.mark.parametrize(("sharpness", "side"), [(1.7, 1), (0.6, -1)])
def test_a_teacher_that_is_too_sure_is_cooled_down_by_the_real_loop_of_calls(
    sharpness: float, side: int
) -> None:
    """Slopes over steps: above T = 1 if the teacher is too sure, below if it is not sure enough."""
    student = make_student()
    source = make_source(sharpness, held_out=40)
    look = look_ahead(student, source, batch_size=40)
    mode = temperature("teacher_only", interval=1)
    slope = look.compute_slope(mode, 0, objective("teacher_only"))
    assert slope is not None and side * slope < -1e-3


# ---------------------------------------------------------------------- mode adversarial


def test_the_leaf_gets_its_gradient_from_the_fused_loss_over_micro_batches() -> None:
    student = make_student()
    source = make_source()
    decoder = TargetDecoder.of(source, CPU)
    head = find_lm_head(student, V)
    mode = temperature("adversarial", init=1.3)
    total = Objective(alpha=0.25)
    T = mode.track(0)
    batches = [make_batch(*source.read(np.arange(first, first + 3))) for first in (0, 3)]
    expected = 0.0
    for batch in batches:
        assert batch.teacher is not None
        hidden_ND = compute_hidden_states(student, batch.tokens_BL).flatten(0, 1)[batch.rows_N]
        compute_distillation_loss(
            hidden_ND, head, decoder.decode(batch.gold_N, batch.teacher, T), total
        ).total.backward()
        z = batch.teacher["logprobs"].double()
        s = head.compute_logits(hidden_ND.detach()).detach().double()
        expected += 0.75 * float(kd(z, s, 1.3 + 1e-5, False) - kd(z, s, 1.3 - 1e-5, False)) / 2e-5
    assert isinstance(T, Tensor) and T.grad is not None
    assert T.grad.item() == pytest.approx(expected, rel=1e-5)


def test_a_product_of_large_tensors_is_float64_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    one, other = torch.randn(2, 300, 7)
    exact = float((one.double() * other.double()).sum())
    converted = list[int]()
    double = Tensor.double

    def see(tensor: Tensor) -> Tensor:
        converted.append(tensor.numel())
        return double(tensor)

    monkeypatch.setattr(lookahead, "DOT_ELEMENTS", 100)
    monkeypatch.setattr(Tensor, "double", see)
    assert lookahead._compute_dot([one], [other]) == pytest.approx(exact, rel=1e-12)
    assert max(converted) == 100
