"""Orders of an epoch that has too many sequences to be listed."""

import tracemalloc

import numpy as np
import pytest

from cache.records import Sequences
from kd.config.train import TrainConfig
from kd.errors import ConfigError
from kd.text.batches import PlainText
from kd.text.corpus import Corpus
from kd.text.steps import order as ordering
from kd.text.steps.order import list_step_indices
from kd.text.steps.reading import read_training_batches


@pytest.mark.parametrize("count", [1, 2, 7, 64, 1000])
def test_an_order_that_is_not_listed_visits_each_sequence_once(count, monkeypatch):
    listed = list_step_indices(count, count, 3, 1)
    monkeypatch.setattr(ordering, "LISTED_SEQUENCES", 0)
    epochs = [list_step_indices(count, count, 3, epoch) for epoch in range(3)]
    for order in epochs:
        assert sorted(order.tolist()) == list(range(count))
    parts = [list_step_indices(count, 5, 3, step) for step in range(count // 5)]
    assert np.array_equal(np.concatenate([*parts, []]), epochs[0][: count // 5 * 5])
    if count == 1000:
        assert len({tuple(order) for order in (listed, *epochs)}) == 4


def test_the_order_of_a_huge_epoch_takes_no_memory_of_its_size():
    count = ordering.LISTED_SEQUENCES + 1
    tracemalloc.start()
    try:
        found = [list_step_indices(count, 512, 0, step) for step in (0, 17, count // 512)]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**20
    assert all(((each >= 0) & (each < count)).all() for each in found)
    assert len(np.unique(np.concatenate(found[:2]))) == 1024


@pytest.mark.parametrize("order", ["length", "curriculum"])
def test_an_order_by_content_of_too_many_sequences_is_refused(order, monkeypatch):
    monkeypatch.setattr(ordering, "LISTED_SEQUENCES", 19)
    shape = (20, 4)
    text = Sequences(np.zeros(shape, np.uint32), np.zeros(shape, bool), np.zeros(shape, bool))
    source = PlainText(Corpus(text, text.select(slice(0))))
    options = TrainConfig(max_steps=1, batch_size=4, order=order)
    with pytest.raises(ConfigError, match=f"order {order} lists all sequences in memory"):
        next(iter(read_training_batches(source, options, range(2))))
