"""The section ``resume``: how a finished run goes on."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kd.config.section import Section


class ResumeConfig(Section):
    """A finished run goes on for more steps: ``train.max_steps`` or ``epochs`` is raised."""

    schedule: Literal["extend", "restart", "constant"] = Field(
        "extend",
        description=(
            "The learning rate of the steps that are added. extend: the schedule of the longer "
            "run, at the step where it goes on; where the earlier steps are the same in both "
            "(constant, step, multistep, inverse_sqrt), the student is that of a run which was so "
            "long from the start. restart: the schedule anew over the added steps, warm-up "
            "included. constant: as it was at the last step."
        ),
    )
    run: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description=(
            "The run that goes on: the name of a run folder beside this one, in the service the id "
            "of a job. It stays as it is. Default: what this run's own folder holds."
        ),
    )
