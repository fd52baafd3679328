"""The section ``resume``: how a finished run goes on."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kd.config.section import Section


class ResumeConfig(Section):
    """Continue a finished run for more steps: raise ``train.max_steps`` or ``epochs``."""

    schedule: Literal["extend", "restart", "constant"] = "extend"
    """The learning rate of the added steps. extend: the schedule of the longer run, from the
    present step; if the earlier steps are the same in both schedules (constant, step, multistep,
    inverse_sqrt), the student is the same as from a run that had this length from the start.
    restart: the schedule starts again over the added steps, with its warm-up. constant: the rate of
    the last step."""

    run: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """The run that is continued: the name of a run folder beside this run's folder, or in the
    service the id of a job. It is not changed. Default: the run in this run's own folder."""
