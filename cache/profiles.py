"""The forms in which a cache can keep a teacher, and the losses that each form serves.

threshold   heavy tokens exact, the tail sampled without bias      forward KL at T = 1
tempered    as threshold, and what other temperatures need         forward KL at any T of a range
topk        the k most probable tokens, and the rest as one bucket  forward KL at T = 1
dense       every log-probability                                  any divergence at any T
hidden      the last hidden state, and the teacher's LM head once  any divergence at any T
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FORWARD_KL = "forward_kl"


@dataclass(frozen=True)
class Profile:
    """The abilities of one profile; ``tempered`` serves only a range of temperatures.

    Divergences other than forward KL need the whole distribution: they would miss a token that the
    student finds probable and that the record leaves out. ``sampled`` records have a head and a
    sampled tail.
    """

    name: str
    any_temperature: bool
    any_divergence: bool
    sampled: bool


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("threshold", any_temperature=False, any_divergence=False, sampled=True),
        Profile("tempered", any_temperature=True, any_divergence=False, sampled=True),
        Profile("topk", any_temperature=False, any_divergence=False, sampled=False),
        Profile("dense", any_temperature=True, any_divergence=True, sampled=False),
        Profile("hidden", any_temperature=True, any_divergence=True, sampled=False),
    )
}


def explain_unsupported(
    name: str,
    covered: Sequence[float],
    divergence: str = FORWARD_KL,
    temperatures: Sequence[float] = (1.0,),
    features: bool = False,
    learned: bool = False,
) -> str | None:
    """Explain why a cache of profile ``name`` cannot serve a loss; return None if it can.

    This is the only place that decides it, and the text names a profile that can serve the loss.
    ``covered`` is the range (lowest, highest) that a tempered cache was captured for; it is empty
    for other profiles. The loss needs all of ``temperatures``; ``learned`` means that it also needs
    the derivative in the temperature, ``features`` that it compares hidden states. The text ends
    without a full stop.
    """
    profile = PROFILES[name]
    if divergence != FORWARD_KL and not profile.any_divergence:
        return (
            f"loss.divergence {divergence} needs all of p, but cache.profile {name} serves "
            "forward KL only: use profile hidden or dense"
        )
    for temperature in temperatures:
        if temperature != 1.0 and not profile.any_temperature:
            return (
                f"loss.temperature {temperature:g} cannot be served, because cache.profile {name} "
                "is right at temperature 1 only: use profile tempered with cache.temperatures "
                "around it (or hidden, or dense)"
            )
        if name == "tempered" and covered and not covered[0] <= temperature <= covered[1]:
            return (
                f"loss.temperature {temperature:g} cannot be served, because this cache of "
                f"cache.profile tempered covers temperatures {covered[0]:g} to {covered[1]:g}: "
                "capture one whose cache.temperatures cover it, or use profile hidden"
            )
    if learned and not profile.any_temperature:
        return (
            f"a learned loss.temperature cannot be served, because cache.profile {name} is right "
            "at temperature 1 only: use profile tempered, hidden or dense"
        )
    if features and name != "hidden":
        return (
            "loss.features compares hidden states, which cache.profile "
            f"{name} does not keep: use cache.profile hidden"
        )
    return None
