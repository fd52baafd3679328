"""Puts the state in a checkpoint back into the objects of a run."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from kd.errors import TrainingError
from kd.models.precision import forget_unscaling
from kd.parallel.group import Group
from kd.parallel.sharded_files import fill_tensors, list_stored
from kd.training.saved.state import (
    SavedState,
    TrainingProgress,
    TrainState,
    is_sharded,
    name_parameters,
)
from kd.training.saved.tensor_file import list_tensors
from kd.training.saved.tensors import (
    collect_extra_tensors,
    collect_model_tensors,
    name_random_state,
    select_group_numbers,
)

#: The files with tensors of a checkpoint that one process has written.
FILES = ("model.safetensors", "optimizer.safetensors", "extras.safetensors", "random.safetensors")


def restore(path: Path, saved: SavedState, state: TrainState) -> None:
    """Put all of a checkpoint into ``state``, which may be in the middle of a step."""
    restore_weights(path, saved, state)
    schedule = dict(saved.scheduler)
    if hasattr(state.scheduler, "lr_lambdas"):
        # They are functions, which the configuration determines.
        schedule["lr_lambdas"] = [None] * len(state.scheduler.lr_lambdas)
    state.scheduler.load_state_dict(schedule)
    if state.scaler.is_enabled():
        forget_unscaling(state.scaler)
        # A run on a device without loss scaling saved nothing.
        if saved.scaler:
            state.scaler.load_state_dict(saved.scaler)
    # A rank that the checkpoint does not know keeps its seed.
    random = load_file(path / FILES[3])
    cpu = random.get(name_random_state("cpu", state.group.rank))
    cuda = random.get(name_random_state("cuda", state.group.rank))
    if cpu is not None:
        torch.set_rng_state(cpu)
    if torch.cuda.is_available() and cuda is not None:
        torch.cuda.set_rng_state(cuda)
    for each in fields(TrainingProgress):
        setattr(state.progress, each.name, getattr(saved.progress, each.name))


def restore_weights(path: Path, saved: SavedState, state: TrainState) -> None:
    """Put the model, the optimiser and the extras of a checkpoint into ``state``."""
    # First, because it may refuse the checkpoint: then the model is as it was.
    _copy_into(collect_extra_tensors(state.extras), path, 2, state.group)
    _copy_into(collect_model_tensors(state.model), path, 0, state.group)
    _restore_optimizer(path, saved, state)


def _restore_optimizer(path: Path, saved: SavedState, state: TrainState) -> None:
    """Restore exactly the state that was saved, and drop all state since, for every parameter."""
    optimizer = state.optimizer
    parameters = {name: parameter for parameter, name in name_parameters(state).items()}
    for module in (state.model, *state.extras.values()):
        module.zero_grad(set_to_none=True)
    for group, old in zip(optimizer.param_groups, saved.groups, strict=True):
        # A later step may have added keys to the group that the checkpoint does not have.
        for key in select_group_numbers(group).keys() - old.keys():
            del group[key]
        for key, value in old.items():
            # JSON turned the tuples of betas into lists.
            group[key] = tuple(value) if isinstance(value, list) else value
    group_of = {each: group for group in optimizer.param_groups for each in group["params"]}
    optimizer.state.clear()
    tensors = _load_optimizer_tensors(path, parameters, state)
    for full_name, value in {**tensors, **saved.optimizer}.items():
        name, _, key = full_name.rpartition(".")
        if name not in parameters and state.group.staged:
            continue  # another stage has it
        parameter = parameters[name]
        group = group_of[parameter]
        # torch keeps the step count on the CPU, unless a kernel reads it.
        on_host = key == "step" and not (group.get("fused") or group.get("capturable"))
        if isinstance(value, Tensor) and not on_host:
            value = value.to(parameter.device)
        optimizer.state[parameter][key] = value
    for parameter, values in optimizer.state.items():
        _join_split_tensors(values, parameter.dtype)


def _load_optimizer_tensors(
    path: Path, parameters: dict[str, Tensor], state: TrainState
) -> dict[str, Tensor]:
    """The tensors of the optimiser's state; of sharded parameters, this rank's parts."""
    single = path / FILES[1]
    if single.exists() and not is_sharded(state):
        return load_file(single)
    tensors: dict[str, Tensor] = {}
    for full_name, (size, dtype) in list_stored(path).items():
        name, _, _ = full_name.rpartition(".")
        if full_name in parameters or name not in parameters:
            continue
        parameter = parameters[name].detach()
        if size == parameter.shape:
            # A part of the parameter's own shape: the optimiser's state lies where its weights do.
            tensors[full_name] = torch.zeros_like(parameter, dtype=dtype)
        else:
            tensors[full_name] = torch.zeros(size, dtype=dtype)
    if tensors:
        fill_tensors(path, tensors, state.group)
    return tensors


def _join_split_tensors(values: dict[str, Any], dtype: torch.dtype) -> None:
    """Make states of 8 bits, in place, from the plain tensors that are named {key}/{part}."""
    split = [name for name in values if "/" in name]
    parts: dict[str, dict[str, Tensor]] = {}
    for name in split:
        key, _, part = name.partition("/")
        parts.setdefault(key, {})[part] = values.pop(name)
    for key, found in parts.items():
        # Its library is needed by no other optimiser.
        from kd.optim.eight_bit import join_state

        values[key] = join_state(found, dtype)


def _copy_into(mine: dict[str, Tensor], path: Path, file: int, group: Group) -> None:
    """Set ``mine`` to the tensors of these names in the checkpoint ``path``.

    A checkpoint of one process has them in the file of that number, and no others.
    """
    single = path / FILES[file]
    stored = list_tensors(single) if single.exists() else list_stored(path).keys()
    whole = single.exists() and not group.staged
    different = mine.keys() ^ stored if whole else mine.keys() - stored
    if different:
        raise TrainingError(
            f"{single if single.exists() else path} and this run differ in "
            f"{sorted(different)[:5]}.",
            "Give the job another name (or --run-dir), or delete this run folder to start over.",
        )
    with torch.no_grad():
        if whole and not any(isinstance(each, DTensor) for each in mine.values()):
            for name, tensor in load_file(single).items():
                mine[name].copy_(tensor)
        elif mine:
            fill_tensors(path, mine, group)
