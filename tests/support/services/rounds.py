"""A kind of jobs whose stages repeat, as a program: ``python -m tests.support.services.rounds``.

It adds the kind to the table, and then is the API, the worker or the child of a stage. A job of it
captures and trains twice. Each round has text of its own, and goes on from the student of the round
before.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from kd.config.job import JobConfig
from kd.config.kinds import CAPTURE, KINDS, TRAIN, Kind
from kd.progress import Monitor

PROGRAM = "tests.support.services.rounds"
PLANNER = "services.api.plan_child"
#: The variable that tells the planner what it is.
PART = "TEST_PART"
ROUNDS = 2


def run_stage(
    stage: str, config: JobConfig, home: Path, run_dir: Path, monitor: Monitor, turn: int
) -> dict[str, Any]:
    """Run the stage as one of a job of kind distill: that of its round."""
    from kd import pipeline

    changes: dict[str, Any] = {"kind": "distill", "data": {"train": [config.data.train[turn]]}}
    if turn > 0:
        before = run_dir / f"round-{turn - 1}" / "student"
        changes["student"] = {"model": str(before), "init": None}
    job = config.model_dump(mode="json")
    for section, fields in changes.items():
        job[section] = fields if section == "kind" else job[section] | fields
    own = JobConfig.model_validate(job)
    return pipeline.run_stage(stage, own, home, run_dir / f"round-{turn}", monitor).to_json()


def run_api_with_planner() -> None:
    """Run the API; the process that looks at new jobs knows the kind, too."""
    from services.api.__main__ import run_api
    from services.api.line_process import LineProcess
    from services.settings import Settings

    start = LineProcess.__init__

    def start_own(self: LineProcess, module: str, environment: Any, seconds: float) -> None:
        if module == PLANNER:
            module, environment = PROGRAM, {**environment, PART: PLANNER}
        start(self, module, environment, seconds)

    LineProcess.__init__ = start_own  # type: ignore[method-assign]
    run_api(Settings())


def main() -> None:
    """Be the part of the service that the command line or the environment names."""
    # Before the modules of the service are imported, which read the table.
    KINDS["rounds"] = Kind("rounds", (CAPTURE, TRAIN) * ROUNDS, "capture and train, twice")
    part = os.environ.get(PART) or (sys.argv[1] if len(sys.argv) > 1 else "child")
    if part == "api":
        run_api_with_planner()
    elif part == PLANNER:
        from services.api.line_process import answer_orders
        from services.api.plan_child import start

        answer_orders(start)
    elif part == "worker":
        from services.settings import Settings
        from services.worker.__main__ import run_worker

        run_worker(Settings(), ["precompute", "train"])
    else:
        from services.worker import stage_child

        sys.exit(stage_child.main(run_stage))


if __name__ == "__main__":
    main()
