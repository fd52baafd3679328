"""The forms in which a cache can keep a teacher, and the losses that each form serves.

threshold   all of p in units, sampled without bias                forward KL at T = 1
tempered    heavy tokens exact, the tail sampled without bias      forward KL at any T of a range
topk        the k most probable tokens, and the rest as one bucket  forward KL at T = 1
dense       every log-probability                                  any divergence at any T
hidden      the last hidden state, and the teacher's LM head once  any divergence at any T
"""

from __future__ import annotations

from collections.abc import Sequence

from cache.profiles.profile import Profile
from cache.profiles.sampled import Tempered
from cache.profiles.threshold import Threshold
from cache.profiles.topk import TopK
from cache.profiles.whole import Dense, Hidden

FORWARD_KL = "forward_kl"
#: Why no loss can weigh positions by their entropies where records have means of sequences only
#: (``Codec.spreads_entropy``). It ends without a full stop.
SPREAD_ENTROPIES = (
    "loss.entropy_weighting needs the teacher's entropy at each position, but this cache of "
    "profile threshold keeps only the mean of each sequence: capture it with a job that sets "
    "loss.entropy_weighting, or set loss.entropy_weighting to 0"
)

#: Every profile by its name. A new one is a module of this folder and a line here.
PROFILES: dict[str, Profile] = {
    profile.name: profile for profile in (Threshold(), Tempered(), TopK(), Dense(), Hidden())
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
        if profile.keeps_partition and covered and not covered[0] <= temperature <= covered[1]:
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
    if features and not profile.needs_lm_head:
        return (
            "loss.features compares hidden states, which cache.profile "
            f"{name} does not keep: use cache.profile hidden"
        )
    return None
