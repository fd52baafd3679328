"""Exports of every profile, read back by plain pyarrow, by ``datasets`` and by our own import."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch

from bench.support.small.caches import (
    PROVENANCE,
    make_cache,
    make_codec,
    make_identity,
    make_lm_head,
    make_shard,
)
from cache.manifest import CacheIdentity
from cache.records import Records, Sequences
from cache.rounding import ENTROPY_STEP, KNOWN_STEP, TOP_STEP, make_cosine_basis
from cache.store import Cache, open_cache
from cache.writing.writer import open_writer
from kd.errors import DataError
from kd.exchange import distillkit, exporting
from kd.exchange.distillkit import FILL_LOGPROB, Compression, decode_entries
from kd.exchange.exporting import export_records
from kd.loss.decoder import TargetDecoder
from kd.loss.sparse_targets import SparseTarget
from kd.text.batches import make_batch

PROFILES = ("threshold", "tempered", "topk", "dense", "hidden")
V = 300


def make_store(root: Path, profile: str, **options: Any) -> Cache:
    return open_cache(
        make_cache(root, make_identity(vocabulary_size=V, codec=make_codec(profile, **options)))
    )


def rewritten(
    root: Path,
    identity: CacheIdentity,
    change: Callable[[Sequences, Records], tuple[Sequences, Records]],
) -> Cache:
    """Return a cache of random data after ``change`` of each shard."""
    with open_writer(root, identity) as writer:
        for index in range(identity.shard_count):
            writer.write_shard(index, *change(*make_shard(identity, index)))
        writer.finish(PROVENANCE)
    return open_cache(root / identity.fingerprint)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [
        row
        for file in sorted(folder.glob("*.parquet"))
        for row in pyarrow.parquet.read_table(file).to_pylist()
    ]


def distribution(store: Cache, number: int) -> np.ndarray:
    """Return all probabilities (N, V) of the records of one sequence of a dense or hidden cache."""
    _, records = store.read([number])
    if store.codec.profile == "dense":
        logits = records["logprobs"].astype(np.float64)
    else:
        hidden = records["hidden"].astype(np.float64) * records["hidden_scale"][:, None]
        hidden = hidden @ make_cosine_basis(hidden.shape[1]) if store.codec.cosines else hidden
        logits = hidden @ make_lm_head(V)["weight"].T.astype(np.float64)
    return np.asarray(torch.softmax(torch.from_numpy(logits), 1))


def find_totals(store: Cache, number: int) -> np.ndarray:
    """Return the sums of the weights of one sequence's records at T = 1, (N,)."""
    batch = make_batch(*store.read([number]))
    target = TargetDecoder(store.codec).decode(batch.gold_N, batch.teacher).teacher
    assert isinstance(target, SparseTarget)
    # The weights of profile tempered sum to 1 only in the mean over draws.
    assert (target.total_N is None) == (store.codec.profile == "threshold")
    return np.ones(len(batch)) if target.total_N is None else target.total_N.numpy()


