"""Experiment trackers: TensorBoard, Weights & Biases, MLflow and trackio, through accelerate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from cache.json_object import Json
from cache.manifest import flatten
from kd.config.job import JobConfig
from kd.errors import TrainingError
from kd.progress import Event, Monitor

#: The types of events whose numbers the trackers get.
NUMBERS = ("metrics", "evaluation", "scalars", "temperature")


class Trackers:
    """Sends all numbers of metrics.jsonl to the trackers that the job names.

    A tracker that cannot be started ends the run before it begins. A tracker that fails later
    causes a warning and is not used again: it must not end a run that trains.
    """

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._trackers: dict[str, Any] = {}

    def start(
        self, config: JobConfig, names: tuple[str, ...], run_dir: Path, first: int = 0
    ) -> None:
        """Start the trackers ``names``; ``first`` is the first step whose numbers come now."""
        for name in names:
            try:
                from accelerate.tracking import LOGGER_TYPE_TO_CLASS

                kind = LOGGER_TYPE_TO_CLASS[name]
                if name == "tensorboard":
                    # A process that was killed may have told later steps. The others begin anew.
                    tracker = kind(config.name, run_dir / "tensorboard", purge_step=first)
                elif name == "mlflow":
                    tracker = kind(experiment_name=config.name)
                else:
                    tracker = kind(config.name)
                tracker.start()
                tracker.store_init_configuration(_list_fields(config))
                self._trackers[name] = tracker
            except Exception as error:
                raise TrainingError(
                    f"train.report_to {name} cannot be started: {type(error).__name__}: {error}",
                    f"Install it (pip install 'potstill[track]' or {name}) and log in, or leave it "
                    "out.",
                ) from error

    def log(self, step: int, values: Json) -> None:
        """Send the numbers among ``values``."""
        numbers = {key: float(x) for key, x in values.items() if isinstance(x, int | float)}
        numbers.pop("step", None)
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.log(numbers, step=step)
            # The client of a service may raise any exception.
            except Exception as error:
                message = f"{name} is not used any more: {type(error).__name__}: {error}"
                self._monitor.emit("warning", message=message)
                del self._trackers[name]

    def finish(self) -> None:
        """Close all trackers."""
        for name, tracker in self._trackers.items():
            try:
                tracker.finish()
            except Exception as error:
                message = f"{name} did not close: {type(error).__name__}: {error}"
                self._monitor.emit("warning", message=message)
        self._trackers.clear()


def add_trackers(monitor: Monitor, trackers: Trackers) -> Monitor:
    """A monitor that also sends metrics and evaluations to the trackers."""

    def listen(event: Event) -> None:
        monitor.listen(event)
        if event.type in NUMBERS and "step" in event.data:
            trackers.log(int(event.data["step"]), event.data)

    # It keeps the notices of the run.
    return replace(monitor, listen=listen)


def _list_fields(config: JobConfig) -> dict[str, str | float]:
    """The fields of a job by dotted names; lists become text, as trackers take scalars only."""
    fields = flatten(config.model_dump(mode="json", exclude_none=True))
    return {
        name: value if isinstance(value, str | int | float | bool) else str(value)
        for name, value in fields.items()
    }
