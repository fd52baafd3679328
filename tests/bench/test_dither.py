"""Tails with shared dither: what is read is what was drawn, in fixed numbers and without bias."""

from __future__ import annotations

import argparse
import math

import numpy as np
import torch
from torch import Tensor

from bench.dither.records import HEADS, fit_clusters, measure
from bench.dither.tails import Drawn, Tables, draw_slots, draw_tails, read_drawn, write_drawn
from bench.records import Truth
from cache.records import Sequences
from kd.models.lm_head import LMHead

V = 300
SIZE = 1 << 12
ROWS = 4_000


def make_tails(rows: int, seed: int) -> Tensor:
    """Tails like a teacher's: few likely tokens, many rare ones, and some of probability 0."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2.5 * torch.randn(rows, V, generator=generator, dtype=torch.float64)
    tails = torch.softmax(logits, 1).masked_fill(logits < -4, 0.0)
    return tails.masked_fill(tails > 0.05, 0.0)


def make_tables(clusters: int) -> Tables:
    """Tables of other tails, which lack a tenth of the tokens."""
    mass = torch.stack([make_tails(20, 100 + each).mean(0) for each in range(clusters)])
    return Tables.of(mass.masked_fill(torch.arange(V) % 10 == 3, 0.0), SIZE)


def draw(tail_NV: Tensor, count_N: Tensor, tables: Tables, seed: int) -> tuple[Drawn, Tensor]:
    cluster_N = torch.arange(len(tail_NV)) % len(tables.slots_CZ)
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(tail_NV.shape, generator=generator, dtype=torch.float64)
    places = (seed, 7, np.arange(len(tail_NV)))
    return draw_tails(tail_NV, count_N, tables, cluster_N, places, uniform), cluster_N


def test_slots_have_the_shares_of_the_prior() -> None:
    tables = make_tables(3)
    for slots, prior in zip(tables.slots_CZ, tables.prior_CV, strict=True):
        assert torch.equal(torch.bincount(slots, minlength=V).double() / SIZE, prior)
    assert torch.allclose(tables.prior_CV.sum(1), torch.ones(3, dtype=torch.float64))
    # A cluster that no position was in has the mean of all.
    empty = Tables.of(torch.stack([make_tails(20, 1).mean(0), torch.zeros(V)]), SIZE)
    assert (empty.prior_CV[0] - empty.prior_CV[1]).abs().max() <= 1 / SIZE


def test_slots_are_uniform_and_depend_on_every_counter() -> None:
    k = np.arange(40_000)
    slots = draw_slots(5, 1, np.array(2), k, 16)
    counts = np.bincount(slots, minlength=16)
    assert np.abs(counts - 2500).max() < 5 * math.sqrt(2500)
    for seed, sequence, position in ((6, 1, 2), (5, 2, 2), (5, 1, 3)):
        again = draw_slots(seed, sequence, np.array(position), k, 16)
        assert abs(float((again == slots).mean()) - 1 / 16) < 0.01
    few = draw_slots(5, 1, np.array(2), k[[9, 3]], 16)
    assert few.tolist() == slots[[9, 3]].tolist()


def test_a_reader_finds_the_drawn_tokens_in_fixed_numbers() -> None:
    tables = make_tables(3)
    tails = make_tails(200, 2)
    count = torch.arange(200) % 12
    drawn, cluster = draw(tails, count, tables, 11)
    written = write_drawn(drawn, 200)
    assert (written.accepted_N + written.other_N).tolist() == count.tolist()
    assert written.other_N.sum() > 10 and written.accepted_N.sum() > 500
    found = read_drawn(written, tables, cluster.numpy(), (11, 7, np.arange(200)))
    for row, ids in enumerate(found):
        assert ids == sorted(drawn.ids_M[drawn.rows_M == row].tolist())
        assert len(set(ids)) == len(ids)
        assert (tails[row, ids] > 0).all()


def test_the_chance_of_each_token_is_its_share_of_the_draws() -> None:
    """Pareto's own error is of the order of a thousandth; a wrong prior must not add to it."""
    tail = make_tails(1, 3)
    count = 6
    hits = torch.zeros(V, dtype=torch.float64)
    for seed in range(5):
        drawn, _ = draw(tail.expand(ROWS, -1), torch.full((ROWS,), count), make_tables(2), seed)
        hits += torch.bincount(drawn.ids_M, minlength=V)
    chance = count * tail[0] / tail.sum()
    assert chance.max() < 1
    draws = 5 * ROWS
    error = (hits / draws - chance).abs() - 0.01 * chance - 12.5 / 3 / draws
    z = error.clamp(min=0) / (chance * (1 - chance) / draws).sqrt().clamp(min=1e-9)
    assert z.max() < 5
    assert hits[tail[0] == 0].sum() == 0


def test_a_better_prior_makes_shorter_gaps() -> None:
    tails = make_tails(1, 4).expand(500, -1)
    count = torch.full((500,), 8)
    own = Tables.of(tails[:1], SIZE)
    means = [
        np.log2(write_drawn(draw(tails, count, tables, 1)[0], 500).k_E).mean()
        for tables in (own, make_tables(1))
    ]
    assert means[0] < means[1] - 1


def test_every_kind_of_record_sums_to_one_and_is_unbiased() -> None:
    """The measured records, whose weights must sum to 1, beside a teacher of 300 words."""
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(120, 8, generator=generator) for _ in range(6)]
    head = LMHead(torch.randn(V, 8, generator=generator), None, 1.0, None, V)
    gold = [torch.randint(V, (120,), generator=generator) for _ in states]
    sequences = Sequences(
        np.zeros((6, 121), np.uint32), np.zeros((6, 121), bool), np.zeros((6, 121), bool)
    )
    truth = Truth(sequences, states, gold, head)
    clusters = fit_clusters(truth, range(3, 6), 0.03, [1, 4], SIZE)
    options = argparse.Namespace(threshold=0.03, every=1, heads=HEADS, scale=1.05, seed=0)
    rows = measure(truth, range(3), clusters, options)
    assert len(rows) == 11
    for heads, tails, size, _, _, _, noise, z, _ in rows:
        assert float(z) < 5, (heads, tails)
        assert float(size) > 0 and 0.7 < float(noise) < 1.3, (heads, tails)
