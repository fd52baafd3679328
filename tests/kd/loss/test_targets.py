"""Decoded targets, against a plain decode of the same integers, one position at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bench.support.small.caches import make_cache, make_identity
from bench.support.small.caches import make_codec as codec_identity
from cache.codec import Codec
from cache.rounding import (
    ENTROPY_STEP,
    KNOWN_STEP,
    PARTITION_STEP,
    TOP_STEP,
    UNKNOWN,
    make_cosine_basis,
    round_to_bfloat16,
)
from cache.store import open_cache
from kd.config.train import TrainConfig
from kd.loss.decoder import TargetDecoder
from kd.loss.fused import compute_distillation_loss
from kd.loss.objective import Objective
from kd.loss.sparse_targets import SparseTarget, decode_tempered, decode_threshold
from kd.loss.targets import subtract_target_
from kd.loss.whole_targets import DenseTarget, HiddenTarget, TopTarget, decode_lm_head, decode_top
from kd.models.lm_head import LMHead
from kd.text.batches import make_batch
from kd.text.steps.reading import read_training_batches
from tests.support.kd.references import (
    KEPT,
    WIDTH,
    N,
    V,
    dense_terms,
    make_codec,
    make_columns,
    make_gold,
    make_logits,
)

CPU = torch.device("cpu")
TEMPERATURES = [0.5, 1.0, 1.25, 2.0]


# ---------------------------------------------------------------------- the reference


@dataclass
class Plain:
    """One sampled record: log-probabilities by token, and the tail's partition function."""

    codec: Codec
    explicit: list[tuple[int, float]]
    tail: list[tuple[int, float]]
    knots: np.ndarray

    @classmethod
    def at(cls, codec: Codec, columns: dict[str, Tensor], gold_N: Tensor, n: int) -> Plain:
        head_at, tail_at = (int(columns[f"{part}_count"][:n].sum()) for part in ("head", "tail"))
        head = range(head_at, head_at + int(columns["head_count"][n]))
        tail = range(tail_at, tail_at + int(columns["tail_count"][n]))
        known = [-KNOWN_STEP * int(code) for code in columns["known"][n]]
        gold = int(gold_N[n])
        explicit = [(gold, known[0])]
        explicit += [
            (token, logp)
            for token, logp in zip(codec.always_keep, known[1:], strict=True)
            if token != gold
        ]
        explicit += [
            (int(columns["head_ids"][i]), -codec.head_step * int(columns["head_logprobs"][i]))
            for i in head
        ]
        values = columns.get("tail_logprobs", torch.zeros(tail.stop))
        knots = (
            columns["partition"][n].numpy() * PARTITION_STEP
            if "partition" in columns
            else np.zeros((0, 2))
        )
        return cls(
            codec,
            explicit,
            [(int(columns["tail_ids"][i]), -codec.tail_step * int(values[i])) for i in tail],
            knots,
        )

    def tail_partition(self, beta: float) -> tuple[float, float]:
        """The cubic that has the values and slopes of both knots, from a linear system."""
        betas = self.codec.nodes(len(self.knots))
        right = next((i for i in range(1, len(betas)) if beta <= betas[i]), len(betas) - 1)
        rows = []
        values = []
        for i in (right - 1, right):
            x = betas[i] - beta
            rows += [[1, x, x**2, x**3], [0, 1, 2 * x, 3 * x**2]]
            values += [self.knots[i, 0], self.knots[i, 1]]
        value, slope, *_ = np.linalg.solve(np.array(rows, float), np.array(values, float))
        return float(value), float(slope)

    def log_all(self, beta: float) -> float:
        terms = [beta * logp for _, logp in self.explicit] + (
            [self.tail_partition(beta)[0]] if self.tail else []
        )
        return max(terms) + math.log(sum(math.exp(term - max(terms)) for term in terms))

    def weights(self, temperature: float) -> dict[int, float]:
        """Token to weight, from the formulas of the format."""
        beta = 1 / temperature
        if self.codec.profile == "threshold":
            found = {token: math.exp(logp) for token, logp in self.explicit}
            share = (1 - sum(found.values())) / max(len(self.tail), 1)
            return found | {token: share for token, _ in self.tail}
        log_all = self.log_all(beta)
        found = {token: math.exp(beta * logp - log_all) for token, logp in self.explicit}
        betas = self.codec.proposal_betas
        logs = [self.log_all(b) for b in betas]
        of_tail = [
            math.exp(self.tail_partition(b)[0] - a) for b, a in zip(betas, logs, strict=True)
        ]
        rest = sum(of_tail) / len(betas) if self.tail else 0.0
        for token, logp in self.tail:
            sizes = [math.exp(b * logp - a) for b, a in zip(betas, logs, strict=True)]
            chance = len(self.tail) * sum(sizes) / len(betas) / rest
            # The second-order term of the mean of exp(c l) over a stochastic rounding of exp(l).
            c = beta - sum(b * size for b, size in zip(betas, sizes, strict=True)) / sum(sizes)
            rounding = 1 + c * (c - 1) / 2 * self.codec.tail_step**2 / 6
            found[token] = math.exp(beta * logp - log_all) / chance / rounding
        return found

    def entropy(self, temperature: float) -> float:
        beta = 1 / temperature
        log_all = self.log_all(beta)
        (tail, slope) = self.tail_partition(beta)
        mean = sum(math.exp(beta * logp - log_all) * logp for _, logp in self.explicit)
        mean += math.exp(tail - log_all) * slope if self.tail else 0.0
        return log_all - beta * mean


