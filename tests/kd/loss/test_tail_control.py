"""The control variate of sampled tails: no bias, less noise, and gradients of its own term."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from operator import add

import numpy as np
import pytest
import torch
from torch import Tensor

from cache.codec import Codec
from cache.profiles.threshold import count_rest
from cache.records import Records, TailSums
from kd.capture.recording import SequenceStates, TailMeter
from kd.loss.decoder import TargetDecoder
from kd.loss.fused import compute_distillation_loss
from kd.loss.objective import Objective
from kd.loss.sparse_targets import SparseTarget
from kd.loss.tail_control import HeadCorrection, TailControl
from kd.models.lm_head import LMHead
from tests.support.kd.samples import make_recorder

V, D, N = 300, 16, 24
TAU = 0.05
SEQUENCES = 12
CODEC = Codec("threshold", V, threshold=TAU, clusters=2)


@pytest.fixture(scope="module")
def text() -> tuple[list[Tensor], list[Tensor]]:
    """The teacher's hidden states of some sequences, and their next tokens."""
    chance = torch.Generator().manual_seed(3)
    common_D = torch.randn(D, generator=chance)
    states = [common_D + 0.6 * torch.randn(N, D, generator=chance) for _ in range(SEQUENCES)]
    return states, [torch.randint(V, (N,), generator=chance) for _ in range(SEQUENCES)]


@pytest.fixture(scope="module")
def head() -> LMHead:
    weight_VD = torch.randn(V, D, generator=torch.Generator().manual_seed(4)) * 0.6
    return LMHead(weight_VD, None, 1.0, None, V)


def record(codec: Codec, head: LMHead, text: tuple[list[Tensor], list[Tensor]], number: int):
    states, golds = text
    recorder = make_recorder(head, codec, D, meter=TailMeter(SEQUENCES))
    records = recorder.record(states[number], golds[number], number, np.arange(N))
    return records, recorder.take_tail_sums()


def compute_tails(head: LMHead, states_ND: Tensor, gold_N: Tensor, records: Records) -> Tensor:
    """Return the probabilities of the tails (N, V), in float64: of tokens that are no heads."""
    p_NV = torch.softmax((states_ND.double() @ head.weight.double().T), 1)
    p_NV.scatter_(1, gold_N[:, None], 0.0)
    counted_N1 = np.ones((len(gold_N), 1), bool)
    number_N = torch.from_numpy(count_rest(CODEC, records["known"], counted_N1)[1])
    unit_N1 = (p_NV.sum(1) / number_N)[:, None]
    above_NV = p_NV > unit_N1
    rest_N1 = p_NV.masked_fill(above_NV, 0.0).sum(1, keepdim=True)
    limit_N1 = rest_N1 / (rest_N1 / unit_N1).ceil()
    unfit_N1 = (p_NV.masked_fill(above_NV, 0.0) > limit_N1).any(1, keepdim=True)
    return p_NV.masked_fill(above_NV | (unfit_N1 & (p_NV > unit_N1 / 2)), 0.0)


def test_a_capture_sums_the_tails_of_training_sequences(head, text) -> None:
    recorder = make_recorder(head, CODEC, D, meter=TailMeter(train_sequences=3))
    records = [
        recorder.record(text[0][number], text[1][number], number, np.arange(N))
        for number in range(5)
    ]
    found = recorder.take_tail_sums()
    assert found is not None
    sums_SV = torch.stack(
        [compute_tails(head, text[0][n], text[1][n], records[n]).sum(0) for n in range(3)]
    ).numpy()
    assert (found.sequences, found.positions) == (3, 3 * N)
    np.testing.assert_allclose(found.sum_V, sums_SV.sum(0), rtol=1e-4, atol=1e-9)
    np.testing.assert_allclose(found.square_V, (sums_SV**2).sum(0), rtol=1e-4, atol=1e-9)
    again = recorder.take_tail_sums()
    assert again is not None
    assert (again.sequences, again.positions, again.sum_V.any()) == (0, 0, False)


def test_the_sums_do_not_depend_on_the_cut_into_chunks(head, text, monkeypatch) -> None:
    whole = record(CODEC, head, text, 0)[1]
    found = []
    for together in (1, 2):
        recorder = make_recorder(head, CODEC, D, meter=TailMeter(SEQUENCES))
        for first in range(0, 4, together):
            rows = [
                SequenceStates(n, text[0][n], text[1][n], np.arange(N))
                for n in range(first, first + together)
            ]
            recorder.read(rows).encode()
        found.append(recorder.take_tail_sums())
    assert whole is not None
    one, two = found
    assert one is not None and two is not None
    assert one.sum_V.tobytes() == two.sum_V.tobytes()
    assert one.square_V.tobytes() == two.square_V.tobytes()


def test_the_share_is_what_sampling_adds_of_the_whole_variance() -> None:
    rng = np.random.default_rng(0)
    sums_SV = rng.uniform(0.0, [0.0, 0.1, 4.0], size=(50, 3))
    sums = TailSums(50, 500, sums_SV.sum(0), (sums_SV**2).sum(0))
    found = sums.compute_mean(0.04)
    mean_V = sums_SV.mean(0) / 10
    text_V = sums_SV.var(0, ddof=1) / 10
    expected_V = np.divide(0.04 * mean_V, 0.04 * mean_V + text_V, out=np.zeros(3), where=mean_V > 0)
    np.testing.assert_allclose(found["mean"], mean_V, rtol=1e-6)
    np.testing.assert_allclose(found["share"], expected_V, rtol=1e-5)
    assert not TailSums(1, 10, sums_SV[0], sums_SV[0] ** 2).compute_mean(0.04)["share"].any()


