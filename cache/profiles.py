"""What a cache can keep of a teacher, and which objectives each form of it serves.

threshold   heavy tokens exact, the tail sampled without bias             forward KL at T = 1
tempered    the same, with what it takes to be right at other T           forward KL at any T of a range
topk        the k most probable tokens and the mass of the rest           forward KL at T = 1, the rest as one bucket
dense       every log-probability                                         any divergence at any T
hidden      the last hidden state, and the teacher's LM head once         any divergence at any T
"""

from __future__ import annotations

from dataclasses import dataclass

FORWARD_KL = "forward_kl"


@dataclass(frozen=True)
class Profile:
    """What one profile serves; ``tempered`` is limited to the range that a cache was captured for.

    Other divergences than forward KL need the whole distribution: a token that the student likes and the record leaves
    out would be lost.
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


def unserved(
    name: str, temperatures: tuple[float, float] | None, divergence: str = FORWARD_KL, temperature: float = 1.0
) -> str | None:
    """Why a cache of profile ``name`` cannot serve an objective, naming the profile that can; None if it can.

    ``temperatures`` is the range that a tempered cache was captured for.
    """
    profile = PROFILES[name]
    if divergence != FORWARD_KL and not profile.any_divergence:
        return f"profile {name} serves forward KL only, and {divergence} needs all of p: use profile hidden or dense"
    if temperature != 1.0 and not profile.any_temperature:
        return (
            f"profile {name} is right at temperature 1 only, but {temperature:g} is asked for: use profile tempered "
            "with cache.temperatures around it (or hidden, or dense)"
        )
    if name == "tempered" and temperatures and not temperatures[0] <= temperature <= temperatures[1]:
        low, high = temperatures
        return (
            f"this tempered cache covers temperatures {low:g} to {high:g}, but {temperature:g} is asked for: capture "
            "one whose cache.temperatures cover it, or use profile hidden"
        )
    return None
