"""Batches by windows of shards: each chunk is decoded once an epoch, and the mixing is good."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from bench.support.small.caches import make_cache, make_codec, make_identity
from cache import shard
from cache.reading.arrays import ArrayFolder
from cache.store import open_cache
from kd.config.train import TrainConfig
from kd.text.batches import make_batch
from kd.text.shuffling import EpochWindows
from kd.text.steps import order as ordering
from kd.text.steps.order import list_step_indices
from kd.text.steps.reading import read_training_batches

TRAIN, HELD_OUT, LENGTH, DRAWS = 30, 3, 16, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A cache of 30 training sequences over shards of four, with three draws."""
    identity = make_identity(
        sequence_length=LENGTH,
        train_sequences=TRAIN,
        validation_sequences=HELD_OUT,
        codec=make_codec("tempered", draws=DRAWS),
    )
    return make_cache(tmp_path_factory.mktemp("caches"), identity)


@pytest.fixture(autouse=True)
def _windows_of_two_shards(monkeypatch):
    monkeypatch.setattr(ordering, "WINDOW_TOKENS", 2 * 4 * LENGTH)


def options(order: str = "windows", **changes) -> TrainConfig:
    sizes = {"batch_size": 2, "gradient_accumulation_steps": 2, "seed": 5, "max_steps": 1}
    return TrainConfig(order=order, **sizes | changes)


def same(one, other) -> bool:
    return torch.equal(one.tokens_BL, other.tokens_BL) and all(
        torch.equal(one.teacher[name], other.teacher[name]) for name in one.teacher
    )