def decode(
    codec: Codec, columns: dict[str, Tensor], gold_N: Tensor, temperature: float = 1.0
) -> Any:
    return TargetDecoder(codec).decode(gold_N, columns, temperature).teacher


def spread_entries(target: SparseTarget, vocabulary: int = V) -> Tensor:
    rows = torch.repeat_interleave(torch.arange(len(target.entropy_N)), target.offsets_N1.diff())
    found = torch.zeros(len(target.entropy_N), vocabulary, dtype=torch.float64)
    return found.index_put_((rows, target.ids_E), target.weights_E, accumulate=True)


SAMPLED = [("threshold", 1.0)] + [("tempered", temperature) for temperature in TEMPERATURES]


@pytest.mark.parametrize(("profile", "temperature"), SAMPLED)
def test_entries_are_those_of_a_plain_decode(profile: str, temperature: float) -> None:
    codec = make_codec(profile)
    gold_N = make_gold()
    columns = make_columns(codec, make_logits(), gold_N)
    assert int(columns["head_count"].min()) == 0 and int(columns["tail_count"].min()) > 0
    target = decode(codec, columns, gold_N, temperature)
    found = spread_entries(target)
    for n in range(N):
        record = Plain.at(codec, columns, gold_N, n)
        expected = torch.zeros(V, dtype=torch.float64)
        for token, weight in record.weights(temperature).items():
            expected[token] += weight
        torch.testing.assert_close(found[n], expected, rtol=1e-9, atol=1e-13)
        entropy = (
            ENTROPY_STEP * int(columns["entropy"][n])
            if profile == "threshold"
            else record.entropy(temperature)
        )
        assert float(target.entropy_N[n]) == pytest.approx(entropy, rel=1e-9)
    if profile == "threshold":
        assert target.total_N is None
        total_N = torch.ones(N, dtype=torch.float64)
    else:
        total_N = target.total_N
    torch.testing.assert_close(found.sum(1), total_N, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("profile", "temperature"), SAMPLED)
