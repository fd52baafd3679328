"""The devices that this process may use, and how many of them a job asks for."""

from __future__ import annotations

import os

import torch

from kd.config.job import JobConfig
from kd.errors import ConfigError, Problem
from kd.parallel.variables import CPU, DEVICES_VARIABLE, split_names


def count_devices() -> int:
    """Count the GPUs that torch sees; without one, the CPU devices that KD_DEVICES names, or 1."""
    if torch.cuda.is_available():
        return torch.cuda.device_count()
    return max(split_names(os.environ.get(DEVICES_VARIABLE, "")).count(CPU), 1)


def count_ranks(config: JobConfig) -> int:
    """Count the ranks of ``config``: one on each device that it asks for.

    Raises ``ConfigError`` where there are fewer devices. A job that asks for one or none has one
    rank, on the first GPU or on the CPU.
    """
    wanted = config.resources.gpus or 1
    found = count_devices()
    if wanted > found:
        detail = f"it asks for {wanted} devices, but this process may use {found}."
        remedy = (
            "Lower it, or give the worker more: KD_DEVICES=0,1 names two GPUs, KD_DEVICES=cpu,cpu "
            "makes two devices of a CPU."
        )
        raise ConfigError([Problem("/resources/gpus", detail, remedy)])
    return wanted
