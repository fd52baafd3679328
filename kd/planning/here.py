"""A plan of a job made on this machine, with the student measured: ``kd plan``. Needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from kd.config.job import JobConfig
from kd.forecast import describe_device
from kd.memory.devices import find_device_kind
from kd.models.precision import pick_device
from kd.planning.devices import CPU, DeviceGroup, DeviceName
from kd.planning.finished_runs import read_finished_runs
from kd.planning.plan import TrainingPlan, make_plan, require_steps, require_training
from kd.planning.students import describe_training
from kd.planning.texts import TextFiles, find_text_size


def plan_training(
    config: JobConfig,
    root: Path,
    home: Path,
    devices: DeviceName | None = None,
    price: float | None = None,
    runs: Sequence[Path] = (),
) -> TrainingPlan:
    """Plan the training of ``config`` on ``devices``; None means those of this machine.

    ``runs`` are folders of finished runs, from which the held-out loss is expected. Raises
    ``ConfigError`` for a job that trains nothing, or that cannot be split over the devices.
    """
    require_training(config)
    finished = read_finished_runs(runs) if runs else []
    group = choose_devices(devices)
    text = find_text_size(config, TextFiles.of(config, root, home))
    training = describe_training(config, text, require_steps(config, text))
    plan = make_plan(training, group, price)
    if not runs:
        return plan
    # scipy, which the extra worker installs, is loaded for this alone.
    from kd.planning.fitted_law import expect_loss

    expected = expect_loss(finished, plan.budget.parameters, plan.budget.tokens)
    return replace(plan, expected_loss=expected)


def choose_devices(name: DeviceName | None) -> DeviceGroup:
    """The devices called ``name``: a kind of GPU by its maker's figures, the processor by a probe.

    Without a name they are the GPUs of this machine, or its processor.
    """
    if name is not None and name.kind != CPU:
        return DeviceGroup.of_kind(name)
    if name is not None:
        return DeviceGroup.of_host(describe_device(torch.device(CPU)), name.count)
    here = pick_device()
    if here.type == CPU:
        return DeviceGroup.of_host(describe_device(here), 1)
    place = describe_device(here)
    kind = find_device_kind(place.rates.name)
    if kind is not None:
        # Links are those of the maker; memory and rates are measured.
        linked = replace(place.rates, peer=kind.peer, network=kind.network)
        place = replace(place, rates=linked)
    return DeviceGroup(place, torch.cuda.device_count())
