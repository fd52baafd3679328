"""The mean tail of a cache: made of the sums of its shards, sealed, and checked like all else."""

from __future__ import annotations

import json
from functools import reduce
from operator import add
from pathlib import Path

import numpy as np
import pytest

from bench.support.small.caches import (
    PROVENANCE,
    make_codec,
    make_identity,
    make_shard,
    write_folders,
)
from cache.checking.verify import verify_cache
from cache.errors import CacheCorrupt, CacheIncomplete
from cache.manifest import (
    DITHER_FORMAT_VERSION,
    PLAIN_FORMAT_VERSION,
    TAIL_MEAN_FORMAT_VERSION,
    CacheIdentity,
)
from cache.records import TailSums, decode_tail_mean, encode_tail_mean
from cache.shards.names import TAIL_SUMS
from cache.store import Cache, open_cache
from cache.writing.writer import open_writer
from tests.support.caches import EARLIER

IDENTITY = make_identity(train_sequences=7, codec=make_codec(seed=0))
VOCABULARY = IDENTITY.tokenizer.vocabulary_size


def make_sums(index: int) -> TailSums:
    rng = np.random.default_rng(index)
    sum_V = rng.random(VOCABULARY)
    sum_V[0] = 0.0
    return TailSums(2 + index, 30, sum_V, sum_V**2 * (1 + index))


def write_cache(
    root: Path, without: int | None = None, identity: CacheIdentity = IDENTITY
) -> Cache:
    with open_writer(root, identity) as writer:
        write_folders(writer)
        for index in range(identity.shard_count):
            sums = None if index == without else make_sums(index)
            writer.write_shard(index, *make_shard(identity, index), sums)
        writer.finish(PROVENANCE)
    return open_cache(writer.folder, identity)


def read_version(store: Cache) -> int:
    return int(json.loads((store.folder / "manifest.json").read_bytes())["version"])


def test_a_cache_holds_the_mean_of_the_sums_of_its_shards(tmp_path: Path) -> None:
    store = write_cache(tmp_path)
    sums = reduce(add, map(make_sums, range(IDENTITY.shard_count)))
    mean = sums.compute_mean(IDENTITY.codec.threshold)
    expected = decode_tail_mean(encode_tail_mean(mean))
    np.testing.assert_allclose(expected["mean"], mean["mean"], rtol=2.1e-3)
    np.testing.assert_allclose(expected["share"], mean["share"], atol=0.51 / 255)
    found = store.tail_mean()
    assert found is not None
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == np.float32
        assert found[name].tobytes() == values.tobytes()
    assert found["share"][1:].min() > 0
    assert found["share"].max() <= 1
    assert found["share"][0] == 0
    assert verify_cache(store.folder) == []
    assert not (store.folder / TAIL_SUMS).exists()
    assert read_version(store) == DITHER_FORMAT_VERSION
    assert read_version(write_cache(tmp_path, identity=EARLIER)) == TAIL_MEAN_FORMAT_VERSION


def test_a_mean_of_zero_and_the_least_one_are_kept() -> None:
    mean = np.array([0.0, 1e-40, 1e-12, 0.04, 1.0], np.float32)
    share = np.array([0.0, 1.0, 0.5, 0.25, 0.0], np.float32)
    found = decode_tail_mean(encode_tail_mean({"mean": mean, "share": share}))
    assert found["mean"][0] == 0
    np.testing.assert_allclose(found["mean"], mean, rtol=2.1e-3)
    np.testing.assert_allclose(found["share"], share, atol=0.51 / 255)


def test_sequences_without_a_target_have_no_mean() -> None:
    found = TailSums(2, 0, np.zeros(3), np.zeros(3)).compute_mean(0.04)
    assert not found["mean"].any()
    assert not found["share"].any()


def test_without_the_sums_of_a_shard_there_is_no_mean(tmp_path: Path) -> None:
    store = write_cache(tmp_path, without=1)
    assert store.tail_mean() is None
    assert verify_cache(store.folder) == []
    earlier = write_cache(tmp_path, without=1, identity=EARLIER)
    assert (read_version(store), read_version(earlier)) == (
        DITHER_FORMAT_VERSION,
        PLAIN_FORMAT_VERSION,
    )
    assert "tail_mean" not in json.loads((store.folder / "manifest.json").read_bytes())


def test_a_writer_goes_on_with_the_sums_of_an_earlier_one(tmp_path: Path) -> None:
    whole = write_cache(tmp_path / "whole").tail_mean()
    for index in range(IDENTITY.shard_count):
        with open_writer(tmp_path / "cut", IDENTITY) as writer:
            assert index in writer.find_missing_shards()
            write_folders(writer)
            writer.write_shard(index, *make_shard(IDENTITY, index), make_sums(index))
    with open_writer(tmp_path / "cut", IDENTITY) as writer:
        writer.finish(PROVENANCE)
    cut = open_cache(tmp_path / "cut" / IDENTITY.fingerprint).tail_mean()
    assert whole is not None and cut is not None
    assert whole["mean"].tobytes() == cut["mean"].tobytes()
    assert whole["share"].tobytes() == cut["share"].tobytes()


def test_a_shard_that_is_captured_again_keeps_the_mean(tmp_path: Path) -> None:
    before = write_cache(tmp_path).tail_mean()
    with open_writer(tmp_path, IDENTITY) as writer:
        writer.write_shard(1, *make_shard(IDENTITY, 1), make_sums(1))
        writer.finish(PROVENANCE)
    after = open_cache(writer.folder, IDENTITY).tail_mean()
    assert before is not None and after is not None
    assert before["mean"].tobytes() == after["mean"].tobytes()
    assert verify_cache(writer.folder) == []


def test_damaged_sums_are_not_used(tmp_path: Path) -> None:
    with open_writer(tmp_path, IDENTITY) as writer:
        write_folders(writer)
        for index in range(IDENTITY.shard_count):
            writer.write_shard(index, *make_shard(IDENTITY, index), make_sums(index))
        (chunk,) = (writer.folder / TAIL_SUMS / "tails-000001/sums").glob("c*")
        chunk.write_bytes(chunk.read_bytes()[:-1] + b"!")
        writer.finish(PROVENANCE)
    store = open_cache(writer.folder, IDENTITY)
    assert store.tail_mean() is None
    assert verify_cache(store.folder) == []


@pytest.mark.parametrize("name", ["mean", "share"])
def test_damage_of_the_mean_is_found(tmp_path: Path, name: str) -> None:
    store = write_cache(tmp_path)
    (chunk,) = (store.folder / "tail_mean" / name).glob("c*")
    chunk.write_bytes(chunk.read_bytes()[:-1] + b"!")
    assert any(name in line for line in verify_cache(store.folder))
    with pytest.raises(CacheCorrupt):
        open_cache(store.folder).tail_mean()


def test_an_unsealed_shard_leaves_the_sums_in_place(tmp_path: Path) -> None:
    with open_writer(tmp_path, IDENTITY) as writer:
        write_folders(writer)
        writer.write_shard(0, *make_shard(IDENTITY, 0), make_sums(0))
        with pytest.raises(CacheIncomplete):
            writer.finish(PROVENANCE)
        assert (writer.folder / TAIL_SUMS / "tails-000000").is_dir()
