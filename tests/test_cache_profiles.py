"""What each profile serves: an objective is either right, or refused with the name of a profile that is."""

import itertools
from typing import get_args

import pytest

from cache.profiles import FORWARD_KL, PROFILES, unserved
from kd.config.loss import Divergence

DIVERGENCES = get_args(Divergence)
TEMPERATURES = (0.25, 0.5, 1.0, 1.3, 2.0, 2.5)
#: Profile to (divergences, temperatures) that it serves; tempered for a range of 0.5 to 2.
SERVED = {
    "threshold": ((FORWARD_KL,), (1.0,)),
    "tempered": ((FORWARD_KL,), (0.5, 1.0, 1.3, 2.0)),
    "topk": ((FORWARD_KL,), (1.0,)),
    "dense": (DIVERGENCES, TEMPERATURES),
    "hidden": (DIVERGENCES, TEMPERATURES),
}


def ask(profile: str, divergence: str, temperature: float) -> str | None:
    return unserved(profile, (0.5, 2.0) if profile == "tempered" else None, divergence, temperature)


def test_every_profile_is_in_the_table():
    assert set(SERVED) == set(PROFILES)


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_serves_exactly_what_it_can(profile):
    divergences, temperatures = SERVED[profile]
    for divergence, temperature in itertools.product(DIVERGENCES, TEMPERATURES):
        served = ask(profile, divergence, temperature) is None
        assert served == (divergence in divergences and temperature in temperatures), (divergence, temperature)


@pytest.mark.parametrize("profile", PROFILES)
def test_a_refusal_says_what_was_asked_and_names_a_profile_that_serves_it(profile):
    for divergence, temperature in itertools.product(DIVERGENCES, TEMPERATURES):
        why = ask(profile, divergence, temperature)
        if why is None:
            continue
        assert profile in why
        assert divergence in why or f"{temperature:g}" in why
        named = [name for name in PROFILES if name != profile and name in why]
        assert any(unserved(name, None, divergence, temperature) is None for name in named), why


def test_a_range_is_open_for_all_it_covers_and_unknown_ranges_are_not_judged():
    assert unserved("tempered", (1.0, 4.0), temperature=4.0) is None
    assert "covers temperatures 1 to 4" in str(unserved("tempered", (1.0, 4.0), temperature=0.99))
    assert unserved("tempered", None, temperature=9.0) is None