def test_exact_entries_have_the_probabilities_of_the_logits(
    profile: str, temperature: float
) -> None:
    """Sampling, rounding and interpolation keep the gold token, the kept ids and the head at every
    T.
    """
    codec = make_codec(profile)
    gold_N = make_gold()
    logits_NV = make_logits()
    columns = make_columns(codec, logits_NV, gold_N)
    found = spread_entries(decode(codec, columns, gold_N, temperature))
    p_NV = torch.softmax(logits_NV.double() / temperature, 1)
    for n in range(N):
        ids = [token for token, _ in Plain.at(codec, columns, gold_N, n).explicit]
        torch.testing.assert_close(found[n, ids], p_NV[n, ids], rtol=0.05, atol=1e-12)
        assert float(found[n, ids].sum() - p_NV[n, ids].sum()) == pytest.approx(0.0, abs=0.02)
    if profile == "tempered":
        entropy_N = torch.special.entr(p_NV).sum(1)
        target = decode(codec, columns, gold_N, temperature)
        assert float((target.entropy_N - entropy_N).abs().mean()) < 0.02


@pytest.mark.parametrize("alpha", [0.0, 0.1])
@pytest.mark.parametrize(("profile", "temperature"), SAMPLED)
def test_the_loss_of_columns_is_that_of_a_plain_decode(
    profile: str, temperature: float, alpha: float
) -> None:
    codec = make_codec(profile)
    gold_N = make_gold()
    columns = make_columns(codec, make_logits(), gold_N)
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(N, WIDTH, generator=generator)
    weight = torch.randn(V, WIDTH, generator=generator)
    x.requires_grad_()
    targets = TargetDecoder(codec).decode(gold_N, columns, temperature)
    total = compute_distillation_loss(
        x, LMHead(weight, None, 1.0, None, V), targets, Objective(alpha)
    ).total
    total.backward()

    wide = x.detach().double().requires_grad_()
    logits = wide @ weight.double().T
    soft_NV = torch.log_softmax(logits / temperature, 1)
    expected = torch.zeros((), dtype=torch.float64)
    for n in range(N):
        record = Plain.at(codec, columns, gold_N, n)
        entropy = (
            ENTROPY_STEP * int(columns["entropy"][n])
            if profile == "threshold"
            else record.entropy(temperature)
        )
        kl = (
            -sum(
                weight * soft_NV[n, token] for token, weight in record.weights(temperature).items()
            )
            - entropy
        )
        expected = expected + (1 - alpha) * temperature**2 * kl
    expected = expected + alpha * torch.nn.functional.cross_entropy(logits, gold_N, reduction="sum")
    expected.backward()
    assert total.item() == pytest.approx(expected.item(), rel=1e-5)
    assert float((x.grad - wide.grad).norm() / wide.grad.norm()) < 1e-5