@pytest.mark.parametrize("profile", PROFILES)
def test_plain_parquet_holds_what_the_cache_holds(profile: str, tmp_path: Path) -> None:
    store = make_store(tmp_path / "caches", profile)
    k = 7 if profile in ("dense", "hidden") else None
    said = export_records(store, "parquet", tmp_path / "out", k)
    assert said["files"] == ["train-00000.parquet", "validation-00000.parquet"]
    rows = rows_of(tmp_path / "out")
    assert len(rows) == said["sequences"] == len(store)
    for number, row in enumerate(rows):
        sequences, records = store.read([number])
        mask = sequences.target_mask[0]
        assert row["input_ids"] == sequences.tokens[0].tolist()
        assert row["document_start"] == sequences.document_start[0].tolist()
        assert row["target_mask"] == mask.tolist()
        assert [len(ids) > 0 for ids in row["ids"]] == mask.tolist()
        gold = np.array([each for each in row["gold_logprob"] if each is not None])
        np.testing.assert_allclose(gold, records["known"][:, 0] * -KNOWN_STEP, atol=1e-6)
        np.testing.assert_array_equal(np.array(row["entropy"], object)[~mask], None)
        np.testing.assert_allclose(
            np.array(row["entropy"], object)[mask].astype(float), records["entropy"] * ENTROPY_STEP
        )
        if profile in ("threshold", "tempered"):
            weights = [sum(each) for each in row["weights"] if each]
            np.testing.assert_allclose(weights, find_totals(store, number), atol=1e-6)
            assert all(
                ids[0] == gold
                for ids, gold in zip(
                    (i for i in row["ids"] if i), sequences.find_gold_ids(), strict=True
                )
            )
            continue
        outside = np.exp(
            [
                -np.inf if each is None else each
                for each, there in zip(row["residual"], mask, strict=True)
                if there
            ]
        )
        inside = [np.exp(each).sum() for each in row["logprobs"] if each]
        np.testing.assert_allclose(inside + outside, 1.0, atol=2e-3)
        if profile == "topk":
            assert [each for each in row["ids"] if each] == records["top_ids"].tolist()
            stored = records["top_logprobs"].astype(np.float32) * -np.float32(TOP_STEP)
            assert [each for each in row["logprobs"] if each] == stored.tolist()
            continue
        p = distribution(store, number)
        best = np.argsort(-p, axis=1)[:, :7]
        np.testing.assert_array_equal([each for each in row["ids"] if each], best)
        np.testing.assert_allclose(
            np.exp([each for each in row["logprobs"] if each]),
            np.take_along_axis(p, best, 1),
            rtol=1e-4,
        )


@pytest.mark.parametrize("profile", ["topk", "dense", "hidden"])
def test_distillkit_gets_every_entry_exactly(profile: str, tmp_path: Path) -> None:
    store = make_store(tmp_path / "caches", profile)
    said = export_records(store, "distillkit", tmp_path / "out", 4)
    assert "warning" not in said
    compression = Compression.read(tmp_path / "out" / distillkit.CONFIG)
    assert (compression.k, compression.exact_k, compression.d, compression.fitted) == (
        4,
        4,
        V,
        False,
    )
    found = iter(rows_of(tmp_path / "out"))
    plain = tmp_path / "plain"
    export_records(store, "parquet", plain, 4)
    for row in rows_of(plain):
        starts = [*np.flatnonzero(row["document_start"]), len(row["input_ids"])]
        for first, stop in pairwise(starts):
            if not any(row["target_mask"][first:stop]):
                continue
            document = next(found)
            assert document["input_ids"] == row["input_ids"][first:stop]
            stored = [
                np.array(document[name], np.uint8)
                for name in (distillkit.LOGPROBS, distillkit.INDICES)
            ]
            ids, logprobs = decode_entries(compression, *stored)
            assert ids.tolist() == row["ids"][first : stop - 1]
            assert logprobs.tolist() == row["logprobs"][first : stop - 1]
    assert next(found, None) is None


