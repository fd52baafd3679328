"""What an ablation runs: the job itself, and a job for each setting of each axis.

Settings that make the same job share one run. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kd.config.job import JobConfig
from kd.config.placement import PLACEMENT_FIELDS
from kd.errors import ConfigError, Problem
from kd.experiments.axes import Axis, make_setting_job

#: The label of the job itself.
ITSELF = "the job itself"
#: Finds the problems of a job on this machine.
FindProblems = Callable[[JobConfig], list[Problem]]


@dataclass(frozen=True)
class AblationJob:
    """One run: its label, and its job, of which ``digest`` is a name."""

    label: str
    config: JobConfig

    @property
    def digest(self) -> str:
        """Eight digits that are equal for jobs which train the same student."""
        data = self.config.model_dump(mode="json", exclude={"name", *PLACEMENT_FIELDS})
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def folder(self) -> str:
        """The name of its run folder."""
        words = re.sub("[^a-z0-9.]+", "-", self.label.lower()).strip("-")[:40]
        return f"{words}-{self.digest}"


@dataclass(frozen=True)
class AblationRow:
    """One setting of an axis: the digest of its run, or why there is none."""

    label: str
    run: str | None
    refusal: str = ""


@dataclass(frozen=True)
class AblationAxis:
    """An axis of a plan, with a row for each setting; the first may be the job itself."""

    name: str
    why: str
    rows: tuple[AblationRow, ...]


@dataclass(frozen=True)
class AblationPlan:
    """The runs of an ablation, by digest; the first is the job itself."""

    base: JobConfig
    jobs: dict[str, AblationJob]
    axes: tuple[AblationAxis, ...]

    @property
    def base_digest(self) -> str:
        """The digest of the job itself."""
        return next(iter(self.jobs))

    def list_refused(self) -> Iterator[tuple[str, AblationRow]]:
        """Yield the settings that no job can have, each with the name of its axis."""
        for axis in self.axes:
            yield from ((axis.name, row) for row in axis.rows if row.run is None)


def make_plan_of_axes(
    base: JobConfig, axes: Sequence[Axis], find_problems: FindProblems
) -> AblationPlan:
    """Plan the runs of ``axes``, each varied alone from ``base``.

    A setting that the job cannot have is refused, and the others run. Raises ``ConfigError`` where
    an axis has no setting that the job can have, as that of a field that does not exist.
    """
    first = AblationJob(ITSELF, base)
    jobs = {first.digest: first}
    found = []
    for axis in axes:
        rows = []
        for setting in axis.settings:
            try:
                config = make_setting_job(base, setting.overrides)
                problems = find_problems(config)
            except ConfigError as error:
                problems = error.problems
            if problems:
                why = "; ".join(map(str, problems))
                rows.append(AblationRow(setting.label, None, why))
                continue
            job = AblationJob(f"{axis.name} {setting.label}", config)
            job = jobs.setdefault(job.digest, job)
            rows.append(AblationRow(setting.label, job.digest))
        if all(row.run is None for row in rows):
            why = " ".join(dict.fromkeys(row.refusal for row in rows))
            detail = f"axis {axis.name} has no setting that can run: {why}"
            remedy = "Name other settings with --axis, or change the job."
            raise ConfigError([Problem("", detail, remedy)])
        if first.digest not in {row.run for row in rows}:
            rows.insert(0, AblationRow(ITSELF, first.digest))
        found.append(AblationAxis(axis.name, axis.why, tuple(rows)))
    return AblationPlan(base, jobs, tuple(found))
