"""Arbitrary distributions, samples of them, and properties that each sample must have."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from bench.support.small.caches import make_tables
from cache.codec import Codec
from cache.profiles.sampled import Sample
from cache.profiles.threshold import (
    WHOLE,
    UnitSample,
    count_rest,
    find_counted,
    list_known_masses,
)
from cache.records import Records, compute_offsets
from cache.rounding import RecordPositions
from cache.units.dither import DitherTables
from kd.capture.host_copy import HostCopy
from kd.capture.recording import Recorder, TailMeter
from kd.capture.sampling import Randomness, Sampler, make_sample
from kd.capture.units.drawing import UnitRandomness, UnitSampler
from kd.loss.decoder import TargetDecoder
from kd.loss.sparse_targets import SparseTarget
from kd.loss.targets import Columns
from kd.models.lm_head import LMHead

KNOTS = 5
#: The temperatures that a tempered codec of the tests serves.
SPAN = (0.5, 2.0)
TEMPERATURES = (0.5, 0.77, 1.0, 1.6, 2.0)
CPU = torch.device("cpu")


#: Records in units, beside the profiles: profile threshold without clusters is that of 0.2.0.
UNITS = "units"


def make_codec(profile: str, vocabulary: int, threshold: float = 0.04, **options: Any) -> Codec:
    if profile == UNITS:
        options = {"clusters": 2} | options | {"draws": 1}
        return Codec("threshold", vocabulary, threshold=threshold, **options)
    options |= {"temperatures": SPAN} if profile == "tempered" else {}
    return Codec(profile, vocabulary, threshold=threshold, **options)


def sample(
    codec: Codec, logits_NV: Tensor, gold_N: Tensor | None = None, sequence: int = 0
) -> Sample:
    gold_N = torch.zeros(len(logits_NV), dtype=torch.int64) if gold_N is None else gold_N
    chance = Randomness.of_each(codec, [sequence], [np.arange(len(logits_NV))], CPU)[0]
    return Sampler(codec, KNOTS if codec.profile == "tempered" else 0).sample(
        logits_NV, gold_N, chance
    )


def sample_units(
    codec: Codec,
    logits_NV: Tensor,
    gold_N: Tensor | None = None,
    sequence: int = 0,
    tables: DitherTables | None = None,
) -> UnitSample:
    """Draw records in units; by default with random tables, whose clusters take turns."""
    gold_N = torch.zeros(len(logits_NV), dtype=torch.int64) if gold_N is None else gold_N
    (chance,) = UnitRandomness.of_each(codec, [sequence], [np.arange(len(gold_N))], CPU)
    tables = tables or make_tables(codec.vocabulary_size, codec.clusters)
    cluster_N = torch.arange(len(gold_N)) % codec.clusters
    found = UnitSampler(codec, tables).draw_units(logits_NV, gold_N, cluster_N, chance)
    return make_sample([HostCopy.start(found).wait()], UnitSample)


def make_recorder(
    head: LMHead, codec: Codec, width: int, knots: int = 0, meter: TailMeter | None = None
) -> Recorder:
    """Make a recorder; for records in units with random tables, for states of ``width``."""
    tables = None
    if codec.rules.dithered:
        tables = make_tables(codec.vocabulary_size, codec.clusters, width)
    return Recorder(head, codec, knots, meter, tables)


def stop_chance(patch: pytest.MonkeyPatch) -> None:
    """Let samples be no longer random: their tails are always the same, as is each unit."""
    fair, fair_units = Randomness.of_each, UnitRandomness.of_each

    def of_each(*arguments: Any) -> list[Randomness]:
        return [
            replace(each, uniform_NR=each.uniform_NR * 0.0, order_Q=torch.arange(len(each.order_Q)))
            for each in fair(*arguments)
        ]

    def of_each_unit(*arguments: Any) -> list[UnitRandomness]:
        return [
            replace(each, uniform_N=each.uniform_N * 0.0, starts_N2=each.starts_N2 * 0)
            for each in fair_units(*arguments)
        ]

    patch.setattr(Randomness, "of_each", of_each)
    patch.setattr(UnitRandomness, "of_each", of_each_unit)


def encode(codec: Codec, found: Sample | UnitSample, sequence: int = 0) -> Records:
    count = len(found.entropy)
    return codec.encode(found, RecordPositions(np.full(count, sequence), np.arange(count)))


def columns_of(records: Records, draw: int = 0) -> Columns:
    """Return the columns as a batch has them: tensors, with the tails of one draw."""
    columns = {name: torch.from_numpy(column) for name, column in records.columns.items()}
    return columns | {
        name: columns[name][:, draw]
        for name in {"tail_ids", "tail_logprobs"} & columns.keys()
        if columns[name].dim() > 1
    }


def dense(target: SparseTarget, vocabulary: int) -> np.ndarray:
    """Return the weights of a target as a distribution, (N, V)."""
    rows = np.repeat(np.arange(len(target.candidate_count_N)), target.offsets_N1.diff().numpy())
    weights = np.zeros((len(target.candidate_count_N), vocabulary))
    np.add.at(weights, (rows, target.ids_E.numpy()), target.weights_E.numpy())
    return weights


def decoded(
    codec: Codec, records: Records, gold_N: Tensor, temperature: float = 1.0, draw: int = 0
) -> np.ndarray:
    target = TargetDecoder(codec).decode(gold_N, columns_of(records, draw), temperature).teacher
    assert isinstance(target, SparseTarget)
    return dense(target, codec.vocabulary_size)


def require_the_last_token(case: Case) -> None:
    """Require that the sampler can keep the last token of the vocabulary, as any other."""
    case.logits_NV[1, -1] = 5e3  # the last token gets the whole mass of the second row
    found = sample(case.codec, case.logits_NV, case.gold_N)
    last = case.codec.vocabulary_size - 1
    assert last in found.head_ids or last in (int(case.gold_N[1]), *case.codec.always_keep)
    assert (found.head_count + found.tail_count).max() <= 1 / case.codec.threshold + 1
    rows = np.repeat(np.arange(2), found.tail_count)
    assert (case.size_NV[rows[:, None], found.tail_ids] > 0).all()
    records = encode(case.codec, found)
    for temperature in (0.5, 1.0, 2.0) if case.codec.profile == "tempered" else (1.0,):
        weights = decoded(case.codec, records, case.gold_N, temperature)
        np.testing.assert_allclose(weights[1].sum(), 1.0, atol=1e-6)


def require_sound_weights(case: Case) -> None:
    """Check each temperature that the profile serves, and each draw.

    Those of profile threshold sum to 1. Those of profile tempered do so in the mean over draws.
    """
    records = encode(case.codec, sample(case.codec, case.logits_NV, case.gold_N))
    for temperature in TEMPERATURES if case.codec.profile == "tempered" else (1.0,):
        for draw in range(case.codec.draws):
            weights = decoded(case.codec, records, case.gold_N, temperature, draw)
            assert np.isfinite(weights).all()
            if case.codec.profile == "threshold":
                np.testing.assert_allclose(weights.sum(1), 1.0, atol=1e-6)
            else:
                assert weights.min() >= 0.0


def require_what_the_scheme_says(case: Case) -> None:
    """Require exact heads, the right number of tail entries, and no token twice."""
    codec = case.codec
    found = sample(codec, case.logits_NV, case.gold_N)
    size = case.size_NV
    known = case.known_NV
    p = case.p_NV
    threshold = codec.threshold
    rows = len(size)
    ids = np.concatenate(
        [case.gold_N.numpy()[:, None], np.tile(codec.always_keep, (rows, 1)).astype(int)], 1
    )
    with np.errstate(divide="ignore"):
        logp = np.log(p)
    exact = np.maximum(np.take_along_axis(logp, ids, 1), -300)
    np.testing.assert_allclose(np.maximum(found.known_logprobs, -300), exact, rtol=1e-6, atol=2e-4)
    np.testing.assert_allclose(found.entropy, -(p * np.maximum(logp, -1e4)).sum(1), atol=2e-3)

    head_rows = np.repeat(np.arange(rows), found.head_count)
    head = np.zeros(size.shape, bool)
    head[head_rows, found.head_ids] = True
    edge = np.abs(size / threshold - 1) < 1e-4  # float32 may round it to either side
    assert not (head & known).any()
    assert ((head == (size > threshold)) | edge | known).all()
    np.testing.assert_allclose(found.head_logprobs, logp[head_rows, found.head_ids], atol=2e-4)

    rest = np.where(known | head, 0, size).sum(1)
    count = np.where(rest > 1e-38, np.maximum(np.floor(rest / threshold), 1), 0)
    near = (np.abs(rest / threshold - np.round(rest / threshold)) < 1e-3) | (rest < 1e-30)
    assert ((found.tail_count == count) | near & (np.abs(found.tail_count - count) <= 1)).all()
    assert (found.head_count + found.tail_count).max() <= 1 / threshold + 1
    assert found.tail_ids.shape == (found.tail_count.sum(), codec.draws)
    for row, draw_ids in enumerate(np.split(found.tail_ids, np.cumsum(found.tail_count)[:-1])):
        for tail in draw_ids.T:
            assert len(set(tail)) == len(tail), "no token twice"
            assert not (known | head)[row, tail].any(), "an entry is an entry once"
            assert (size[row, tail] > 0).all(), "a token that cannot come is never drawn"


def count_case_units(case: Case, records: Records) -> tuple[np.ndarray, np.ndarray]:
    """Return the mass beside the known tokens and the number of units, as a reader counts them."""
    counted_NK = find_counted(case.codec, records["known"], case.gold_N.numpy())
    rest_N, number_N = count_rest(case.codec, records["known"], counted_NK)
    return rest_N / WHOLE, number_N


def require_units(case: Case, found: UnitSample) -> None:
    """Require fixed sums, heads of floor or ceil units, and no token twice or of probability 0."""
    codec = case.codec
    p_NV = case.p_NV
    records = encode(codec, found)
    _, number_N = count_case_units(case, records)
    units_NV = np.zeros(p_NV.shape, int)
    rows_H = np.repeat(np.arange(len(p_NV)), found.head_count)
    rows_M = np.repeat(np.arange(len(p_NV)), found.tail_count)
    np.add.at(units_NV, (rows_H, found.head_ids), found.head_units // 2)
    np.add.at(units_NV, (rows_M, found.tail_ids), 1)
    assert (units_NV.sum(1) == number_N).all()
    assert (found.head_units >= 2).all()

    free_NV = np.where(case.known_NV, 0.0, p_NV)
    alone_N = free_NV.sum(1) > 1e-37
    pairs = np.concatenate(
        [np.stack([rows_H, found.head_ids], 1), np.stack([rows_M, found.tail_ids], 1)]
    )[np.isin(np.concatenate([rows_H, rows_M]), np.flatnonzero(alone_N))]
    assert len(np.unique(pairs, axis=0)) == len(pairs), "no token twice"
    assert (free_NV[pairs[:, 0], pairs[:, 1]] > 0).all(), "no known token, and none of p = 0"
    share_NV = free_NV / np.maximum(free_NV.sum(1, keepdims=True), 1e-300) * number_N[:, None]
    assert (np.abs(units_NV - share_NV)[alone_N] < 1 + 1e-3).all(), "floor or ceil"
    require_weights_of_one(case, records)


def require_weights_of_one(case: Case, records: Records) -> None:
    weights = decoded(case.codec, records, case.gold_N)
    np.testing.assert_allclose(weights.sum(1), 1.0, atol=1e-12)


def require_the_best_token(case: Case, found: UnitSample) -> None:
    """Require that heads are marked where a reader expects another best token, and only there.

    A reader finds the best token.
    """
    p_NV = torch.softmax(case.logits_NV, 1).numpy()
    rows_H = np.repeat(np.arange(len(p_NV)), found.head_count)
    top_N = p_NV.max(1)
    known_N = np.where(case.known_NV, p_NV, 0.0).max(1)
    p_H = p_NV[rows_H, found.head_ids]
    best_H = (p_H >= top_N[rows_H]) & (p_H > known_N[rows_H])
    marked_H = found.head_units % 2 == 1
    records = encode(case.codec, found)
    for row in np.unique(rows_H).tolist():
        own = rows_H == row
        others_H = np.append(p_H[own & ~best_H], known_N[row])
        if (np.abs(others_H / top_N[row] - 1) < 1e-5).any() and best_H[own].any():
            continue  # a tie but for rounding
        expected_H = own & (found.head_ids == expect_head(case, records, row))
        if not best_H[own].any():
            assert (marked_H == expected_H)[own].all(), "a known token is the best"
        elif (best_H & expected_H).any():
            assert not marked_H[own].any(), "what is expected is the best"
        else:
            assert (marked_H == best_H)[own].all()
    target = TargetDecoder(case.codec).decode(case.gold_N, columns_of(records)).teacher
    assert isinstance(target, SparseTarget)
    best_N = target.find_best_N().numpy()
    said_N = best_N >= 0
    rows_N = np.arange(len(p_NV))
    step = np.exp(case.codec.rules.find_step(case.codec)) * (1 + 1e-5)
    # Of two known tokens both are rounded by up to a step.
    both_N = case.known_NV[rows_N, best_N] & case.known_NV[rows_N, p_NV.argmax(1)]
    reach_N = np.where(both_N, step**2, step)
    assert (p_NV[rows_N, best_N] * reach_N >= top_N)[said_N].all()
    assert said_N[top_N > case.codec.threshold * step].all()


def expect_head(case: Case, records: Records, row: int) -> int:
    """Return the head of a record that a reader takes for the best token if none is marked, or -1.

    It has most units, at least two, and weighs more than the heaviest known token.
    """
    known_1K = records["known"][row : row + 1]
    counted_1K = find_counted(case.codec, known_1K, case.gold_N[row : row + 1].numpy())
    rest_1, number_1 = count_rest(case.codec, known_1K, counted_1K)
    heaviest = int((list_known_masses()[known_1K] * counted_1K).max())
    heads = slice(*compute_offsets(records["head_count"])[row : row + 2].tolist())
    units = (records["head_units"][heads] // 2).tolist()
    most = max(units, default=0)
    if most < 2 or most * int(rest_1[0]) <= heaviest * int(number_1[0]):
        return -1
    ids = records["head_ids"][heads].tolist()
    return min(token for token, count in zip(ids, units, strict=True) if count == most)


KINDS = ("normal", "ties", "masked", "one-hot", "uniform", "cauchy", "two", "huge")


def make_logits(kind: str, rows: int, vocabulary: int, spread: float, seed: int) -> Tensor:
    """Return logits (N, V) of one of the KINDS; ``rows`` is N."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator) * spread
    if kind == "ties":
        logits = logits.round()
    elif kind == "masked":
        logits[:, 1:][torch.rand(rows, vocabulary - 1, generator=generator) < 0.7] = -torch.inf
    elif kind == "one-hot":
        logits[:, seed % vocabulary] += 500.0
    elif kind == "uniform":
        logits = torch.full((rows, vocabulary), -3.0)
    elif kind == "cauchy":
        logits = (
            torch.distributions.Cauchy(0.0, 1.0).icdf(
                torch.rand(rows, vocabulary, generator=generator)
            )
            * spread
        )
        logits.clamp_(-1e3, 1e3)
    elif kind == "two":
        logits[:] = -torch.inf
        logits[:, [0, vocabulary - 1]] = torch.tensor([500.0, 499.0])
    elif kind == "huge":
        logits += 800.0
    return logits