def test_sums_of_shards_add_up() -> None:
    rng = np.random.default_rng(1)
    parts = [TailSums(n, 10 * n, rng.random(4), rng.random(4)) for n in (1, 2)]
    found = parts[0] + parts[1]
    assert (found.sequences, found.positions) == (3, 30)
    np.testing.assert_allclose(found.sum_V, parts[0].sum_V + parts[1].sum_V)
    stored = TailSums.from_arrays(found.to_arrays())
    assert stored.sum_V.tobytes() == found.sum_V.tobytes()
    assert (stored.sequences, stored.positions) == (3, 30)


# ---------------------------------------------------------------------- the term


def make_student(seed: int, bias: bool, scale: float) -> tuple[Tensor, LMHead]:
    chance = torch.Generator().manual_seed(seed)
    hidden_ND = torch.randn(N, D, generator=chance, dtype=torch.float64) + 1.0
    weight_VD = torch.randn(V, D, generator=chance, dtype=torch.float64).requires_grad_()
    bias_V = torch.randn(V, generator=chance, dtype=torch.float64).requires_grad_()
    return hidden_ND.requires_grad_(), LMHead(weight_VD, bias_V if bias else None, scale, None, V)


def decode(codec: Codec, records, gold_N: Tensor):
    columns = {
        name: torch.from_numpy(np.ascontiguousarray(v)) for name, v in records.columns.items()
    }
    return TargetDecoder(codec).decode(gold_N, columns)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_value_and_gradients_are_those_of_the_dense_term(head, text, bias, scale) -> None:
    records, _ = record(CODEC, head, text, 0)
    targets = decode(CODEC, records, text[1][0])
    correction = HeadCorrection(torch.randn(V), torch.randn(D))
    alpha = 0.3
    found, expected = [], []
    for sink, given in ((found, correction), (expected, None)):
        hidden_ND, student = make_student(7, bias, scale)
        terms = compute_distillation_loss(
            hidden_ND, student, targets, Objective(alpha=alpha), 5, given
        )
        total = terms.total
        if given is None:
            logits_V = student.weight @ correction.direction_D.double()
            logits_V = logits_V if student.bias is None else logits_V + student.bias
            total = total + (1 - alpha) * scale * correction.excess_V.double() @ logits_V
        total.backward()
        sink += [total.detach(), hidden_ND.grad, student.weight.grad]
        sink += [student.bias.grad] if student.bias is not None else []
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_the_term_has_no_mean_over_draws_and_text_and_lowers_the_noise(head, text) -> None:
    # Several seeds, because the unit of a position depends on the rounding of its next token.
    sums = [
        record(replace(CODEC, seed=seed), head, text, n)[1]
        for seed in range(1000, 1005)
        for n in range(SEQUENCES)
    ]
    arrays = reduce(add, sums).compute_mean(TAU)  # type: ignore[arg-type]
    control = TailControl(arrays, D)
    control.direction_D.copy_(torch.stack(text[0]).mean((0, 1)))
    plain, controlled, excess = [], [], []
    for seed in range(150):
        codec = replace(CODEC, seed=seed)
        number = seed % SEQUENCES
        states_ND, gold_N = text[0][number], text[1][number]
        records, _ = record(codec, head, text, number)
        teacher = decode(codec, records, gold_N).teacher
        assert isinstance(teacher, SparseTarget) and teacher.tail_places_M is not None
        drawn_NV = torch.zeros(N, V, dtype=torch.float64)
        places_M = teacher.tail_places_M
        drawn_NV.index_put_(
            (teacher.rows_E[places_M], teacher.ids_E[places_M]), teacher.weights_E[places_M]
        )
        tails_NV = compute_tails(head, states_ND, gold_N, records)
        noise_VD = (tails_NV - drawn_NV).T @ states_ND.double()
        correction = control.correct(teacher)
        excess.append(correction.excess_V)
        plain.append(noise_VD.square().sum())
        term_VD = torch.outer(correction.excess_V, correction.direction_D).double()
        controlled.append((noise_VD + term_VD).square().sum())
    # Over all sequences the mean of s - N b is 0: within 4.5 standard errors for each token that is
    # drawn often enough for a standard error.
    often_V = torch.from_numpy(arrays["mean"]) * N * len(excess) / TAU > 20
    excess_KV = torch.stack(excess)[:, often_V]
    z_V = excess_KV.mean(0) / (excess_KV.std(0) / len(excess) ** 0.5)
    assert len(z_V) > V / 5
    assert z_V.abs().max() < 4.5
    assert torch.stack(controlled).mean() < 0.6 * torch.stack(plain).mean()


def test_the_average_is_that_of_the_steps_before(head) -> None:
    control = TailControl({"mean": np.zeros(V, np.float32), "share": np.ones(V, np.float32)}, D)
    assert not control.direction_D.any()
    first_ND, second_ND = torch.randn(2, N, D)
    control.observe(first_ND[:10])
    control.observe(first_ND[10:])
    assert not control.direction_D.any()
    control.step()
    torch.testing.assert_close(control.direction_D, first_ND.mean(0))
    control.observe(torch.full((3, D), torch.nan))
    control.forget()
    control.observe(second_ND)
    control.step()
    expected_D = 0.9 * first_ND.mean(0) + 0.1 * second_ND.mean(0)
    torch.testing.assert_close(control.direction_D, expected_D)
    control.step()
    torch.testing.assert_close(control.direction_D, expected_D)