def test_a_kept_id_that_is_the_gold_token_counts_once() -> None:
    codec = make_codec("threshold")
    gold_N = torch.full((N,), KEPT[0])
    target = decode(codec, make_columns(codec, make_logits(), gold_N), gold_N)
    first = target.offsets_N1[:-1]
    assert (target.ids_E[first] == KEPT[0]).all() and (target.ids_E[first + 1] == KEPT[0]).all()
    assert not target.weights_E[first + 1].any() and target.weights_E[first].all()


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    spread=st.floats(0.0, 30.0),
    vocabulary=st.integers(5, 400),
    profile=st.sampled_from(["threshold", "tempered"]),
    temperature=st.sampled_from(TEMPERATURES),
)
def test_weights_at_temperature_1_of_threshold_sum_to_one_and_others_are_sound(
    seed: int, spread: float, vocabulary: int, profile: str, temperature: float
) -> None:
    codec = make_codec(profile, vocabulary_size=vocabulary, always_keep=(4,))
    logits_NV = torch.randn(6, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread
    gold_N = torch.randint(0, vocabulary, (6,), generator=torch.Generator().manual_seed(seed + 1))
    columns = make_columns(codec, logits_NV, gold_N)
    target = decode(codec, columns, gold_N, temperature if profile == "tempered" else 1.0)
    if profile == "threshold":
        torch.testing.assert_close(
            spread_entries(target, vocabulary).sum(1),
            torch.ones(6, dtype=torch.float64),
            rtol=0,
            atol=1e-9,
        )
    else:
        assert (target.weights_E >= 0.0).all()
    assert torch.isfinite(target.weights_E).all() and torch.isfinite(target.entropy_N).all()


@pytest.mark.parametrize("profile", ["threshold", "tempered"])
def test_where_every_token_is_an_entry_there_is_no_tail(profile: str) -> None:
    codec = make_codec(profile, vocabulary_size=4, always_keep=(0, 1, 2, 3))
    gold_N = torch.tensor([2, 0])
    logits_NV = torch.tensor([[1.0, 2.0, 0.0, -1.0], [0.0, 0.0, 0.0, 0.0]])
    columns = make_columns(codec, logits_NV, gold_N)
    assert not columns["tail_count"].any()
    if profile == "tempered":
        columns["partition"].zero_()  # the stored partition of an absent tail is ignored
    for temperature in [1.0] if profile == "threshold" else TEMPERATURES:
        found = spread_entries(decode(codec, columns, gold_N, temperature), 4)
        torch.testing.assert_close(
            found, torch.softmax(logits_NV.double() / temperature, 1), rtol=0.02, atol=0
        )
        torch.testing.assert_close(found.sum(1), torch.ones(2, dtype=torch.float64))


def test_tempered_targets_are_differentiable_in_the_temperature() -> None:
    codec = make_codec("tempered")
    gold_N = make_gold(6)
    columns = make_columns(codec, make_logits(6), gold_N)

    def summarise(temperature: Tensor) -> Tensor:
        target = decode_tempered(codec, columns, gold_N, temperature)
        return torch.stack([(target.weights_E * target.ids_E).sum(), target.entropy_N.sum()])

    for value in (0.6, 1.4, 1.9):
        assert torch.autograd.gradcheck(
            summarise, (torch.tensor(value, dtype=torch.float64, requires_grad=True),)
        )


def test_they_are_where_the_only_known_token_is_one_that_the_teacher_forbids() -> None:
    codec = make_codec("tempered", threshold=0.3, temperatures=(0.25, 1.0), always_keep=())
    gold_N = torch.arange(3)
    logits_NV = make_logits(3) / 6
    logits_NV[1, 1] = -1e4
    columns = make_columns(codec, logits_NV, gold_N)
    assert columns["head_count"].sum() == 0
    for value in (0.3, 0.45):  # between two knots
        temperature = torch.tensor(value, dtype=torch.float64, requires_grad=True)
        target = decode_tempered(codec, columns, gold_N, temperature)
        (slope,) = torch.autograd.grad(target.entropy_N.sum(), temperature)
        step = 1e-5
        ends = [
            float(decode_tempered(codec, columns, gold_N, value + each).entropy_N.sum())
            for each in (-step, step)
        ]
        assert float(slope) == pytest.approx((ends[1] - ends[0]) / (2 * step), rel=1e-6)


@pytest.mark.parametrize("teacher_only", [False, True])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4, 1.9])
def test_the_gradient_by_the_temperature_is_that_of_plain_decodes(
    temperature: float, teacher_only: bool
) -> None:
    """The reference is the difference quotient of the loss, decoded position by position at both
    ends.
    """
    codec = make_codec("tempered")
    gold_N = make_gold(12)
    columns = make_columns(codec, make_logits(12), gold_N)
    generator = torch.Generator().manual_seed(8)
    x, weight = (
        torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64) for rows in (12, V)
    )

    def plain(t: float) -> float:
        total = 0.0
        s_NV = x @ weight.T
        for n in range(12):
            record = Plain.at(codec, columns, gold_N, n)
            logq_V = torch.log_softmax(s_NV[n] / (1 if teacher_only else t), 0)
            kl = -sum(
                w * float(logq_V[token]) for token, w in record.weights(t).items()
            ) - record.entropy(t)
            total += 0.7 * (1 if teacher_only else t**2) * kl
        return total + 0.3 * torch.nn.functional.cross_entropy(s_NV, gold_N, reduction="sum").item()

    learned = torch.tensor(temperature, dtype=torch.float64, requires_grad=True)
    targets = TargetDecoder(codec).decode(gold_N, columns, learned)
    objective = Objective(0.3, teacher_only=teacher_only)
    total = compute_distillation_loss(
        x, LMHead(weight, None, 1.0, None, V), targets, objective, 5
    ).total
    total.backward()
    assert total.item() == pytest.approx(plain(temperature), rel=1e-9)
    # T = 1 is a knot. The cubics on its two sides have different second derivatives; ours is the
    # one for T < 1.
    step = 1e-5
    at = temperature - (1e-5 if temperature == 1.0 else 0.0)
    quotient = (plain(at + step) - plain(at - step)) / (2 * step)
    slack = 1e-4 if temperature == 1.0 else 1e-6  # effect of the step to one side
    assert learned.grad is not None and learned.grad.item() == pytest.approx(quotient, rel=slack)


