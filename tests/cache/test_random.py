"""Random numbers: the known answers of Philox, pure functions of their counters, uniform."""

import numpy as np
import pytest

from cache.random import (
    PURPOSE_ROUNDING,
    PURPOSE_TAIL,
    apply_philox,
    draw_permutations,
    draw_uniforms,
)

ONES = 0xFFFFFFFF


def draw_permutation(seed, sequence, size):
    return draw_permutations(seed, np.array([sequence]), size)[0]


#: Counter, key and answer from Random123's kat_vectors, philox4x32 with 10 rounds.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize("counter,key,answer", KNOWN_ANSWERS)
def test_philox_gives_random123s_known_answers(counter, key, answer):
    words = apply_philox(np.array(counter, np.uint64)[:, None], key)
    assert tuple(words[:, 0].tolist()) == answer


def test_a_draw_does_not_depend_on_the_draws_beside_it():
    sequence = np.repeat(np.arange(5), 7)
    position = np.tile(np.arange(7), 5)
    together = draw_uniforms(9, PURPOSE_TAIL, sequence, position)
    alone = [
        draw_uniforms(9, PURPOSE_TAIL, s, t).item() for s, t in zip(sequence, position, strict=True)
    ]
    assert together.tolist() == alone
    assert (
        together.tolist()
        == draw_uniforms(9, PURPOSE_TAIL, np.arange(5)[:, None], np.arange(7)).ravel().tolist()
    )


def test_every_axis_changes_the_draw():
    draws = {
        draw_uniforms(seed, purpose, sequence, position, rank).item()
        for seed in (0, 1, 1 << 32)
        for purpose in (PURPOSE_TAIL, PURPOSE_ROUNDING)
        for sequence in (0, 1)
        for position in (0, 1)
        for rank in (0, 1)
    }
    assert len(draws) == 3 * 2 * 2 * 2 * 2


def test_draws_are_uniform_and_independent_along_each_axis():
    draws = draw_uniforms(3, PURPOSE_TAIL, np.arange(400)[:, None], np.arange(500))
    counts, _ = np.histogram(draws, bins=100, range=(0, 1))
    expected = draws.size / 100
    assert draws.min() >= 0
    assert draws.max() < 1
    assert (
        (counts - expected) ** 2 / expected
    ).sum() < 160  # chi-square, 99 degrees of freedom: p < 1e-4
    for neighbours in (draws[1:] * draws[:-1], draws[:, 1:] * draws[:, :-1]):
        assert abs(neighbours.mean() - 0.25) < 5 * 0.22 / np.sqrt(draws.size)


@pytest.mark.parametrize("size", [1, 2, 7, 300, 4096])
def test_a_permutation_holds_every_number_once(size):
    assert np.sort(draw_permutation(0, 5, size)).tolist() == list(range(size))


def test_a_permutation_depends_on_seed_and_sequence_alone():
    together = draw_permutations(1, np.array([7, 2, 7]), 1001)
    assert (together == [draw_permutation(1, number, 1001) for number in (7, 2, 7)]).all()
    first = draw_permutation(1, 2, 1000)
    assert first.dtype == np.int64
    assert (first == draw_permutation(1, 2, 1000)).all()
    assert (first != draw_permutation(1, 3, 1000)).any()
    assert (first != draw_permutation(2, 2, 1000)).any()
    # These numbers must never change, or a later version could not resume a capture.
    assert draw_permutation(1, 2, 8).tolist() == [7, 6, 0, 3, 4, 5, 1, 2]


@pytest.mark.long
def test_each_number_of_a_permutation_visits_each_place_equally_often():
    places = np.stack([np.argsort(draw_permutation(0, sequence, 5)) for sequence in range(5000)])
    counts = np.stack([np.bincount(column, minlength=5) for column in places.T])
    assert ((counts - 1000) ** 2 / 1000).sum() < 50  # chi-square, 16 degrees of freedom: p < 3e-5


@pytest.mark.parametrize("sequence,position,rank", [(-1, 0, 0), (0, 1 << 32, 0), (0, 0, -5)])
def test_a_counter_beyond_32_bits_is_refused(sequence, position, rank):
    with pytest.raises(ValueError, match=r"\[0, 2\^32\)"):
        draw_uniforms(0, PURPOSE_TAIL, sequence, position, rank)


@pytest.mark.parametrize("seed", [-1, 1 << 64])
def test_a_seed_beyond_64_bits_is_refused(seed):
    with pytest.raises(ValueError, match=r"\[0, 2\^64\)"):
        draw_uniforms(seed, PURPOSE_TAIL, 0, 0)
