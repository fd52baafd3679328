"""Complete checkpoints: model, optimiser, schedule, loss scale, random state and progress, in one folder.

    checkpoints/step-00000120/
        model.safetensors        parameters and persistent buffers
        optimizer.safetensors    {parameter}.{exp_avg | momentum_buffer | z | step ...}
        extras.safetensors       {extra}/{key}: the temperature, the average of the weights, feature projections
        random.safetensors       torch's generators
        state.json               everything else, the sha256 of the four files above, and a digest of itself

A checkpoint appears by one rename, and its hashes are checked before it is used: presence is not proof. One that is
saved again, after a roll-back, stays beside its place under another name until the new one has it. There is no
pickle in it. Training resumed from it equals training that was never stopped, bit for bit on a CPU.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from cache.disk import ASIDE, file_sha256, remove, settle, write_file
from cache.errors import CacheCorrupt
from cache.manifest import signed_json, verified_json
from kd.errors import TrainingError
from kd.files import whole_folder
from kd.levers.schedules import scale_rates
from kd.progress import finite

_FILES = ("model.safetensors", "optimizer.safetensors", "extras.safetensors", "random.safetensors")
_FORMAT = 2  # 1 had no extras and no groups of the optimiser


@dataclass
class Progress:
    """Where training stands: all of its state that is not a tensor."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_loss: float | None = None
    best_step: int = 0
    evaluations_since_best: int = 0
    first_evaluation: dict[str, Any] | None = None
    last_evaluation: dict[str, Any] = field(default_factory=dict)
    rollbacks: int = 0
    learning_rate_factor: float = 1.0
    batch_size: int | None = None  # the micro-batch that train.auto_batch found
    watch: dict[str, Any] = field(default_factory=dict)
    scale_watch: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainState:
    """The live objects that a checkpoint captures and restores.

    ``extras`` are modules beside the model whose ``state_dict`` is all of their state, each under a name of its own.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    scaler: Any
    progress: Progress
    extras: dict[str, nn.Module] = field(default_factory=dict)


def save(folder: Path, state: TrainState, identity: str) -> Path:
    """Write a checkpoint of ``state`` into ``folder``; ``identity`` says which job may resume from it."""
    final = folder / f"step-{state.progress.step:08d}"
    tensors, numbers = _optimizer_state(state)
    with whole_folder(final) as partial:
        save_file(_model_tensors(state.model), partial / _FILES[0])
        save_file(tensors, partial / _FILES[1])
        save_file(_extra_tensors(state.extras), partial / _FILES[2])
        save_file(_random_tensors(), partial / _FILES[3])
        content = {
            "format": _FORMAT,
            "identity": identity,
            "progress": finite(asdict(state.progress)),
            "optimizer": numbers,
            "groups": [_group_numbers(group) for group in state.optimizer.param_groups],
            "scheduler": {key: value for key, value in state.scheduler.state_dict().items() if key != "lr_lambdas"},
            "scaler": state.scaler.state_dict(),
            "sha256": {name: file_sha256(partial / name) for name in _FILES},
        }
        write_file(partial / "state.json", signed_json(content))
    return final


def load_newest(folder: Path, state: TrainState, identity: str) -> list[str]:
    """Restore the newest whole checkpoint into ``state``; returns what was wrong with newer ones.

    One that was being replaced when its run was killed is put back first. Raises ``TrainingError`` if the checkpoint
    belongs to another job.
    """
    for aside in list(folder.glob(f"{ASIDE}*")):
        settle(folder / aside.name.removeprefix(ASIDE))
    problems = []
    for path in reversed(list_checkpoints(folder)):
        try:
            content = _checked(path)
        except (OSError, CacheCorrupt) as error:
            problems.append(f"checkpoint {path.name} is damaged and was passed over: {error}")
            continue
        _require_same_job(path, content, identity)
        _restore(path, content, state)
        break
    return problems


def load_step(folder: Path, step: int, state: TrainState, identity: str) -> None:
    """Restore the checkpoint of ``step`` into ``state``; nothing of what ``state`` held before is left.

    Raises ``TrainingError`` if there is none, or if it is damaged or another job's.
    """
    path = folder / f"step-{step:08d}"
    try:
        content = _checked(path)
    except (OSError, CacheCorrupt) as error:
        raise TrainingError(
            f"the checkpoint of step {step} cannot be restored: {error}",
            "Run the job again: it goes on from the newest whole checkpoint.",
        ) from error
    _require_same_job(path, content, identity)
    _restore(path, content, state)


def roll_back(folder: Path, state: TrainState, identity: str, factor: float = 0.5) -> Path:
    """Restore the newest whole checkpoint and multiply the learning rate by ``factor``, once more for each roll-back.

    Damaged checkpoints that are newer than it are deleted. Returns its path; raises ``TrainingError`` if there is none.
    """
    before = state.progress
    rollbacks, rate_factor = before.rollbacks + 1, before.learning_rate_factor * factor
    problems = load_newest(folder, state, identity)
    paths = list_checkpoints(folder)
    if len(problems) == len(paths):
        raise TrainingError(
            f"{folder} holds no whole checkpoint to go back to.", "Lower train.save_steps or train.learning_rate."
        )
    kept = len(paths) - len(problems)
    for path in paths[kept:]:
        remove(path)
    scale_rates(state.scheduler, rate_factor / state.progress.learning_rate_factor)
    state.progress.rollbacks, state.progress.learning_rate_factor = rollbacks, rate_factor
    return paths[kept - 1]


def load_weights(path: Path, state: TrainState) -> None:
    """Put a checkpoint's weights, and what the served weights are made of, into ``state``; its progress stays.

    To be followed by ``kd.levers.averaging.serve``, which leaves the averaged weights in the student where there are
    such. The schedule, the loss scale and the random state are left alone.
    """
    _restore_weights(path, _checked(path), state)


def load_model(path: Path, model: nn.Module) -> None:
    """Put a checkpoint's weights, as they were trained, into ``model``."""
    _copy_into(model, load_file(path / _FILES[0]))


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in ``folder``, oldest first."""
    return sorted(folder.glob("step-*"))


def newest_identity(folder: Path) -> str | None:
    """Which job wrote the newest checkpoint whose state can be read; its tensors are not looked at."""
    for path in reversed(list_checkpoints(folder)):
        try:
            return str(verified_json((path / "state.json").read_bytes(), "state.json")["identity"])
        except (OSError, CacheCorrupt, KeyError):
            continue
    return None


def prune(folder: Path, limit: int, keep_step: int | None) -> None:
    """Delete the oldest until ``limit`` are left; never the newest, nor the one of ``keep_step``."""
    paths = list_checkpoints(folder)
    spare = [path for path in paths[:-1] if path.name != f"step-{keep_step or 0:08d}"]
    for path in spare[: max(len(paths) - limit, 0)]:
        shutil.rmtree(path)


# ---------------------------------------------------------------------- tensors


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters once each, tied ones under their first name, and persistent buffers."""
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    transient = {
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    tensors.update({name: buffer for name, buffer in model.named_buffers() if name not in transient})
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _copy_into(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    mine = _model_tensors(model)
    if mine.keys() != tensors.keys():
        raise TrainingError(f"checkpoint and model differ in {sorted(mine.keys() ^ tensors.keys())[:5]}.")
    with torch.no_grad():
        for name, tensor in mine.items():
            tensor.copy_(tensors[name])


def _parameter_names(state: TrainState) -> dict[Tensor, str]:
    """Every parameter that the optimiser may hold: the model's by their names, an extra's as {extra}/{name}."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in state.model.named_parameters()}
    for extra, module in state.extras.items():
        names.update({parameter: f"{extra}/{name}" for name, parameter in module.named_parameters()})
    return names


def _optimizer_state(state: TrainState) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What the optimiser keeps for each parameter: its tensors, and its plain numbers."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    names = _parameter_names(state)
    for parameter, values in state.optimizer.state.items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"{names[parameter]}.{key}"] = value.detach().contiguous()
            else:
                numbers[f"{names[parameter]}.{key}"] = value
    return tensors, numbers


# Which kernels do the work is the machine's business: a run may go on on another one.
_IMPLEMENTATION = {"params", "fused", "foreach", "capturable"}


def _group_numbers(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _IMPLEMENTATION}


def _extra_tensors(extras: dict[str, nn.Module]) -> dict[str, Tensor]:
    return {
        f"{extra}/{key}": value.detach().contiguous()
        for extra, module in extras.items()
        for key, value in module.state_dict().items()
    }


def _random_tensors() -> dict[str, Tensor]:
    tensors = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    return tensors


# ---------------------------------------------------------------------- restoring


def _restore(path: Path, content: dict[str, Any], state: TrainState) -> None:
    """Put all of a checkpoint into ``state``, in which a step may have been under way."""
    _restore_weights(path, content, state)
    _restore_scheduler(content["scheduler"], state.scheduler)
    _restore_scaler(content["scaler"], state.scaler)
    _restore_random(load_file(path / _FILES[3]))
    known = {each.name for each in fields(Progress)}
    saved = Progress(**{key: value for key, value in content["progress"].items() if key in known})
    for key in known:
        setattr(state.progress, key, getattr(saved, key))


def _restore_weights(path: Path, content: dict[str, Any], state: TrainState) -> None:
    extras = _saved_extras(path, state)  # refused before anything is touched
    load_model(path, state.model)
    for extra, module in state.extras.items():
        module.load_state_dict({key: extras[f"{extra}/{key}"] for key in module.state_dict()})
    _restore_optimizer(path, content, state)


def _saved_extras(path: Path, state: TrainState) -> dict[str, Tensor]:
    tensors = load_file(path / _FILES[2])
    expected = _extra_tensors(state.extras).keys()
    if expected != tensors.keys():
        raise TrainingError(
            f"{path / _FILES[2]} and this run differ in {sorted(expected ^ tensors.keys())[:5]}.",
            "Use another run folder, or delete this one to start over.",
        )
    return tensors


def _restore_optimizer(path: Path, content: dict[str, Any], state: TrainState) -> None:
    """Exactly what was saved: what the optimiser has gathered since, for whichever parameter, is forgotten."""
    optimizer, parameters = state.optimizer, {name: parameter for parameter, name in _parameter_names(state).items()}
    for module in (state.model, *state.extras.values()):
        module.zero_grad(set_to_none=True)
    for group, saved in zip(optimizer.param_groups, content["groups"], strict=True):
        _restore_group(group, saved)
    group_of = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    optimizer.state.clear()
    for full_name, value in {**load_file(path / _FILES[1]), **content["optimizer"]}.items():
        name, _, key = full_name.rpartition(".")
        parameter = parameters[name]
        if isinstance(value, Tensor) and not _stays_on_host(key, group_of[parameter]):
            value = value.to(parameter.device)
        optimizer.state[parameter][key] = value


def _stays_on_host(key: str, group: dict[str, Any]) -> bool:
    """torch's optimisers count steps in a CPU tensor, but for fused and captured ones, which read it on the device."""
    return key == "step" and not (group.get("fused") or group.get("capturable"))


def _restore_group(group: dict[str, Any], saved: dict[str, Any]) -> None:
    for key in _group_numbers(group).keys() - saved.keys():
        del group[key]
    for key, value in saved.items():
        group[key] = tuple(value) if isinstance(value, list) else value


def _restore_scheduler(saved: dict[str, Any], scheduler: Any) -> None:
    """``lr_lambdas`` are functions of the configuration: those that the schedule was made with stay."""
    lambdas = {"lr_lambdas": [None] * len(scheduler.lr_lambdas)} if hasattr(scheduler, "lr_lambdas") else {}
    scheduler.load_state_dict({**saved, **lambdas})


def _restore_scaler(saved: dict[str, Any], scaler: Any) -> None:
    if not scaler.is_enabled():
        return
    scaler._per_optimizer_states.clear()  # else a step broken off after unscale_ would forbid the next unscale_
    if saved:  # nothing was saved by a run whose device needed no loss scale
        scaler.load_state_dict(saved)


def _restore_random(tensors: dict[str, Tensor]) -> None:
    torch.set_rng_state(tensors["cpu"])
    if torch.cuda.is_available() and "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"])


def _checked(path: Path) -> dict[str, Any]:
    content = verified_json((path / "state.json").read_bytes(), "state.json")
    if content.get("format") != _FORMAT:
        raise TrainingError(
            f"{path} has checkpoint format {content.get('format', 1)}, but this version reads {_FORMAT}.",
            "Finish the run with the version that began it, or delete its folder to start over.",
        )
    for name in _FILES:
        if file_sha256(path / name) != content["sha256"][name]:
            raise CacheCorrupt(f"{name} differs from what was saved.")
    return content


def _require_same_job(path: Path, content: dict[str, Any], identity: str) -> None:
    if content["identity"] != identity:
        raise TrainingError(
            f"{path} was written by another job: its configuration, data or cache differ.",
            "Use another run folder, or delete this one to start over.",
        )
