"""The learning rate over a whole run, before it starts: ``kd lr``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kd.config.job import JobConfig
from kd.evaluation.plots import draw_rates
from kd.forecast.text_size import find_text_size, require_steps, require_training
from kd.optim.schedules import list_rates

#: Rows of the table, besides those where the rate turns.
ROWS = 12


@dataclass(frozen=True)
class RatePlan:
    """The rate at each step of a run; ``peak`` is the rate of the job."""

    rates: tuple[float, ...]
    schedule: str
    peak: float
    sequences_per_step: int

    def list_rows(self) -> list[dict[str, float]]:
        """Return some steps (from 1) with their rates: even distances, the peak, both ends."""
        count = len(self.rates)
        highest = max(range(count), key=lambda step: self.rates[step])
        chosen = {round(part * (count - 1) / (ROWS - 1)) for part in range(ROWS)} | {highest}
        return [
            {"step": step + 1, "rate": self.rates[step], "share": self.rates[step] / self.peak}
            for step in sorted(chosen)
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values, with the rate of every step."""
        return {
            "schedule": self.schedule,
            "steps": len(self.rates),
            "sequences_per_step": self.sequences_per_step,
            "peak": self.peak,
            "rates": list(self.rates),
        }

    def draw(self, path: Path) -> None:
        """Draw the rates as a PNG file."""
        draw_rates(path, self.rates)


def plan_rates(config: JobConfig, root: Path, home: Path) -> RatePlan:
    """Plan the rates of a job; the text is read only where the job gives ``epochs``.

    Raises ``ConfigError`` for a job that trains nothing, and ``TrainingError`` for a schedule that
    cannot be made.
    """
    require_training(config)
    options = config.require_train()
    steps = options.max_steps
    if steps is None:
        steps = require_steps(config, find_text_size(config, root, home))
    return RatePlan(
        tuple(list_rates(options, steps)),
        options.lr_scheduler_type,
        options.learning_rate,
        options.sequences_per_step,
    )
