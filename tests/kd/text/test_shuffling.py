"""Orders that are never listed: one to one for every size, and random enough to train on."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kd.text.shuffling import EpochWindows, KeyedPermutation

SEEDS = st.integers(0, 2**32 - 1)


@settings(deadline=None)
@given(st.integers(1, 3000), SEEDS, st.integers(0, 100), st.integers(0, 2**40))
def test_a_permutation_is_one_to_one_and_its_inverse_undoes_it(count, seed, epoch, purpose):
    permutation = KeyedPermutation.draw(count, seed, epoch, purpose)
    numbers = np.arange(count)
    found = permutation[numbers]
    assert np.array_equal(np.sort(found), numbers)
    assert np.array_equal(permutation.invert(found), numbers)


@given(st.integers(2**40, 2**62), SEEDS)
def test_a_permutation_of_any_size_is_computed_for_one_number_alone(count, seed):
    permutation = KeyedPermutation.draw(count, seed, 3, 1)
    numbers = np.array([0, 1, count // 2, count - 1])
    found = permutation[numbers]
    assert ((found >= 0) & (found < count)).all() and len(set(found.tolist())) == 4
    assert np.array_equal(permutation.invert(found), numbers)
    assert permutation[numbers[2:3]][0] == found[2]


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 3, 5, 12, 64])
def test_each_number_comes_to_each_place_equally_often(count):
    """Chi squared of each number's places over many keys, with ``count - 1`` degrees of freedom."""
    draws = 4000
    found = np.array(
        [KeyedPermutation.draw(count, seed, 0, 0)[np.arange(count)] for seed in range(draws)]
    )
    for number in (0, count // 2, count - 1):
        seen = np.bincount(found[:, number], minlength=count)
        expected = draws / count
        chi = ((seen - expected) ** 2 / expected).sum()
        assert chi < count - 1 + 5 * np.sqrt(2 * (count - 1)) + 5


@pytest.mark.long
def test_all_orders_of_a_few_numbers_come_about_equally_often():
    found = [tuple(KeyedPermutation.draw(4, seed, 0, 0)[np.arange(4)]) for seed in range(4800)]
    seen = [found.count(order) for order in set(found)]
    assert len(seen) == 24 and min(seen) > 100 and max(seen) < 320  # 200 expected


def test_neighbours_are_as_far_apart_as_in_a_full_shuffle():
    count = 50_000
    places = KeyedPermutation.draw(count, 1, 0, 0).invert(np.arange(count))
    distance = np.abs(np.diff(places)).mean()
    assert abs(distance / (count / 3) - 1) < 0.02
    assert abs(np.corrcoef(places[:-1], places[1:])[0, 1]) < 0.02


# ---- windows

sizes = st.tuples(st.integers(1, 400), st.integers(1, 40), st.integers(1, 9))


@pytest.mark.long
@settings(deadline=None)
@given(sizes, SEEDS, st.integers(0, 5))
def test_an_epoch_visits_each_sequence_once_and_each_window_in_a_row(shape, seed, epoch):
    count, shard_size, width = shape
    order = EpochWindows(count, shard_size, width, seed, epoch)
    found = order[np.arange(count)]
    assert np.array_equal(np.sort(found), np.arange(count))
    left = list(found // shard_size)
    shards = {shard: left.count(shard) for shard in set(left)}
    while left:
        window = set()
        size = 0
        # A window ends where the shards seen so far are complete and there are enough of them.
        while size < len(left):
            window.add(left[size])
            size += 1
            if size == sum(shards[each] for each in window) and len(window) == min(
                width, len(set(left))
            ):
                break
        assert len(window) <= width
        del left[:size]


@pytest.mark.long
@settings(deadline=None)
@given(sizes, SEEDS)
def test_a_place_asked_for_alone_holds_the_same_sequence(shape, seed):
    count, shard_size, width = shape
    order = EpochWindows(count, shard_size, width, seed, 2)
    whole = order[np.arange(count)]
    for place in {0, count // 3, count - 1}:
        again = EpochWindows(count, shard_size, width, seed, 2)
        assert again[np.array([place])].tolist() == [whole[place]]


def test_a_single_window_is_a_full_shuffle():
    places = np.argsort(EpochWindows(20_000, 256, 100, 4, 0)[np.arange(20_000)])
    assert abs(np.abs(np.diff(places)).mean() / (20_000 / 3) - 1) < 0.03


def test_seeds_and_epochs_give_other_orders():
    orders = {
        EpochWindows(300, 16, 4, seed, epoch)[np.arange(300)].tobytes()
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25


def test_the_order_of_a_huge_cache_needs_no_list_of_it():
    """Ten thousand million sequences; a list of them would take 80 GB."""
    order = EpochWindows(10**10, 256, 32, 1, 0)
    places = np.arange(5 * 10**9, 5 * 10**9 + 64)
    found = order[places]
    assert len(set((found // 256).tolist())) > 20
    assert (found >= 0).all() and (found < 10**10).all()
