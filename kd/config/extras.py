"""The optional packages that a job needs, and whether they are installed. Imports none of them."""

from __future__ import annotations

from importlib.util import find_spec

from kd.config.job import JobConfig
from kd.errors import ConfigError, Problem

#: The modules through which accelerate serves each tracker; one of them is enough.
TRACKER_MODULES = {
    "tensorboard": ("tensorboard", "tensorboardX"),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "trackio": ("trackio",),
}
NO_HARNESS = Problem(
    "/evaluation/tasks",
    "the job asks for benchmark tasks, but lm-eval is not installed.",
    "Install it: pip install 'potstill[eval]'; or remove the tasks.",
)
NO_TORCHAO = Problem(
    "/train/optim",
    "this optimiser needs torchao, which is not installed.",
    "Install it: pip install 'potstill[quantization]'; or set train.optim to adamw.",
)
NO_FLOAT8 = Problem(
    "/train/fp8",
    "products in float8 need torchao, which is not installed.",
    "Install it: pip install 'potstill[quantization]'; or set train.fp8 to false.",
)
NO_QUANTIZER = Problem(
    "/teacher/quantization",
    "the job quantises the teacher, but torchao is not installed.",
    "Install it: pip install 'potstill[quantization]'; or remove the field.",
)
NO_GGUF = Problem(
    "/teacher/gguf_file",
    "the teacher is a GGUF file, which needs the package gguf: it is not installed.",
    "Install it: pip install 'potstill[gguf]'; or use the model with safetensors.",
)


def find_missing_extras(config: JobConfig) -> list[Problem]:
    """A problem for each tracker, torchao and lm-eval that the job needs and this machine lacks.

    Without this check a run would fail after its capture, or at its end.
    """
    reported = config.train.report_to if config.train is not None else ()
    problems = [
        Problem(
            f"/train/report_to/{place}",
            f"{name} is not installed.",
            f"Install it: pip install 'potstill[track]' or {name}; or remove it from the list.",
        )
        for place, name in enumerate(reported)
        if not any(map(find_spec, TRACKER_MODULES[name]))
    ]
    if config.train is not None and not is_torchao_installed():
        problems += [NO_TORCHAO] if config.train.optimizer.needs_torchao else []
        problems += [NO_FLOAT8] if config.train.fp8 else []
    return problems + find_missing_harness(config)


def require_torchao(problem: Problem) -> None:
    """Raise ``ConfigError`` with ``problem`` where torchao is not installed."""
    if not is_torchao_installed():
        raise ConfigError([problem])


def is_torchao_installed() -> bool:
    """Whether torchao is installed, which quantises weights and the states of optimisers."""
    return find_spec("torchao") is not None


def find_missing_harness(config: JobConfig) -> list[Problem]:
    """Find that the job asks for benchmark tasks but lm-eval is not installed."""
    return [NO_HARNESS] if config.evaluation.tasks and not is_harness_installed() else []


def is_harness_installed() -> bool:
    """Whether lm-eval is installed."""
    return find_spec("lm_eval") is not None
