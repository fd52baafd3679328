"""Samples in units compared with their distribution: sums are fixed, means are the teacher's, and
bits are the same each time.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from bench.support.small.caches import make_tables
from cache.profiles.threshold import UnitSample
from cache.units.dither import DitherTables
from kd.capture import sampling
from kd.capture.host_copy import HostCopy
from kd.capture.sampling import make_sample
from kd.capture.units import drawing, fitting
from kd.capture.units.drawing import UnitRandomness, UnitSampler, round_known
from kd.errors import ModelError
from tests.support.kd.samples import (
    CPU,
    UNITS,
    Case,
    cases,
    count_case_units,
    decoded,
    encode,
    make_codec,
    make_logits,
    require_the_best_token,
    require_units,
    sample_units,
)

#: The largest error of a chance to be drawn, by which Pareto sampling is biased.
PARETO = 1e-3

pytestmark = pytest.mark.usefixtures("one_thread")


def make_poor_tables(vocabulary: int, clusters: int = 2) -> DitherTables:
    """Make tables that know one token of each cluster, so that all others have no candidate."""
    tails_CV = np.zeros((clusters, vocabulary))
    tails_CV[np.arange(clusters), np.arange(clusters) % vocabulary] = 1e9
    heads_CV = np.zeros_like(tails_CV)
    found = fitting.make_tables(tails_CV, heads_CV, np.zeros((clusters, 7), np.float32))
    slots_CZ = np.broadcast_to(np.arange(clusters)[:, None] % vocabulary, found.slots_CZ.shape)
    return replace(found, slots_CZ=slots_CZ)


# ---------------------------------------------------------------------- arbitrary distributions


@settings(deadline=None, max_examples=60)
@given(case=cases(profiles=(UNITS,)))
def test_samples_are_what_the_scheme_says(case: Case) -> None:
    found = sample_units(case.codec, case.logits_NV, case.gold_N)
    require_units(case, found)
    require_the_best_token(case, found)


@settings(deadline=None, max_examples=25)
@given(case=cases(profiles=(UNITS,), vocabularies=(2, 3, 65, 300)))
def test_tokens_that_the_tables_do_not_know_are_drawn_too(case: Case) -> None:
    tables = make_poor_tables(case.codec.vocabulary_size)
    require_units(case, sample_units(case.codec, case.logits_NV, case.gold_N, tables=tables))


@settings(deadline=None, max_examples=4)
@given(case=cases(profiles=(UNITS,), vocabularies=(262_143, 262_144), rows=2))
def test_the_largest_vocabularies(case: Case) -> None:
    case.logits_NV[1, -1] = 5e3  # the last token gets the whole mass of the second row
    found = sample_units(case.codec, case.logits_NV, case.gold_N)
    require_units(case, found)
    require_the_best_token(case, found)


def test_each_drawn_token_comes_with_the_first_candidate_that_names_it() -> None:
    codec = make_codec(UNITS, 300, 0.004)
    tables = make_tables(300, 2)
    logits = make_logits("normal", 6, 300, 1.0, 3)
    found = sample_units(codec, logits, tables=tables)
    (chance,) = UnitRandomness.of_each(codec, [0], [np.arange(6)], CPU)
    came = 0
    tails = np.split(np.arange(len(found.tail_ids)), np.cumsum(found.tail_count)[:-1])
    for row, places in enumerate(tails):
        starts = np.full(20_000, chance.starts_N2[row, 0].numpy())
        k = np.arange(1, 20_001)
        named = tables.name_candidates(np.full(20_000, row % 2), starts, k)[: 64 * len(places)]
        for token, candidate in zip(found.tail_ids[places], found.tail_k[places], strict=True):
            first = np.flatnonzero(named == token)
            assert candidate == (first[0] + 1 if len(first) else 0)
            came += candidate > 0
        assert (np.diff(found.tail_k[places]) >= 0).all(), "candidates are in their order"
    assert came > 0.8 * len(found.tail_ids)


# ---------------------------------------------------------------------- unbiased


def require_unbiased(case: Case, redraws: int, tables: DitherTables | None = None) -> np.ndarray:
    """Compare the mean of the weights of ``redraws`` samples of the first row with p.

    Beside the standard error, z = 5, it allows for the bias of Pareto sampling, and for the jumps
    of tokens that come rarely (Bernstein's inequality). Returns the weights, (R, V).
    """
    codec = case.codec
    logits = case.logits_NV[:1].expand(redraws, -1)
    gold = case.gold_N[:1].expand(redraws)
    many = Case(codec, logits, gold)
    records = encode(codec, sample_units(codec, logits, gold, tables=tables))
    weights_RV = decoded(codec, records, gold)
    rest_N, number_N = count_case_units(many, records)
    unit = np.abs(rest_N / np.maximum(number_N, 1)).max()
    jump = max(unit, 1 - math.exp(-codec.rules.find_step(codec)))
    error_V = np.abs(weights_RV.mean(0) - case.p_NV[0])
    error_V -= PARETO * unit + 12.5 / 3 * jump / redraws + 1e-6
    z_V = np.maximum(error_V, 0) / np.maximum(weights_RV.std(0) / math.sqrt(redraws), 1e-9)
    assert z_V.max() < 5, (int(z_V.argmax()), float(error_V.max()))
    return weights_RV


@pytest.mark.long
@settings(deadline=None, max_examples=40)
@given(case=cases(profiles=(UNITS,), vocabularies=(2, 3, 63, 64, 65, 130), rows=1))
def test_redraws_average_to_any_distribution(case: Case) -> None:
    require_unbiased(case, 3000 if case.codec.threshold > 0.01 else 1000)


@pytest.mark.long
def test_redraws_average_to_the_distribution() -> None:
    codec = make_codec(UNITS, 200, 1 / 64, always_keep=(7, 150))
    case = Case(codec, make_logits("normal", 1, 200, 2.0, 3), torch.tensor([11]))
    weights = require_unbiased(case, 8000)
    p = case.p_NV[0]
    error = weights.std(0) / math.sqrt(len(weights))
    z = (weights.mean(0) - p) / np.maximum(error, 1e-9)
    assert np.abs(z[p > 1e-3]).mean() < 1.1
    light = p < 1 / 256
    assert weights[:, light].sum(1).mean() == pytest.approx(p[light].sum(), rel=0.02)


def test_kept_tokens_that_round_up_beside_a_likely_next_token_take_nothing_from_others() -> None:
    """The known tokens may be rounded to more than 1 together; then the rest is below 0."""
    codec = make_codec(UNITS, 40, 0.04, always_keep=(5,))
    p = torch.full((1, 40), 0.005 / 38)
    p[0, 3] = 0.98
    p[0, 5] = 0.015
    case = Case(codec, p.log(), torch.tensor([3]))
    weights = require_unbiased(case, 8000)
    others = np.delete(weights, [3, 5], axis=1).sum(1)
    error = others.std() / math.sqrt(len(others))
    assert abs(others.mean() - 0.005) < 5 * error + 1e-5


@pytest.mark.long
@pytest.mark.parametrize("poor", [False, True])
def test_tails_whose_least_ratios_are_above_the_bound_have_the_same_law(
    poor: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small bound makes every position look at all tokens."""
    monkeypatch.setattr(drawing, "BOUND", 0.5)
    monkeypatch.setattr(drawing, "_SLACK", 15.0)
    short = count_short(monkeypatch)
    codec = make_codec(UNITS, 130, 0.0155, always_keep=(4,))
    tables = make_poor_tables(130) if poor else None
    for kind, spread in (("normal", 1.0), ("uniform", 1.0), ("masked", 2.0)):
        case = Case(codec, make_logits(kind, 1, 130, spread, 5), torch.tensor([1]))
        require_unbiased(case, 3000, tables)
        found = sample_units(codec, case.logits_NV.expand(50, -1), case.gold_N.expand(50))
        require_units(Case(codec, case.logits_NV.expand(50, -1), case.gold_N.expand(50)), found)
    assert short[0] > 3000


def count_short(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the positions at which all tokens are looked at."""
    counted = [0]
    find = drawing._Race._find_all_late

    def count(race: drawing._Race) -> drawing._Entrants:
        counted[0] += len(race.count_N)
        return find(race)

    monkeypatch.setattr(drawing._Race, "_find_all_late", count)
    return counted


def test_all_tokens_are_looked_at_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    short = count_short(monkeypatch)
    codec = make_codec(UNITS, 2048, 0.04)
    sample_units(codec, make_logits("normal", 2000, 2048, 2.0, 5))
    assert short[0] < 20


@pytest.mark.long
@pytest.mark.parametrize("poor", [False, True])
def test_chances_are_those_of_a_sample_in_proportion_to_size(poor: bool) -> None:
    """Each token of a tail is drawn with the chance m p / R, but for Pareto's error."""
    codec = make_codec(UNITS, 150, 0.0155)
    logits = make_logits("normal", 1, 150, 1.2, 8)
    count = 8000
    tables = make_poor_tables(150) if poor else None
    found = sample_units(codec, logits.expand(count, -1), tables=tables)
    p = torch.softmax(logits[0].double(), 0).numpy()
    p[0] = 0.0
    heads = np.bincount(found.head_ids, minlength=150) > 0
    tail = np.where(heads, 0.0, p)
    chance = found.tail_count.mean() * tail / tail.sum()
    seen = np.bincount(found.tail_ids, minlength=150) / count
    assert heads.any() and (seen[tail == 0] == 0).all()
    error = np.sqrt(chance * (1 - chance) / count)
    assert (np.abs(seen - chance) < 5 * error + PARETO + 12.5 / 3 / count).all()
    drawn = (np.abs(seen - chance) / np.maximum(error, 1e-9))[tail > 1e-4]
    assert drawn.mean() < 1.1


def test_known_tokens_are_rounded_without_bias_to_codes_that_stay_as_they_are() -> None:
    logp = torch.tensor([[-0.003, -0.51, -3.21, -40.01, -300.0, 0.0]]).expand(20_000, -1)
    uniform = torch.rand(20_000, 6, generator=torch.Generator().manual_seed(0)).double()
    codes = round_known(logp, uniform)
    assert (codes % 8 == 0).all() and int(codes.max()) < 65_535
    p = torch.exp(-codes / 256.0).double()
    z = (p.mean(0) - logp[0].double().exp())[:4] / (p.std(0)[:4] / math.sqrt(20_000))
    assert z.abs().max() < 4
    assert not codes[:, 5].any()


# ---------------------------------------------------------------------- the same bits


def require_same(left: UnitSample, right: UnitSample) -> None:
    for name, value in vars(left).items():
        assert np.array_equal(value, getattr(right, name)), name


def draw_rows(
    sampler: UnitSampler, case: Case, chance: UnitRandomness, cuts: list[slice]
) -> UnitSample:
    """Draw the sample of a case in parts."""
    cluster_N = torch.arange(len(case.gold_N)) % case.codec.clusters
    parts = [
        sampler.draw_units(
            case.logits_NV[rows], case.gold_N[rows], cluster_N[rows], chance.select(rows)
        )
        for rows in cuts
    ]
    return make_sample([HostCopy.start(each).wait() for each in parts], UnitSample)


@settings(deadline=None, max_examples=25)
@given(case=cases(profiles=(UNITS,), vocabularies=(3, 65, 300, 2048), rows=9))
def test_a_record_depends_on_itself_alone(case: Case) -> None:
    sampler = UnitSampler(case.codec, make_tables(case.codec.vocabulary_size, 2))
    (chance,) = UnitRandomness.of_each(case.codec, [5], [np.arange(9)], CPU)
    whole = draw_rows(sampler, case, chance, [slice(9)])
    for size in (1, 2, 5):
        cuts = [slice(start, start + size) for start in range(0, 9, size)]
        require_same(draw_rows(sampler, case, chance, cuts), whole)


def test_a_record_does_not_depend_on_passes_or_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = make_codec(UNITS, 40_001, 0.02, always_keep=(9,), seed=6)
    case = Case(codec, make_logits("normal", 12, 40_001, 3.0, 2), torch.arange(12))
    sampler = UnitSampler(codec, make_tables(40_001, 2))
    (chance,) = UnitRandomness.of_each(codec, [5], [np.arange(12)], CPU)
    whole = draw_rows(sampler, case, chance, [slice(12)])
    for elements, candidates in ((1, 1), (7 * 40_001, 2**12), (2**30, 2**30)):
        monkeypatch.setitem(sampling.PASS_ELEMENTS, "cpu", elements)
        monkeypatch.setitem(drawing.CANDIDATES, "cpu", candidates)
        for threads in (4, 1):
            torch.set_num_threads(threads)
            require_same(draw_rows(sampler, case, chance, [slice(5), slice(5, 12)]), whole)
    back = UnitRandomness(
        chance.uniform_N.flip(0), chance.rounding_NA.flip(0), chance.starts_N2.flip(0)
    )
    turned = sampler.draw_units(
        case.logits_NV.flip(0), case.gold_N.flip(0), (torch.arange(12) % 2).flip(0), back
    )
    tails = turned["tail_ids"].split(turned["tail_count"].tolist())
    assert torch.cat(tails[::-1]).tolist() == whole.tail_ids.tolist()


def test_a_sample_is_not_changed_by_the_next_one() -> None:
    codec = make_codec(UNITS, 300)
    sampler = UnitSampler(codec, make_tables(300, 2))
    (chance,) = UnitRandomness.of_each(codec, [0], [np.arange(4)], CPU)
    gold = torch.zeros(4, dtype=torch.int64)
    logits = make_logits("normal", 4, 300, 2.0, 0)
    first = sampler.draw_units(logits, gold, gold, chance)
    before = {name: each.clone() for name, each in first.items()}
    sampler.draw_units(make_logits("normal", 4, 300, 5.0, 1), gold, gold, chance)
    assert all(torch.equal(first[name], each) for name, each in before.items())
    assert torch.equal(logits, make_logits("normal", 4, 300, 2.0, 0)), "logits are only read"


def test_chance_is_a_function_of_seed_sequence_and_position() -> None:
    codec = make_codec(UNITS, 300, always_keep=(3,))

    def derive(codec: object, sequence: int, positions: list[int]) -> list[torch.Tensor]:
        (found,) = UnitRandomness.of_each(codec, [sequence], [np.array(positions)], CPU)
        return [found.uniform_N, found.rounding_NA, found.starts_N2]

    whole = derive(codec, 5, list(range(30)))
    for mine, theirs in zip(derive(codec, 5, [29, 3]), whole, strict=True):
        assert torch.equal(mine, theirs[[29, 3]])
    both = UnitRandomness.of_each(codec, [4, 5], [np.arange(2), np.arange(30)], CPU)[1]
    assert torch.equal(both.starts_N2, whole[2]) and torch.equal(both.rounding_NA, whole[1])
    for other in (
        derive(codec, 6, list(range(30))),
        derive(replace(codec, seed=1), 5, [*range(30)]),
    ):
        assert not any((mine == theirs).any() for mine, theirs in zip(other, whole, strict=True))


def test_the_sizes_of_the_tails_are_those_of_the_tokens_that_may_be_drawn() -> None:
    codec = make_codec(UNITS, 300, 0.02)
    sampler = UnitSampler(codec, make_tables(300, 2))
    (chance,) = UnitRandomness.of_each(codec, [0], [np.arange(6)], CPU)
    logits = make_logits("normal", 6, 300, 2.0, 0)
    zeros = torch.zeros(6, dtype=torch.int64)
    found = sampler.draw_units(logits, zeros, zeros, chance)
    p_NV = torch.softmax(logits, 1)
    p_NV[:, 0] = 0.0
    rows_H = torch.repeat_interleave(torch.arange(6), found["head_count"])
    # A head that got no unit is no tail either: only tokens above a unit are heads here.
    left_N = 1 - torch.softmax(logits, 1)[:, 0]
    p_NV[p_NV > codec.threshold] = 0.0
    assert sampler.tails is not None
    tails_NV = sampler.tails.size_NQU.flatten(1)[:, :300]
    assert not tails_NV[rows_H, found["head_ids"]].any()
    assert tails_NV.sum() <= left_N.sum()
    torch.testing.assert_close(tails_NV[p_NV == 0], torch.zeros_like(tails_NV[p_NV == 0]))


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_broken_logits_are_refused(bad: float) -> None:
    logits = torch.zeros(2, 50)
    logits[1, 3] = bad
    with pytest.raises(ModelError, match="NaN or infinite"):
        sample_units(make_codec(UNITS, 50), logits)


def test_positions_without_a_tail_or_none_at_all_are_fine() -> None:
    codec = make_codec(UNITS, 50)
    none = sample_units(codec, torch.zeros(0, 50), torch.zeros(0, dtype=torch.int64))
    assert len(none.head_count) == len(none.tail_ids) == 0
    sure = torch.full((3, 50), -1e9)
    sure[:, 7] = 0.0
    found = sample_units(codec, sure, torch.full((3,), 7))
    assert not found.head_count.any() and not found.tail_count.any()
