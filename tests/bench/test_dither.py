"""The bench of records in units prints bytes, noise and bias, beside records of version 0.2.0."""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
import pytest
import torch

from bench.dither import (
    COLUMNS,
    Errors,
    TeacherChunk,
    compare,
    divide_tokens,
    measure,
    read_chunks,
    record_all,
)
from bench.records import Truth
from cache.records import Sequences
from kd.loss.sparse_targets import SparseTarget
from kd.models.lm_head import LMHead

V, D, LENGTH = 300, 8, 121
OPTIONS = argparse.Namespace(threshold=0.03, scale=1.05, clusters=[1, 4], seeds=2, fit=3, divide=1)


@pytest.fixture(scope="module")
def truth() -> Truth:
    """A teacher of 300 words, and six sequences."""
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(LENGTH - 1, D, generator=generator) for _ in range(6)]
    head = LMHead(torch.randn(V, D, generator=generator), None, 1.0, None, V)
    gold = [torch.randint(V, (LENGTH - 1,), generator=generator) for _ in states]
    tokens = np.zeros((6, LENGTH), np.uint32)
    mask = np.zeros((6, LENGTH), bool)
    mask[:, :-1] = True
    for row, gold_N in zip(tokens, gold, strict=True):
        row[1:] = gold_N
    return Truth(Sequences(tokens, np.zeros_like(mask), mask), states, gold, head)


@pytest.mark.parametrize("parts", [1, 3])
def test_all_records_are_unbiased_at_about_the_same_noise(truth: Truth, parts: int) -> None:
    teacher = divide_tokens(truth, parts)
    found = list(record_all(teacher, 3, OPTIONS))
    compare(teacher, 3, found)
    assert [(each.codec.clusters, each.codec.seed) for each in found] == [
        (clusters, seed) for clusters in (0, 1, 4) for seed in (0, 1)
    ]
    for each in found:
        assert len(each.records) == 3 * (LENGTH - 1)
        assert each.errors.largest_z < 5, each.codec
        assert 0.7 < each.errors.noise / found[0].errors.noise < 1.3, each.codec
        assert each.whole > 0 and each.side > 0


def test_the_tables_have_a_row_for_each_seed_and_each_array(truth: Truth) -> None:
    lines = measure(truth, OPTIONS)
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    records, arrays = rows[:7], rows[7:]
    assert records[0] == COLUMNS
    assert [row[2] for row in records[1:]] == ["0", "1"] * 3
    assert [row[4] for row in records[1:3]] == ["1.000", "1.000"]
    names = {row[0] for row in arrays[1:]}
    assert {"tail_0_symbols", "head_logprobs", "gap_symbols", "head_units", "cluster"} <= names
    for column, row in zip((1, 2, 3), (1, 3, 5), strict=True):
        whole = sum(float(each[column]) for each in arrays[1:])
        assert whole == pytest.approx(float(records[row][3]), abs=0.005 * len(names) + 0.005)


def test_the_parts_of_a_token_share_its_probability(truth: Truth) -> None:
    divided = divide_tokens(truth, 3)
    assert divided.head.vocabulary == 3 * V
    for whole, parts in zip(read_chunks(truth, 2), read_chunks(divided, 2), strict=True):
        p_N3V = parts.p_NV.unflatten(1, (3, V))
        torch.testing.assert_close(p_N3V.sum(1), whole.p_NV, rtol=1e-5, atol=1e-12)
        torch.testing.assert_close(p_N3V[:, 0], 3 * p_N3V[:, 2], rtol=1e-5, atol=1e-12)
        assert torch.equal(parts.gold_N % V, whole.gold_N)
    gold = torch.cat(divided.gold)
    assert float((gold < V).float().mean()) == pytest.approx(6 / 11, abs=0.1)


def test_errors_are_those_of_dense_weights(truth: Truth) -> None:
    chunk = next(read_chunks(truth, 1))
    generator = torch.Generator().manual_seed(1)
    ids_NK = torch.rand(len(chunk.p_NV), V, generator=generator).argsort(1)[:, :5]
    w_NV = torch.zeros_like(chunk.p_NV).scatter_(1, ids_NK, 0.2)
    offsets = torch.arange(len(ids_NK) + 1) * 5
    target = SparseTarget(
        offsets,
        ids_NK.flatten(),
        torch.full((ids_NK.numel(),), 0.2, dtype=torch.float64),
        offsets,
        offsets,
    )
    errors = Errors()
    errors.add(target, chunk, chunk.sum_variances(0.03))
    error_NV = w_NV - chunk.p_NV
    assert errors.noise == pytest.approx(float(error_NV.square().sum()))
    for decade, found in enumerate(errors.error_B):
        expected = error_NV[chunk.decade_NV == decade].sum()
        assert found == pytest.approx(float(expected), abs=1e-9)


def test_decades_begin_at_powers_of_ten() -> None:
    p_NV = torch.tensor([[0.5, 0.02, 3e-5, 0.0]], dtype=torch.float64)
    chunk = TeacherChunk(torch.zeros(1, dtype=torch.int64), p_NV)
    assert chunk.decade_NV.tolist() == [[0, 1, 4, 7]]
    assert chunk.p_B.tolist() == pytest.approx([0.5, 0.02, 0, 0, 3e-5, 0, 0, 0])
    expected = 0.03**2 * (2 / 3) * (1 / 3)
    assert chunk.sum_variances(0.03)[1] == pytest.approx(expected)


def test_weights_that_do_not_sum_to_one_end_the_command(truth: Truth) -> None:
    chunk = next(read_chunks(truth, 1))
    offsets = torch.arange(len(chunk.p_NV) + 1)
    ids = torch.zeros(len(chunk.p_NV), dtype=torch.int64)
    target = SparseTarget(offsets, ids, torch.ones(len(ids), dtype=torch.float64), offsets, offsets)
    Errors().add(target, chunk, np.zeros(8))
    with pytest.raises(SystemExit, match="sum to 1"):
        Errors().add(replace(target, weights_E=target.weights_E * 0.99), chunk, np.zeros(8))
