"""Compare a sealed cache with its teacher once more, and keep what was measured in the cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cache.manifest import FidelityRow
from cache.store import Cache, replace_fidelity
from kd.capture.fidelity.live import LiveTeacher, TeacherLocation
from kd.capture.fidelity.measure import POSITIONS, REDRAWS, measure_fidelity
from kd.capture.fidelity.verdict import find_out_of_bounds


@dataclass(frozen=True)
class FidelityRecheck:
    """A measurement of a sealed cache.

    ``fidelity``: one row for each temperature. ``noise`` is the teacher's own, in nats.
    ``problems`` has a line for each value that is out of bounds. ``written``: the cache now holds
    the rows.
    """

    fidelity: tuple[FidelityRow, ...]
    noise: float
    problems: tuple[str, ...]
    written: bool


def recheck_fidelity(
    store: Cache,
    origin: TeacherLocation,
    positions: int = POSITIONS,
    redraws: int = REDRAWS,
    check_stop: Callable[[], None] = lambda: None,
) -> FidelityRecheck:
    """Measure a sealed cache; its rows are replaced if its own teacher finds them in bounds.

    ``check_stop`` is called between the parts of the work, and may raise to give up.
    """
    live = LiveTeacher.load(store.identity, origin.teacher)
    found = measure_fidelity(store, live, positions, redraws, check_stop)
    problems = tuple(find_out_of_bounds(store, found))
    written = origin.genuine and not problems
    if written:
        replace_fidelity(store.folder, found.rows)
    return FidelityRecheck(found.rows, found.noise, problems, written)