def test_the_gradient_by_the_temperature_is_near_that_of_the_whole_teacher() -> None:
    """Near, not equal, because the records round and sample.

    The same sign and size are required at both ends and in between.
    """
    codec = make_codec("tempered", threshold=0.002)
    gold_N = make_gold()
    logits_NV = make_logits()
    columns = make_columns(codec, logits_NV, gold_N)
    generator = torch.Generator().manual_seed(8)
    x, weight = (
        torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64) for rows in (N, V)
    )
    for temperature in (0.6, 1.4, 1.9):
        ours, theirs = (
            torch.tensor(temperature, dtype=torch.float64, requires_grad=True) for _ in range(2)
        )
        targets = TargetDecoder(codec).decode(gold_N, columns, ours)
        compute_distillation_loss(
            x, LMHead(weight, None, 1.0, None, V), targets, Objective()
        ).total.backward()
        dense_terms(x @ weight.T, logits_NV, gold_N, theirs, Objective()).total.backward()
        assert ours.grad.item() == pytest.approx(theirs.grad.item(), rel=0.05)


def test_an_unknown_entropy_counts_as_nothing() -> None:
    codec = make_codec("threshold")
    gold_N = make_gold()
    columns = make_columns(codec, make_logits(), gold_N)
    columns["entropy"][3] = 255
    found = decode_threshold(codec, columns, gold_N).entropy_N
    assert found[3] == 0.0 and (found[4:] > 0).any()


@pytest.mark.parametrize("profile", ["threshold", "tempered", "topk", "dense", "hidden"])
def test_chunks_are_the_target_cut_up(profile: str) -> None:
    codec = make_codec(profile)
    gold_N = make_gold()
    columns = make_columns(codec, make_logits(), gold_N)
    head = LMHead(
        torch.randn(V, WIDTH, generator=torch.Generator().manual_seed(3)), None, 1.0, None, V
    )
    target = TargetDecoder(codec, head).decode(gold_N, columns).teacher
    assert target is not None
    dtype = torch.float64  # products of fewer rows round differently
    whole = target.take_chunk(slice(0, N), dtype)
    s_NV = make_logits(seed=5).to(dtype)
    parts = [target.take_chunk(slice(start, min(start + 7, N)), dtype) for start in range(0, N, 7)]
    torch.testing.assert_close(torch.cat([part.entropy_N for part in parts]), whole.entropy_N)
    assert torch.equal(torch.cat([part.find_best_N() for part in parts]), whole.find_best_N())
    expected = sum(
        float(part.compute_expected_N(s_NV[7 * i : 7 * i + 7]).sum())
        for i, part in enumerate(parts)
    )
    assert expected == pytest.approx(float(whole.compute_expected_N(s_NV).sum()), rel=1e-6)


@pytest.mark.parametrize("profile", ["threshold", "tempered", "topk", "dense", "hidden"])
def test_no_positions_are_no_trouble(profile: str) -> None:
    codec = make_codec(profile)
    gold_N = make_gold()
    columns = make_columns(codec, make_logits(), gold_N)
    empty = {name: column[:0] for name, column in columns.items()}
    assert decode_with_head(codec, empty, gold_N[:0]) is not None


