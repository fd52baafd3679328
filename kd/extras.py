"""What a job asks for that is an extra, and whether it is installed here. Imports none of it."""

from __future__ import annotations

from importlib.util import find_spec

from kd.config.job import JobConfig
from kd.errors import Problem

#: The modules with which accelerate serves a tracker; any one of them will do.
TRACKERS = {
    "tensorboard": ("tensorboard", "tensorboardX"),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "trackio": ("trackio",),
}
NO_HARNESS = Problem(
    "/evaluation/tasks",
    "lm-eval, whose tasks are asked for, is not installed.",
    "Install it: pip install 'potstill[eval]'; or ask for no tasks.",
)


def missing_extras(config: JobConfig) -> list[Problem]:
    """What the job's run would miss at its end, or after its capture; found at its start it costs nothing."""
    reported = config.train.report_to if config.train is not None else ()
    problems = [
        Problem(
            f"/train/report_to/{place}",
            f"{name} is not installed.",
            f"Install it: pip install 'potstill[track]' or {name}; or leave it out.",
        )
        for place, name in enumerate(reported)
        if not any(map(find_spec, TRACKERS[name]))
    ]
    return problems + ([NO_HARNESS] if config.evaluation.tasks and not harness_is_here() else [])


def harness_is_here() -> bool:
    """Whether lm-eval is installed."""
    return find_spec("lm_eval") is not None