@pytest.mark.parametrize("profile", ["threshold", "tempered"])
def test_distillkit_gets_the_head_and_is_told_what_it_does_not_get(
    profile: str, tmp_path: Path
) -> None:
    identity = make_identity(vocabulary_size=V, codec=make_codec(profile, always_keep=(3, 5)))

    def of_token_0(sequences: Sequences, records: Records) -> tuple[Sequences, Records]:
        """Return the log-probability of token 0, which is the gold token of all records."""
        return replace(sequences, tokens=np.zeros_like(sequences.tokens)), records

    if profile == "threshold":  # its records are those of the text
        store = open_cache(make_cache(tmp_path / "caches", identity))
    else:
        store = rewritten(tmp_path / "caches", identity, of_token_0)
    said = export_records(store, "distillkit", tmp_path / "out", lossy=True)
    assert said["k"] == 25 + 1 + 2
    assert f"no place for the sampled tail of profile {profile}" in said["warning"]
    assert (
        f"{said['records']:,} of {said['records']:,} records are filled up to 28 entries"
        in said["warning"]
    )
    rounded = "Heads were rounded at random to units of 0.04 at most."
    assert said["warning"].endswith(rounded) == (profile == "threshold")
    compression = Compression.read(tmp_path / "out" / distillkit.CONFIG)
    kept = []
    place = 0
    _, records = store.read(range(len(store)))
    heads = np.split(records["head_ids"], np.cumsum(records["head_count"])[:-1])
    for row in rows_of(tmp_path / "out"):
        ids, logprobs = decode_entries(
            compression,
            *(np.array(row[name], np.uint8) for name in (distillkit.LOGPROBS, distillkit.INDICES)),
        )
        assert (np.diff(logprobs, axis=1) <= 0).all()
        for gold, each, values in zip(row["input_ids"][1:], ids, logprobs, strict=True):
            assert len(set(each.tolist())) == 28
            assert set(each[values > FILL_LOGPROB].tolist()) == {gold, 3, 5, *heads[place].tolist()}
            kept.append(np.exp(values).sum())
            place += 1
    assert place == len(records)
    assert np.mean(kept) == pytest.approx(said["kept_mass"], abs=1e-5)


def test_datasets_finds_the_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets import load_dataset

    monkeypatch.setattr(exporting, "FILE_SEQUENCES", 4)
    store = make_store(tmp_path / "caches", "topk")
    said = export_records(store, "distillkit", tmp_path / "out", 2)
    assert len(said["files"]) == 3
    loaded = load_dataset(str(tmp_path / "out"), cache_dir=str(tmp_path / "hf"))
    assert set(loaded) == {"train", "validation"}
    assert sum(map(len, loaded.values())) == said["rows"]
    assert loaded["train"].column_names == ["input_ids", distillkit.LOGPROBS, distillkit.INDICES]


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    topk, dense, threshold = (
        make_store(tmp_path / "caches", name) for name in ("topk", "dense", "threshold")
    )
    tempered = make_store(tmp_path / "caches", "tempered", temperatures=(1.5, 2.0))
    for store, format_, k, why in (
        (topk, "csv", None, "no format 'csv'"),
        (topk, "parquet", 6, "k is 6, but this cache stores at most 5"),
        (topk, "distillkit", 0, "k is 0"),
        (dense, "parquet", None, "Profile dense stores all 300 tokens of a position.*Set k"),
        (
            threshold,
            "parquet",
            3,
            "The entries of profile threshold are unbiased only all together",
        ),
        (threshold, "distillkit", 27, "stores at most 26 entries of a position"),
        (
            tempered,
            "parquet",
            None,
            "temperature 1 cannot be served, because .* tempered covers temperatures 1.5 to 2",
        ),
    ):
        with pytest.raises(DataError, match=why):
            export_records(store, format_, out, k)
        assert list(tmp_path.iterdir()) == [tmp_path / "caches"]
    out.mkdir()
    (out / "mine").touch()
    with pytest.raises(DataError, match="out is not empty"):
        export_records(topk, "parquet", out)


def test_a_completion_mask_has_no_place_in_distillkit(tmp_path: Path) -> None:
    def masked(sequences: Sequences, records: Records) -> tuple[Sequences, Records]:
        kept = np.arange(len(records)) % 5 > 0
        target = sequences.target_mask.copy()
        target[target] = kept
        columns = {name: column[kept] for name, column in records.columns.items()}
        return replace(sequences, target_mask=target), Records(columns)

    store = rewritten(
        tmp_path / "caches", make_identity(vocabulary_size=V, codec=make_codec("topk")), masked
    )
    export_records(store, "parquet", tmp_path / "plain")
    with pytest.raises(DataError, match="DistillKit has a record for every position"):
        export_records(store, "distillkit", tmp_path / "out")
    assert not (tmp_path / "out").exists()
