"""The devices that this process may use, and how many of them a job asks for."""

from __future__ import annotations

import os

import torch

from kd.config.job import JobConfig
from kd.errors import ConfigError, Problem
from kd.parallel.standing import find_standing_ranks
from kd.parallel.variables import CPU, DEVICES_VARIABLE, split_names


def count_devices() -> int:
    """Count the GPUs that torch sees; without one, the CPU devices that KD_DEVICES names, or 1."""
    if torch.cuda.is_available():
        return torch.cuda.device_count()
    return max(split_names(os.environ.get(DEVICES_VARIABLE, "")).count(CPU), 1)


def count_ranks(config: JobConfig, hosts: int | None = None) -> int:
    """Count the ranks of a stage of ``config``: one on each device that it asks for.

    ``hosts`` is the number of those that share a training; None for a stage that needs one.
    Raises ``ConfigError`` where there are fewer. A job that asks for one device or none has one
    rank on each host, on the first GPU or on the CPU.
    """
    resources = config.resources
    if (ranks := find_standing_ranks()) is not None:
        each = resources.gpus or 1
        if ranks.group.size not in [count * each for count in resources.host_counts]:
            detail = (
                f"the job asks for {resources.devices} devices (resources.hosts x resources.gpus), "
                f"but torchrun has started {ranks.group.size} processes."
            )
            remedy = "Give torchrun --nnodes hosts and --nproc-per-node gpus, or change the job."
            raise ConfigError([Problem("/resources", detail, remedy)])
        return ranks.group.size
    if hosts is not None and hosts not in resources.host_counts:
        detail = f"it asks for {resources.host_counts[0]} hosts, but this run has {hosts}."
        remedy = (
            "Submit the job to a service with as many workers, or start it by torchrun on each "
            "host (docs/how-to/several-hosts.md)."
        )
        raise ConfigError([Problem("/resources/hosts", detail, remedy)])
    wanted, found = resources.gpus or 1, count_devices()
    if wanted > found:
        detail = f"it asks for {wanted} devices, but this process may use {found}."
        remedy = (
            "Lower it, or give the worker more: KD_DEVICES=0,1 names two GPUs, KD_DEVICES=cpu,cpu "
            "makes two devices of a CPU."
        )
        raise ConfigError([Problem("/resources/gpus", detail, remedy)])
    return wanted * (hosts or 1)
