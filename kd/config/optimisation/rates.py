"""The learning rate over a run: the schedules and their arguments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field

Scheduler = Literal[
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
    "onecycle",
    "step",
    "multistep",
    "reduce_lr_on_plateau",
]
#: A number, or the steps of a multistep schedule.
ScheduleArgument = float | Annotated[tuple[float, ...], Field(max_length=1000)]

#: The arguments of each schedule, besides warm-up and length. The first set is optional; of a
#: second set that is not empty exactly one argument is needed.
SCHEDULER_KWARGS: dict[str, tuple[set[str], set[str]]] = {
    "linear": (set(), set()),
    "cosine": ({"num_cycles"}, set()),
    "cosine_with_restarts": ({"num_cycles"}, set()),
    "polynomial": ({"lr_end", "power"}, set()),
    "constant": (set(), set()),
    "constant_with_warmup": (set(), set()),
    "inverse_sqrt": ({"timescale"}, set()),
    "cosine_with_min_lr": ({"num_cycles"}, {"min_lr", "min_lr_rate"}),
    "cosine_warmup_with_min_lr": ({"num_cycles", "warmup_lr_rate"}, {"min_lr", "min_lr_rate"}),
    "warmup_stable_decay": (
        {"num_cycles", "min_lr_ratio", "num_stable_steps"},
        {"num_decay_steps"},
    ),
    "onecycle": ({"pct_start", "div_factor", "final_div_factor"}, set()),
    "step": ({"gamma"}, {"step_size"}),
    "multistep": ({"gamma"}, {"milestones"}),
    "reduce_lr_on_plateau": ({"factor", "patience", "threshold", "cooldown", "min_lr"}, set()),
}
#: Bounds of the arguments that have some: the least and the most, which a value may equal.
_BOUNDS = {
    "gamma": (0.0, 1.0),
    "factor": (0.0, 1.0),
    "threshold": (0.0, 1.0),
    "patience": (0, 10_000),
    "cooldown": (0, 10_000),
    "step_size": (1, 100_000_000),
}
#: The arguments that count steps or evaluations.
_COUNTS = {"step_size", "patience", "cooldown", "milestones"}


def require_schedule_arguments(name: Scheduler, given: Mapping[str, ScheduleArgument]) -> None:
    """Raise ``ValueError`` if a schedule cannot have the arguments ``given``."""
    optional, needed = SCHEDULER_KWARGS[name]
    if unknown := given.keys() - optional - needed:
        raise ValueError(
            f"lr_scheduler_kwargs of {name} cannot hold {', '.join(sorted(unknown))}, "
            f"only {', '.join(sorted(optional | needed)) or 'nothing'}"
        )
    if needed and len(given.keys() & needed) != 1:
        raise ValueError(f"lr_scheduler_kwargs of {name} must hold {' or '.join(sorted(needed))}")
    for key, value in given.items():
        place = f"train.lr_scheduler_kwargs.{key}"
        if (key == "milestones") != isinstance(value, tuple):
            wanted = "a list of steps, such as [1000, 2000]" if key == "milestones" else "a number"
            raise ValueError(f"{place} must be {wanted}, but got {value}")
        values = value if isinstance(value, tuple) else (value,)
        if key in _COUNTS and any(each != int(each) for each in values):
            raise ValueError(f"{place} must be whole numbers, but got {value}")
        least, most = _BOUNDS.get(key, (-math.inf, math.inf))
        if any(not least <= each <= most for each in values):
            raise ValueError(f"{place} must be from {least:g} to {most:g}, but got {value}")
        if key == "factor" and value == 1:
            raise ValueError(f"{place} must be less than 1, but got 1: the rate would never fall")
        rising = all(one < other for one, other in pairwise((0, *values)))
        if key == "milestones" and not (values and rising):
            raise ValueError(f"{place} must be steps from 1 on that rise, but got {list(values)}")
