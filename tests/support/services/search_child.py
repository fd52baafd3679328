"""The real child with a light stage: the held-out loss is a function of the learning rate."""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path
from typing import Any

from kd.config.job import JobConfig
from kd.errors import Interrupted, TrainingError
from kd.progress import Monitor
from services.worker.stage_child import main


def loss_of(config: JobConfig, step: int) -> float:
    """Return the loss after ``step`` steps; it is lowest at a learning rate of 0.01."""
    assert config.train is not None
    return abs(math.log10(config.train.learning_rate) + 2) + 1 / step


def run_stage(
    stage: str, config: JobConfig, home: Path, run_dir: Path, monitor: Monitor, turn: int
) -> dict[str, Any]:
    """Report a capture without work, or train for ``max_steps`` steps of 0.05 seconds each.

    A run that was stopped goes on at the step where it stopped.
    """
    (run_dir / "pid").write_text(str(os.getpid()))
    if stage == "precompute":
        monitor.emit("cache", fingerprint="f" * 32, bytes_per_token=12.5, tokens=100, reused=False)
        return {"cache": {}}
    assert config.train is not None and config.train.max_steps is not None
    monitor.emit("evaluation", step=0, validation_loss=9.0)
    file = run_dir / "step"
    for step in range(int(file.read_text()) if file.exists() else 1, config.train.max_steps + 1):
        if monitor.should_stop():
            raise Interrupted(f"Stopped before step {step}.")
        time.sleep(0.05)
        if config.train.learning_rate > 1:
            raise TrainingError("The loss is nan.", "Lower train.learning_rate.")
        monitor.emit("evaluation", step=step, validation_loss=loss_of(config, step))
        file.write_text(str(step + 1))
    (run_dir / "student").mkdir(exist_ok=True)
    return {"artifacts": {}}


if __name__ == "__main__":
    sys.exit(main(run_stage))
