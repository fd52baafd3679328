"""What is asked of a plan by tokens: the number of tokens, and a job where there is no file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kd.config.job import JobConfig
from kd.config.jobfile import apply_overrides, parse_config, read_job_file, set_value
from kd.errors import ConfigError, Problem
from kd.planning.devices import DeviceName

#: The most tokens of a plan.
MOST_TOKENS = 10**18
#: Forward passes of a device in a step, where no job file says how many sequences a step has.
PASSES = 4


@dataclass(frozen=True)
class PlanRequest:
    """What is planned: tokens, devices, models beside those of the job, and prices.

    ``within`` are the hours that the capture may take, and ``prices`` those of an hour of one
    device, by kind.
    """

    tokens: int
    devices: DeviceName
    teacher: str | None
    student: str | None
    within: float
    prices: Mapping[str, float]


def parse_tokens(text: str) -> int:
    """Read a number of tokens such as 1e12. Raises ``ConfigError`` unless it is positive."""
    try:
        tokens = float(text)
    except ValueError:
        raise _refuse(f"{text!r} is not a number.") from None
    if not math.isfinite(tokens) or tokens < 1:
        raise _refuse(f"{text} tokens are none to plan for: the number must be at least 1.")
    if tokens > MOST_TOKENS:
        raise _refuse(f"{text} tokens are more than {MOST_TOKENS:.0e}, the most of a plan.")
    return round(tokens)


def _refuse(detail: str) -> ConfigError:
    return ConfigError([Problem("/tokens", detail, "Give a number such as 1e12.")])


def read_config(
    job_file: Path | None,
    teacher: str | None,
    student: str | None,
    profile: str | None,
    devices: int,
    overrides: Iterable[str],
) -> JobConfig:
    """Return the job in the file, or one of defaults for ``teacher`` and ``student``.

    A step of the job of defaults has four forward passes of each of ``devices``. Raises
    ``ConfigError`` where there is neither a file nor a teacher.
    """
    if job_file is None and teacher is None:
        remedy = "Give --teacher with a model or a size such as 70B, or a job file."
        raise ConfigError([Problem("/teacher", "a plan by --tokens needs a teacher.", remedy)])
    data = read_job_file(job_file) if job_file else _make_job(str(teacher), student, devices)
    if profile is not None:
        data = set_value(data, ["cache", "profile"], profile)
    return parse_config(apply_overrides(data, overrides))


def _make_job(teacher: str, student: str | None, devices: int) -> dict[str, Any]:
    job = {"kind": "precompute", "teacher": {"model": teacher}, "data": {"train": "text"}}
    if student is None:
        return job
    training = {"epochs": 1, "gradient_accumulation_steps": PASSES * devices}
    return job | {"kind": "distill", "student": {"model": student}, "train": training}