@dataclass(frozen=True)
class Case:
    """A codec, a teacher's logits and the gold tokens."""

    codec: Codec
    logits_NV: Tensor
    gold_N: Tensor

    @property
    def p_NV(self) -> np.ndarray:
        return torch.softmax(self.logits_NV.double(), 1).numpy()

    @property
    def size_NV(self) -> np.ndarray:
        """The weights in proportion to which tokens are drawn: the mean over the proposal betas."""
        betas = self.codec.proposal_betas if self.codec.profile == "tempered" else (1.0,)
        return np.mean(
            [torch.softmax(self.logits_NV.double() * beta, 1).numpy() for beta in betas], axis=0
        )

    @property
    def known_NV(self) -> np.ndarray:
        known = np.zeros(self.logits_NV.shape, bool)
        known[np.arange(len(known)), self.gold_N.numpy()] = True
        known[:, list(self.codec.always_keep)] = True
        return known


@st.composite
def cases(
    draw: Any,
    vocabularies: tuple[int, ...] = (2, 3, 63, 64, 65, 300, 2048),
    rows: int = 5,
    profiles: tuple[str, ...] = ("threshold", "tempered"),
    thresholds: tuple[float, ...] = (0.001, 1 / 255, 0.0155, 0.04, 0.125, 0.5),
) -> Case:
    vocabulary = draw(st.sampled_from(vocabularies))
    seed = draw(st.integers(0, 10_000))
    kept = tuple(draw(st.lists(st.integers(0, vocabulary - 1), max_size=3, unique=True)))
    codec = make_codec(
        draw(st.sampled_from(profiles)),
        vocabulary,
        draw(st.sampled_from(thresholds)),
        always_keep=kept,
        draws=draw(st.integers(1, 3)),
        seed=seed,
    )
    logits = make_logits(
        draw(st.sampled_from(KINDS)),
        rows,
        vocabulary,
        draw(st.sampled_from([0.3, 2.0, 8.0, 40.0])),
        seed,
    )
    gold = torch.randint(0, vocabulary, (rows,), generator=torch.Generator().manual_seed(seed))
    if kept:
        gold[0] = kept[0]
    return Case(codec, logits, gold)
