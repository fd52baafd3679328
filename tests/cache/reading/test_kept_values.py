"""Values in memory: never more than the limit, the oldest go first, one thread makes each."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.support.waiting import PATIENCE_SECONDS
from cache.reading.memory import KeptValues


@given(st.integers(0, 12), st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=60))
def test_the_limit_holds_and_every_value_is_that_of_its_key(limit, wanted):
    sizes = {}
    kept = KeptValues(limit, len)
    for key, size in wanted:
        sizes.setdefault(key, size)
        assert kept.get(key, lambda key=key: [key] * sizes[key]) == [key] * sizes[key]
        assert kept.size == sum(sizes[each] for each in kept._kept) <= limit
    assert kept._making == {}


def test_the_least_recently_used_value_is_dropped_first():
    kept = KeptValues(2)
    made = []
    for key in "abacab":
        kept.get(key, lambda key=key: made.append(key))
    assert made == ["a", "b", "c", "b"]


def test_a_value_larger_than_the_limit_is_returned_and_drops_no_other():
    kept = KeptValues(3, len)
    kept.get("small", lambda: "ab")
    assert kept.get("large", lambda: "abcdef") == "abcdef"
    assert kept.get("small", lambda: pytest.fail("it was dropped")) == "ab"


def test_an_error_passes_through_and_the_next_caller_tries_again():
    kept = KeptValues(3, len)
    with pytest.raises(ZeroDivisionError):
        kept.get("key", lambda: str(1 / 0))
    assert kept.get("key", lambda: "ab") == "ab"


def test_threads_that_want_the_same_value_make_it_once():
    kept = KeptValues(10, len)
    made = []
    together = Barrier(4)

    def want(_):
        together.wait(PATIENCE_SECONDS)
        return kept.get("key", lambda: made.append(1) or "ab")

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(want, range(4))) == ["ab"] * 4
    assert made == [1]


def test_another_value_is_served_while_one_is_made():
    kept = KeptValues(10, len)
    kept.get("ready", lambda: "ab")
    begun = Event()
    end = Event()

    def make_slowly():
        begun.set()
        assert end.wait(PATIENCE_SECONDS)
        return "cd"

    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(kept.get, "slow", make_slowly)
        assert begun.wait(PATIENCE_SECONDS)
        assert kept.get("ready", lambda: pytest.fail("it was dropped")) == "ab"
        assert kept.get("other", lambda: "ef") == "ef"
        end.set()
        assert slow.result(PATIENCE_SECONDS) == "cd"