@pytest.mark.long
def test_each_epoch_reads_every_training_sequence_once_with_a_draw_of_its_own(folder):
    source = open_cache(folder)
    steps = 3 * TRAIN // 4 + 1
    micro = [
        each for step in read_training_batches(source, options(), range(steps)) for each in step
    ]
    orders = np.concatenate(
        [EpochWindows(TRAIN, 4, 2, 5, epoch)[np.arange(TRAIN)] for epoch in range(4)]
    )
    assert max(orders) < TRAIN
    for number, batch in enumerate(micro):
        places = range(2 * number, 2 * number + 2)
        expected = source.read(orders[places], np.array([place // TRAIN for place in places]))
        assert same(batch, make_batch(*expected))


@pytest.mark.parametrize("threads", [0, 3])
def test_any_step_resumes_to_the_same_batches(folder, threads):
    chosen = options(dataloader_num_workers=threads)
    source = open_cache(folder, memory_bytes=0)
    whole = list(read_training_batches(source, chosen, range(20)))
    for start in (1, 7, 8, 15, 19):
        again = open_cache(folder)
        rest = list(read_training_batches(again, options(), range(start, 20)))
        for found, expected in zip(rest, whole[start:], strict=True):
            assert all(map(same, found, expected))


def count_decoded(folder, order: str, memory_bytes: int, monkeypatch) -> tuple[int, int]:
    """Count the chunks that one epoch decodes, and the different ones among them."""
    decoded = []
    decode = ArrayFolder._decode

    def watched(self, name, number):
        decoded.append((self.folder, name, number))
        return decode(self, name, number)

    with monkeypatch.context() as patch:
        patch.setattr(ArrayFolder, "_decode", watched)
        source = open_cache(folder, memory_bytes=memory_bytes)
        steps = range(source.train_count // 6)
        list(read_training_batches(source, options(order, batch_size=3), steps))
    return len(decoded), len(set(decoded))


def test_a_cache_larger_than_memory_is_decoded_once_an_epoch(folder, monkeypatch):
    """Memory holds half of the shards: a window and the one that follows it."""
    opened = open_cache(folder)
    opened.read(range(16))
    half = opened._memory.size
    decoded, different = count_decoded(folder, "windows", half, monkeypatch)
    assert decoded == different
    decoded, different = count_decoded(folder, "shuffled", half, monkeypatch)
    assert decoded > 1.5 * different


def test_the_order_is_that_of_the_source_on_every_machine(folder):
    """Neither memory nor threads have a part in it."""
    assert ordering.choose_window(open_cache(folder)) == (4, 2)
    source = open_cache(folder, memory_bytes=0)
    assert ordering.choose_window(source) == (4, 2)


LARGE = {
    "hidden": make_codec("hidden"),
    "dense": make_codec("dense"),
    "draws": make_codec("tempered", draws=8),
    "threshold": make_codec(),
}


@pytest.mark.long
@pytest.mark.parametrize("name", LARGE)
def test_a_window_of_any_profile_takes_the_bytes_it_may(name, tmp_path, monkeypatch):
    """Shards are larger than a window: parts of them take their place."""
    identity = make_identity(2048, 64, 64, 0, LARGE[name])
    identity = replace(identity, codec=replace(identity.codec, shard_sequences=32))
    store = open_cache(make_cache(tmp_path, identity))
    store.read(range(64))
    whole = store._memory.size
    estimate = store.sequence_bytes
    assert 0.8 * whole < 64 * estimate < 1.25 * whole
    monkeypatch.setattr(ordering, "WINDOW_BYTES", whole // 4)
    piece, width = ordering.choose_window(store)
    assert piece < 32 and width >= 2
    assert piece * width * estimate <= whole // 4
    order = ordering.choose_epoch_order(store, options(), range(1))(64, 5, 0)
    assert sorted(order[np.arange(64)].tolist()) == list(range(64))


@pytest.mark.long
def test_a_cache_with_shards_larger_than_memory_is_decoded_little_more_than_once(
    tmp_path, monkeypatch
):
    """Memory holds a quarter of the cache, whose two shards are one window by their tokens."""
    monkeypatch.setattr(shard, "CHUNK_BYTES", 2048 * LENGTH)  # about two sequences
    identity = make_identity(256, LENGTH, 768, 0, make_codec("dense"))
    folder = make_cache(
        tmp_path, replace(identity, codec=replace(identity.codec, shard_sequences=384))
    )
    source = open_cache(folder)
    quarter = 768 * source.sequence_bytes // 4
    decoded, different = count_decoded(folder, "windows", quarter, monkeypatch)
    assert decoded > 1.5 * different, "by tokens alone"
    monkeypatch.setattr(ordering, "WINDOW_BYTES", quarter // 2)
    assert ordering.choose_window(source) == (12, 8)
    decoded, different = count_decoded(folder, "windows", quarter, monkeypatch)
    assert decoded < 1.3 * different


def measure_spread(order: np.ndarray, label_S: np.ndarray, batch: int) -> float:
    """Compute the variance of the batches' mean labels, times ``batch`` over that of the labels."""
    means = label_S[order].reshape(-1, batch).mean(axis=1)
    return float(means.var() * batch / label_S.var())


def test_a_label_spreads_over_the_batches_nearly_as_in_a_full_shuffle():
    """The worst label is one for each shard; batches of a full shuffle have a spread of 1."""
    count, shard_size, width, batch = 65_536, 256, 32, 32
    shard_S = np.arange(count) // shard_size
    label_S = np.random.default_rng(0).normal(size=count // shard_size)[shard_S]
    full = np.random.default_rng(1).permutation(count)
    found = EpochWindows(count, shard_size, width, 3, 0)[np.arange(count)]
    assert abs(measure_spread(full, label_S, batch) - 1) < 0.1
    assert measure_spread(found, label_S, batch) < 2.2
    assert measure_spread(np.arange(count), label_S, batch) > 30
    # Documents of a few sequences: no difference to a full shuffle.
    document_S = np.random.default_rng(2).normal(size=count // 4)[np.arange(count) // 4]
    assert abs(measure_spread(found, document_S, batch) - 1) < 0.1


def test_shuffled_batches_are_those_of_the_generator_as_before():
    """Numbers of an epoch as they were before there were windows."""
    expected = np.random.Generator(np.random.Philox(key=[42, 1])).permutation(10)
    assert list_step_indices(10, 5, 42, 2).tolist() == expected[:5].tolist()
    assert list_step_indices(10, 5, 42, 3).tolist() == expected[5:].tolist()
