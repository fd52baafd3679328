"""Each profile serves a loss rightly, or refuses it with the name of a profile that serves it."""

import itertools
from typing import get_args

import pytest

from cache.codec import Codec
from cache.profiles.table import FORWARD_KL, PROFILES, explain_unsupported
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


#: The range of temperatures that a cache of each profile was captured for.
COVERED = dict.fromkeys(PROFILES, ()) | {"tempered": (0.5, 2.0)}


def explain(profile: str, divergence: str, *temperatures: float) -> str | None:
    return explain_unsupported(profile, COVERED[profile], divergence, temperatures)


def test_every_profile_is_in_the_table():
    assert set(SERVED) == set(PROFILES)


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_serves_exactly_what_it_can(profile):
    divergences, temperatures = SERVED[profile]
    for divergence, temperature in itertools.product(DIVERGENCES, TEMPERATURES):
        served = explain(profile, divergence, temperature) is None
        assert served == (divergence in divergences and temperature in temperatures), (
            divergence,
            temperature,
        )


@pytest.mark.parametrize("profile", PROFILES)
def test_a_refusal_says_what_was_asked_and_names_a_profile_that_serves_it(profile):
    for divergence, temperature in itertools.product(DIVERGENCES, TEMPERATURES):
        why = explain(profile, divergence, temperature)
        if why is None:
            continue
        assert profile in why
        assert divergence in why or f"{temperature:g}" in why
        named = [name for name in PROFILES if name != profile and name in why]
        assert any(
            explain_unsupported(name, (), divergence, (temperature,)) is None for name in named
        ), why


def test_all_temperatures_of_a_loss_must_be_served():
    assert explain("tempered", FORWARD_KL, 0.5, 2.0) is None
    for ends, outside in (((0.4, 2.0), "0.4"), ((0.5, 2.1), "2.1")):
        why = explain("tempered", FORWARD_KL, *ends)
        assert why and f"temperature {outside} " in why and "0.5 to 2" in why
    assert explain("hidden", "jsd", 0.1, 9.0) is None


def test_a_range_includes_its_ends_and_an_unknown_range_refuses_nothing():
    assert explain_unsupported("tempered", (1.0, 4.0), temperatures=(4.0,)) is None
    assert "covers temperatures 1 to 4" in str(
        explain_unsupported("tempered", (1.0, 4.0), temperatures=(0.99,))
    )
    assert explain_unsupported("tempered", (), temperatures=(9.0,)) is None


def test_a_temperature_is_learned_only_from_records_of_many_temperatures():
    refusing = {name for name in PROFILES if explain_unsupported(name, (), learned=True)}
    assert refusing == {"threshold", "topk"}


def test_hidden_states_are_in_one_profile_only():
    for name in PROFILES:
        why = explain_unsupported(name, (), features=True)
        assert (why is None) == (name == "hidden"), why
        assert why is None or (name in why and "use cache.profile hidden" in why)


@pytest.mark.parametrize("profile", PROFILES)
def test_a_codec_answers_for_its_profile_and_its_range(profile):
    codec = Codec(profile, vocabulary_size=50, temperatures=COVERED[profile])
    for divergence, temperature in itertools.product(DIVERGENCES, TEMPERATURES):
        expected = explain(profile, divergence, temperature)
        assert codec.why_unsupported(divergence, (temperature,)) == expected
    assert codec.why_unsupported(features=True) == explain_unsupported(
        profile, COVERED[profile], features=True
    )
    assert codec.why_unsupported(learned=True) == explain_unsupported(
        profile, COVERED[profile], learned=True
    )