def decode_with_head(codec: Codec, columns: dict[str, Tensor], gold_N: Tensor) -> Any:
    head = LMHead(torch.zeros(V, WIDTH), None, 1.0, None, V)
    return TargetDecoder(codec, head).decode(gold_N, columns).teacher


# ---------------------------------------------------------------------- the teacher's best token


@pytest.mark.parametrize(("profile", "temperature"), SAMPLED)
def test_the_best_token_is_the_teachers_or_unknown(profile: str, temperature: float) -> None:
    codec = make_codec(profile)
    gold_N = make_gold()
    logits_NV = make_logits()
    gold_N[::3] = logits_NV.argmax(1)[
        ::3
    ]  # the gold token may be the best, and is then not in the head
    found = decode(codec, make_columns(codec, logits_NV, gold_N), gold_N, temperature).find_best_N()
    p_NV = torch.softmax(logits_NV.double(), 1)
    size_NV = p_NV
    if profile == "tempered":
        size_NV = torch.stack(
            [torch.softmax(logits_NV.double() * beta, 1) for beta in codec.proposal_betas]
        ).mean(0)
    known = size_NV.amax(1) > codec.threshold
    assert 5 < int(known.sum()) < N and torch.equal(found >= 0, known)
    picked = p_NV.gather(1, found.clamp(min=0)[:, None])[
        :, 0
    ]  # rounding may swap tokens less than a step apart
    assert (picked[known] > p_NV.amax(1)[known] * math.exp(-codec.head_step)).all()


def test_a_known_token_is_best_where_its_chance_of_being_head_is_above_the_threshold() -> None:
    """Profile tempered chooses its head by the mean over temperatures.

    A token of 3 % at T = 1 can have more at T = 0.5, and here it does.
    """
    codec = make_codec("tempered", always_keep=())
    gold_N = torch.tensor([8, 9])
    p_NV = torch.full((2, V), 0.97 / (V - 1))
    p_NV[0, 8] = 0.03
    p_NV[1] = 1 / V
    columns = make_columns(codec, p_NV.log(), gold_N)
    assert not columns["head_count"].any()
    for temperature in TEMPERATURES:
        assert decode(codec, columns, gold_N, temperature).find_best_N().tolist() == [8, -1]


@pytest.mark.parametrize("profile", ["topk", "dense"])
def test_the_best_token_of_other_profiles_is_always_known(profile: str) -> None:
    codec = make_codec(profile)
    gold_N = make_gold()
    logits_NV = make_logits()
    chunk = decode(codec, make_columns(codec, logits_NV, gold_N), gold_N).take_chunk(slice(0, N))
    assert torch.equal(chunk.find_best_N(), logits_NV.argmax(1))


# ---------------------------------------------------------------------- top-k


@pytest.mark.parametrize("k", [1, 5, 12])
def test_top_records_are_readable_at_a_smaller_k(k: int) -> None:
    gold_N = make_gold()
    logits_NV = make_logits()
    found = decode_top(make_columns(make_codec("topk"), logits_NV, gold_N), k)
    small = decode_top(make_columns(make_codec("topk", k=k), logits_NV, gold_N))
    assert torch.equal(found.ids_NK, small.ids_NK) and found.p_NK.shape == (N, k)
    torch.testing.assert_close(found.p_NK, small.p_NK, rtol=2 * TOP_STEP, atol=0)
    torch.testing.assert_close(found.rest_N, small.rest_N, rtol=2 * TOP_STEP, atol=0)
    p_NV = torch.softmax(logits_NV.double(), 1)
    torch.testing.assert_close(found.p_NK, p_NV.gather(1, found.ids_NK), rtol=2 * TOP_STEP, atol=0)
    torch.testing.assert_close(found.p_NK.sum(1) + found.rest_N, torch.ones(N, dtype=torch.float64))


