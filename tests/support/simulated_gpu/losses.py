"""Run a job on the device at hand and print the losses of its steps, as a list in JSON.

python -m tests.support.simulated_gpu.losses FOLDER < job.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kd.config.job import JobConfig
from kd.pipeline import run_stages
from kd.progress import Event, Monitor


def list_losses(events: list[Event]) -> list[float]:
    """Return the loss of each step that the events report."""
    return [each.data["loss"] for each in events if "loss" in each.data]


def run_job(config: JobConfig, folder: Path) -> list[float]:
    """Run the job with its caches and its run in ``folder``; returns the losses of its steps."""
    events: list[Event] = []
    run_stages(config, folder / "home", folder / "run", Monitor(events.append))
    return list_losses(events)


if __name__ == "__main__":
    print(json.dumps(run_job(JobConfig.model_validate_json(sys.stdin.read()), Path(sys.argv[1]))))
