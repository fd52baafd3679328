"""A kind of jobs whose stages repeat, as a program: ``python -m tests.support.services.rounds``.

It adds the kind to the table, and then is the API, the worker or the child of a stage. A job of it
captures and trains twice. Each round has text of its own, and goes on from the student of the round
before.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from kd.config.job import JobConfig
from kd.config.kinds import CAPTURE, KINDS, TRAIN, Kind
from kd.progress import Monitor

ROUNDS = 2

KINDS["rounds"] = Kind("rounds", (CAPTURE, TRAIN) * ROUNDS, "capture and train, again and again")


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
    return pipeline.run_stage(stage, own, home, run_dir / f"round-{turn}", monitor)


def main() -> None:
    """Be the part of the service that the command line names."""
    part = sys.argv[1] if len(sys.argv) > 1 else "child"
    if part == "api":
        from services.api.__main__ import run_api
        from services.settings import Settings

        run_api(Settings())
    elif part == "worker":
        from services.settings import Settings
        from services.worker.__main__ import run_worker

        run_worker(Settings(), ["precompute", "train"])
    else:
        from services.worker import child

        sys.exit(child.main(run_stage))


if __name__ == "__main__":
    main()
