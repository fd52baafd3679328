"""Decide whether a measurement is that of a faithful cache, and say what to do if it is not."""

from __future__ import annotations

from cache.manifest import FidelityOverride
from cache.store import Cache
from kd.capture.fidelity.bounds import find_problems
from kd.capture.fidelity.measure import FidelityMeasurement, round_number
from kd.capture.noise import LARGEST_NOISE, choose_allowed_noise
from kd.config.cache import CacheConfig
from kd.errors import FidelityError

#: The field that overrules the verdict, and its value.
OVERRULING_FIELD = "cache.fidelity: warn"
_REMEDY = (
    "Check that the teacher has the weights and the code that were captured, "
    "and that it runs in the same precision."
)
_REMEDY_BY_PROFILE = {
    "tempered": " If so, narrow cache.temperatures, or use cache.profile hidden.",
    "hidden": " If so, its hidden states are too uneven for this precision: "
    "set cache.dtype to int16.",
}


def find_out_of_bounds(store: Cache, found: FidelityMeasurement) -> list[str]:
    """Return one line for each value that is out of the bounds of a faithful cache."""
    allowed = choose_allowed_noise(store.identity.teacher.dtype, found.noise)
    lines = [line for row in found.rows for line in find_problems(store.codec, allowed, row)]
    if not found.noise <= LARGEST_NOISE:
        lines.append(
            f"the teacher's own noise between two batches is {found.noise:.3g} nats, but must be "
            f"at most {LARGEST_NOISE:g}"
        )
    return lines


def judge_fidelity(
    store: Cache, found: FidelityMeasurement, config: CacheConfig
) -> FidelityOverride | None:
    """Raise ``FidelityError`` naming every value that is out of bounds; ``config`` may overrule it.

    Returns the verdict that was overruled; None for a faithful cache.
    """
    lines = find_out_of_bounds(store, found)
    if not lines:
        return None
    if config.fidelity == "refuse":
        raise FidelityError(
            f"{store.folder}: the records differ from the teacher: {'; '.join(lines)}.",
            _REMEDY
            + _REMEDY_BY_PROFILE.get(store.codec.profile, "")
            + f" To capture it again, delete {store.folder} first. To accept the records as they "
            f"are, set {OVERRULING_FIELD}: the cache keeps the verdict.",
        )
    return FidelityOverride(round_number(found.noise), tuple(lines), OVERRULING_FIELD)