def test_absent_entries_and_an_absent_rest_weigh_nothing() -> None:
    columns = {
        "top_ids": torch.tensor([[7, 2, 0], [4, 0, 0]], dtype=torch.int32).to(torch.uint16),
        "top_logprobs": torch.tensor(
            [[1000, 2000, UNKNOWN], [0, UNKNOWN, UNKNOWN]], dtype=torch.int32
        ).to(torch.uint16),
        "residual": torch.tensor([UNKNOWN, UNKNOWN], dtype=torch.int32).to(torch.uint16),
    }
    target = decode_top(columns)
    p = math.exp(-1000 * TOP_STEP) / (math.exp(-1000 * TOP_STEP) + math.exp(-2000 * TOP_STEP))
    expected = torch.tensor([[p, 1 - p, 0], [1, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(target.p_NK, expected)
    assert not target.rest_N.any() and not (target.ids_NK == 0).any()


# ---------------------------------------------------------------------- hidden states


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("head_bits", [16, 32])
def test_hidden_states_go_through_the_teachers_head(bits: int, head_bits: int) -> None:
    codec = make_codec("hidden", bits=bits)
    gold_N = make_gold()
    columns = make_columns(codec, make_logits(), gold_N)
    generator = torch.Generator().manual_seed(4)
    weight_VD = torch.randn(V, WIDTH, generator=generator)
    bias_V = torch.randn(V, generator=generator)
    stored = {
        "weight": round_to_bfloat16(weight_VD.numpy()) if head_bits == 16 else weight_VD.numpy(),
        "bias": bias_V.numpy(),
        "transform": np.array([1.5, 4.0]),
    }
    head = decode_lm_head(stored, V, CPU)
    found = (
        TargetDecoder(codec, head).decode(gold_N, columns, 1.25).teacher.take_chunk(slice(5, 20))
    )
    basis = (
        torch.from_numpy(make_cosine_basis(WIDTH))
        if bits == 8
        else torch.eye(WIDTH, dtype=torch.float64)
    )
    hidden = (
        torch.randn(N, WIDTH, generator=torch.Generator().manual_seed(2))[5:20].double() @ basis
    )
    weight_VD = weight_VD.bfloat16() if head_bits == 16 else weight_VD
    z = 4.0 * torch.tanh(1.5 * (hidden @ weight_VD.double().T + bias_V.double()) / 4.0)
    difference = found.p_NV.double().log() - torch.log_softmax(z / 1.25, 1)
    assert float(difference.abs().max()) < (
        0.1 if bits == 8 else 1e-3
    )  # error from rounding the states
    exact = columns["hidden"][5:20].double() * columns["hidden_scale"][5:20, None].double() @ basis
    z = 4.0 * torch.tanh(1.5 * (exact @ weight_VD.double().T + bias_V.double()) / 4.0)
    torch.testing.assert_close(
        found.p_NV.double(), torch.softmax(z / 1.25, 1), rtol=1e-5, atol=1e-9
    )


def test_a_head_without_bias_and_soft_cap() -> None:
    stored = {
        "weight": np.ones((V, 2), np.float32),
        "bias": np.zeros(0, np.float32),
        "transform": np.array([1.0, 0.0]),
    }
    head = decode_lm_head(stored, V, CPU)
    assert (head.bias, head.softcap, head.scale, head.vocabulary) == (None, None, 1.0, V)


# ---------------------------------------------------------------------- the decoder


@dataclass
class Captured:
    """A source with a codec and an LM head, and nothing to read."""

    codec: Codec | None

    def teacher_head(self) -> dict[str, np.ndarray]:
        assert self.codec is not None and self.codec.profile == "hidden", "no other profile has one"
        return {
            "weight": np.ones((V, 2), np.float32),
            "bias": np.zeros(0, np.float32),
            "transform": np.array([1.0, 0.0]),
        }

    def projection(self) -> None:
        return None


def test_the_decoder_of_a_source() -> None:
    assert TargetDecoder.of(Captured(make_codec("hidden")), CPU).lm_head is not None
    assert TargetDecoder.of(Captured(make_codec("threshold")), CPU).lm_head is None
    plain = TargetDecoder.of(Captured(None), CPU).decode(make_gold(), None)
    assert plain.teacher is None and len(plain) == N


@pytest.mark.parametrize("profile", ["threshold", "tempered", "topk", "dense", "hidden"])
def test_a_cache_becomes_targets(profile: str, tmp_path: Path) -> None:
    """Records from the disk, read in random order and in every draw, make chunks for the loss."""
    sampled = {"draws": 2} if profile == "tempered" else {}
    source = open_cache(
        make_cache(tmp_path, make_identity(codec=codec_identity(profile, **sampled)))
    )
    decoder = TargetDecoder.of(source, CPU)
    (batch,) = next(read_training_batches(source, TrainConfig(max_steps=1, batch_size=5), range(1)))
    target = decoder.decode(batch.gold_N, batch.teacher).teacher
    assert target is not None
    q_NV = torch.full((len(batch), source.codec.vocabulary_size), 1 / source.codec.vocabulary_size)
    subtract_target_(q_NV, target.take_chunk(slice(0, len(batch))))
    torch.testing.assert_close(q_NV.sum(1), torch.zeros(len(batch)), rtol=0, atol=1e-5)
    if sampled:
        ids = [
            make_batch(*source.read(np.arange(5), draw)).teacher["tail_ids"].tolist()
            for draw in range(4)
        ]
        assert ids[0] == ids[2] != ids[1] == ids[3]


@pytest.mark.parametrize(
    ("profile", "kind"),
    [
        ("threshold", SparseTarget),
        ("tempered", SparseTarget),
        ("topk", TopTarget),
        ("dense", DenseTarget),
        ("hidden", HiddenTarget),
    ],
)
def test_each_profile_has_its_target(profile: str, kind: type) -> None:
    codec = make_codec(profile)
    gold_N = make_gold()
    columns = make_columns(codec, make_logits(), gold_N)
    assert isinstance(decode_with_head(codec, columns, gold_N), kind)


@pytest.mark.parametrize("profile", ["threshold", "topk"])
def test_a_temperature_is_not_learned_from_records_of_one(profile: str) -> None:
    codec = make_codec(profile)
    gold_N = make_gold()
    columns = make_columns(codec, make_logits(), gold_N)
    learned = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    assert TargetDecoder(codec).decode(gold_N, columns, learned.detach()).teacher is not None
    with pytest.raises(ValueError, match="right at temperature 1 only: use profile tempered"):
        TargetDecoder(codec).decode(gold_N, columns, learned)
    with pytest.raises(ValueError, match=r"loss\.temperature 2 cannot be served"):
        TargetDecoder(codec).decode(gold_N, columns, 2.0)


@pytest.mark.parametrize("profile", ["threshold", "tempered", "topk", "dense", "hidden"])
def test_targets_have_the_teachers_entropies_at_temperature_1(profile: str) -> None:
    codec = make_codec(profile)
    gold_N = make_gold()
    logits_NV = make_logits()
    columns = make_columns(codec, logits_NV, gold_N)
    columns["entropy"][3] = 255
    head = LMHead(torch.zeros(V, WIDTH), None, 1.0, None, V)
    temperature = 2.0 if profile in ("tempered", "dense", "hidden") else 1.0
    found = TargetDecoder(codec, head).decode(gold_N, columns, temperature).entropy_N
    expected = torch.special.entr(torch.softmax(logits_NV.double(), 1)).sum(1)
    assert found is not None and torch.isnan(found[3])
    rest = torch.arange(N) != 3
    torch.testing.assert_close(found[rest], expected[rest], rtol=0, atol=ENTROPY_STEP)


def test_a_token_that_the_teacher_forbids_leaves_every_divergence_finite() -> None:
    logprobs_NV = torch.log_softmax(make_logits(), 1)
    logprobs_NV[:, 5] = torch.finfo(torch.float32).min
    chunk = DenseTarget(logprobs_NV, 0.5).take_chunk(slice(0, N))
    assert torch.isfinite(chunk.logp_NV).all() and not chunk.p_NV[:, 5].any()
