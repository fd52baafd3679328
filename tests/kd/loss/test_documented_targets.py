"""The formulas of docs/formats.md, in plain Python, against the decoder of the loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.support.small.caches import make_cache, make_codec, make_identity
from cache.store import open_cache
from kd.loss.sparse_targets import SparseTarget, decode_tempered, decode_threshold
from kd.loss.whole_targets import decode_top
from tests.support.formats.page_reader import (
    Weights,
    find_best,
    list_known_ids,
    list_records,
    read_manifest,
    read_sequence,
    weigh_tempered,
    weigh_threshold,
    weigh_top,
    weigh_units,
)


def open_small(folder: Path, profile: str, **options: Any) -> tuple[Path, Any, Any, torch.Tensor]:
    path = make_cache(folder, make_identity(codec=make_codec(profile, **options)))
    return path, *read_targets(path, 2)


def read_targets(path: Path, number: int) -> tuple[Any, Any, torch.Tensor]:
    """Read the records of a sequence as the loss takes them, and their next tokens."""
    store = open_cache(path)
    sequences, records = store.read([number])
    # The loss reads the tails of one draw as a vector.
    columns = {
        name: torch.from_numpy(column.astype(np.int64)) for name, column in records.columns.items()
    }
    return store.codec, columns, torch.from_numpy(sequences.find_gold_ids().astype(np.int64))


def require_equal(target: SparseTarget, expected: list[Weights], tolerance: float) -> None:
    for place, weights in enumerate(expected):
        entries = target.find_entries(slice(place, place + 1))
        found: dict[int, float] = {}
        pairs = zip(target.ids_E[entries].tolist(), target.weights_E[entries].tolist(), strict=True)
        for token, weight in pairs:
            found[token] = found.get(token, 0.0) + weight
        wanted: dict[int, float] = {}
        for token, weight in weights:
            wanted[token] = wanted.get(token, 0.0) + weight
        assert {token for token, weight in found.items() if weight} <= wanted.keys()
        for token, weight in wanted.items():
            assert found[token] == pytest.approx(weight, rel=tolerance)


@pytest.mark.parametrize("threshold", [0.02, 0.3])
def test_threshold(tmp_path: Path, threshold: float) -> None:
    options = {"threshold": threshold, "always_keep": (3, 9)}
    path, codec, columns, gold_N = open_small(tmp_path, "threshold", **options)
    about = read_manifest(path).content["identity"]["codec"]
    expected = weigh_units(read_sequence(path, 2), about)
    assert [sum(weight for _, weight in each) for each in expected] == pytest.approx(
        [1.0] * len(expected), abs=1e-12
    )
    require_equal(decode_threshold(codec, columns, gold_N), expected, 1e-9)


@pytest.mark.parametrize("vocabulary", [8, 300])
def test_the_best_tokens_of_threshold(tmp_path: Path, vocabulary: int) -> None:
    kinds: Counter[tuple[bool, str]] = Counter()
    for threshold in (0.02, 0.1, 0.3):
        codec_identity = make_codec(threshold=threshold, always_keep=(3, 5))
        path = make_cache(tmp_path, make_identity(vocabulary, codec=codec_identity))
        about = read_manifest(path).content["identity"]["codec"]
        for number in range(10):
            codec, columns, gold_N = read_targets(path, number)
            found = read_sequence(path, number)
            best = find_best(found, about)
            target = decode_threshold(codec, columns, gold_N)
            assert target.find_best_N().tolist() == best
            kinds.update(name_kinds(found, about, best))
    # Each way to the best token was taken.
    assert {(True, "head"), (False, "head"), (False, "known"), (False, "none")} <= set(kinds), kinds


def name_kinds(
    found: dict[str, Any], about: dict[str, Any], best: list[int]
) -> Iterator[tuple[bool, str]]:
    """Yield whether a head of each record is marked, and where its best token is."""
    start = 0
    for count, known, token in zip(
        found["head_count"], list_known_ids(found, about), best, strict=True
    ):
        end = start + count
        marked = any(twice % 2 for twice in found["head_units"][start:end])
        yield marked, "none" if token < 0 else "known" if token in known else "head"
        start = end


def test_threshold_of_version_020(tmp_path: Path) -> None:
    options = {"clusters": 0, "fitted": 0, "always_keep": (3, 9)}
    path, codec, columns, gold_N = open_small(tmp_path, "threshold", **options)
    about = read_manifest(path).content["identity"]["codec"]
    records = list_records(read_sequence(path, 2), about)
    expected = [weigh_threshold(record) for record in records]
    require_equal(decode_threshold(codec, columns, gold_N), expected, 1e-9)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7, 2.0])
def test_tempered_but_for_the_correction_of_rounding(tmp_path: Path, temperature: float) -> None:
    path, codec, columns, gold_N = open_small(tmp_path, "tempered", always_keep=(3,))
    about = read_manifest(path).content["identity"]["codec"]
    records = list_records(read_sequence(path, 2), about)
    expected = [weigh_tempered(record, about, temperature) for record in records]
    require_equal(decode_tempered(codec, columns, gold_N, temperature), expected, 0.01)


def test_topk(tmp_path: Path) -> None:
    path, _, columns, _ = open_small(tmp_path, "topk")
    target = decode_top(columns)
    for place, (weights, rest) in enumerate(weigh_top(read_sequence(path, 2))):
        assert target.ids_NK[place].tolist() == [token for token, _ in weights]
        assert target.p_NK[place].tolist() == pytest.approx([weight for _, weight in weights])
        assert float(target.rest_N[place]) == pytest.approx(rest)
