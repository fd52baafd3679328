"""A cache as data sets of torch: the same numbers whatever reads them, each sequence once."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from cache.errors import CacheNotFound
from cache.store import open_cache as open_store
from kd.cached.datasets import CachedStream
from kd.cached.items import collate, split_batch
from kd.cached.loss import make_training_batch
from kd.cached.opening import OpenCache, open_cache
from kd.config.train import TrainConfig
from kd.text.batches import Batch, make_batch
from kd.text.steps import order as ordering
from kd.text.steps.reading import read_training_batches
from tests.support.kd.own_loops import EARLIER, HELD_OUT, LENGTH, PROFILES, TRAIN


@pytest.fixture
def opened(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> OpenCache:
    monkeypatch.setattr(ordering, "WINDOW_TOKENS", 2 * 4 * LENGTH)
    return open_cache(folders["tempered"])


def assert_equal(found: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected)
        return
    assert found.keys() == expected.keys()
    for name in expected:
        assert_equal(found[name], expected[name])


def assert_same_batch(found: Batch, expected: Batch) -> None:
    assert_equal(found.tokens_BL, expected.tokens_BL)
    assert_equal(found.rows_N, expected.rows_N)
    assert_equal(found.gold_N, expected.gold_N)
    assert_equal(found.teacher, expected.teacher)
    assert (found.packed is None) == (expected.packed is None)
    if found.packed is not None and expected.packed is not None:
        assert_equal(found.packed.bounds_C, expected.packed.bounds_C)


# ---------------------------------------------------------------------- items and batches


@pytest.mark.long
@pytest.mark.parametrize("profile", [*PROFILES, EARLIER])
def test_the_batch_of_a_loader_is_that_of_our_own_loop(
    folders: dict[str, Path], profile: str
) -> None:
    opened = open_cache(folders[profile])
    loader = DataLoader(opened.train, batch_size=5, collate_fn=opened.collate)
    for number, batch in enumerate(loader):
        numbers = range(5 * number, min(5 * number + 5, TRAIN))
        expected = make_batch(*open_store(folders[profile]).read(numbers))
        assert_same_batch(make_training_batch(batch), expected)


@pytest.mark.parametrize("form", ["records", "entries", "ragged", "dense", "topk"])
def test_a_batch_is_split_and_joined_again(folders: dict[str, Path], form: Any) -> None:
    opened = open_cache(folders["threshold"], form=form, k=3)
    batch = next(iter(opened.stream(6)))
    assert_equal(collate(split_batch(batch)), batch)


def test_an_item_has_the_width_of_its_own_sequence(folders: dict[str, Path]) -> None:
    opened = open_cache(folders["threshold"], form="entries")
    items = [opened.train[number] for number in range(TRAIN)]
    widths = {item["teacher_ids"].shape[1] for item in items}
    assert len(widths) > 1
    assert collate(items)["teacher_ids"].shape == (TRAIN, LENGTH, max(widths))


def test_validation_has_the_held_out_sequences(opened: OpenCache) -> None:
    assert len(opened.validation) == HELD_OUT
    expected = make_batch(*open_store(opened.folder).read([TRAIN + 1]))
    assert_equal(opened.validation[1]["input_ids"], expected.tokens_BL[0])
    with pytest.raises(IndexError):
        opened.validation[HELD_OUT]


def test_an_open_cache_shows_what_it_is(opened: OpenCache) -> None:
    assert repr(opened) == (
        f"OpenCache({opened.fingerprint[:12]}, profile tempered: {TRAIN} sequences to train on "
        f"and {HELD_OUT} held out, of {LENGTH} tokens)"
    )


def test_an_epoch_selects_the_sample_of_the_tail(opened: OpenCache) -> None:
    expected = make_batch(*open_store(opened.folder).read([2], 1)).teacher
    assert_equal(opened.train[2, 1]["records"], expected)
    assert not torch.equal(
        opened.train[2, 0]["records"]["tail_ids"], opened.train[2, 1]["records"]["tail_ids"]
    )


# ---------------------------------------------------------------------- order


def read_own_loop(opened: OpenCache, steps: int, order: str, size: int = 4) -> list[Batch]:
    options = TrainConfig(max_steps=1, batch_size=size, seed=7, order=order)
    source = open_store(opened.folder)
    return [
        micro for step in read_training_batches(source, options, range(steps)) for micro in step
    ]


@pytest.mark.parametrize("order", ["windows", "shuffled"])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_the_stream_has_the_batches_of_our_own_loop_for_any_number_of_workers(
    opened: OpenCache, order: Any, workers: int
) -> None:
    steps = 2 * TRAIN // 4 + 1
    stream = opened.stream(4, seed=7, order=order, steps=steps)
    found = list(DataLoader(stream, batch_size=None, num_workers=workers))
    assert len(stream) == len(found) == steps
    for batch, expected in zip(found, read_own_loop(opened, steps, order), strict=True):
        assert_same_batch(make_training_batch(batch), expected)


def test_a_stream_that_starts_later_goes_on_where_it_was(opened: OpenCache) -> None:
    whole = list(opened.stream(4, steps=7))
    for batch, expected in zip(opened.stream(4, steps=7, start=3), whole[3:], strict=True):
        assert_equal(batch, expected)


def test_the_ranks_have_equal_parts_of_each_step(
    opened: OpenCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams: list[CachedStream] = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        streams.append(opened.stream(2, seed=7, steps=8))
    whole = read_own_loop(opened, 8, "windows")
    for first, second, expected in zip(*streams, whole, strict=True):
        both = torch.cat([first["input_ids"], second["input_ids"]])
        assert torch.equal(both, expected.tokens_BL)


def test_the_sampler_has_the_order_of_our_own_loop(opened: OpenCache) -> None:
    sampler = opened.sampler(seed=7)
    loader = DataLoader(opened.train, 11, sampler=sampler, collate_fn=opened.collate, num_workers=2)
    found = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        found += list(loader)
    expected = read_own_loop(opened, 4, "windows", size=11)
    for batch, own in zip(found, expected, strict=True):
        assert_same_batch(make_training_batch(batch), own)


@pytest.mark.long
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_either_start_method_open_the_cache_themselves(
    opened: OpenCache, method: str
) -> None:
    _ = opened.train[0]
    context = multiprocessing.get_context(method)
    loader = DataLoader(
        opened.train,
        batch_size=8,
        num_workers=1,
        collate_fn=opened.collate,
        multiprocessing_context=context,
    )
    expected = DataLoader(opened.train, batch_size=8, collate_fn=opened.collate)
    for batch, own in zip(loader, expected, strict=True):
        assert_equal(batch, own)


# ---------------------------------------------------------------------- opening


def test_a_cache_is_found_by_its_fingerprint(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folders["topk"]
    assert open_cache(folder.name, home=folder.parent.parent).folder == folder
    monkeypatch.setenv("KD_HOME", str(folder.parent.parent))
    assert open_cache(folder.name).fingerprint == folder.name
    with pytest.raises(CacheNotFound, match="No cache"):
        open_cache("0" * 32)
    with pytest.raises(CacheNotFound, match="32 digits"):
        open_cache("missing")


@pytest.mark.parametrize(
    ("profile", "options", "message"),
    [
        ("topk", {"form": "entries"}, "form must be one of records, topk"),
        ("dense", {"form": "ragged"}, "form must be one of records, dense, topk"),
        ("threshold", {"form": "dense", "temperature": 2.0}, "profile tempered"),
        ("threshold", {"form": "topk", "k": 0}, "k must be at least 1"),
    ],
)
def test_what_a_profile_cannot_serve_is_refused(
    folders: dict[str, Path], profile: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        open_cache(folders[profile], **options)


def test_wrong_orders_and_sizes_are_refused(opened: OpenCache) -> None:
    with pytest.raises(ValueError, match="windows or shuffled"):
        opened.sampler(order="random")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch_size"):
        opened.stream(0)
