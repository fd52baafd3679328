"""Complete checkpoints: model, optimiser, schedule, loss scale, random state and progress, in one folder.

    checkpoints/step-00000120/
        model.safetensors        parameters and persistent buffers
        optimizer.safetensors    {parameter}.{exp_avg | exp_avg_sq | step}
        random.safetensors       torch's generators
        state.json               everything else, the sha256 of the three files above, and a digest of itself

A checkpoint appears by one rename, and its hashes are checked before it is used: presence is not proof. There is no
pickle in it. Training resumed from it equals training that was never stopped, bit for bit on a CPU.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from cache.disk import file_sha256, write_file
from cache.errors import CacheCorrupt
from cache.manifest import signed_json, verified_json
from kd.errors import TrainingError
from kd.files import whole_folder
from kd.progress import finite

_FILES = ("model.safetensors", "optimizer.safetensors", "random.safetensors")


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


@dataclass(frozen=True)
class TrainState:
    """The live objects that a checkpoint captures and restores."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    scaler: Any
    progress: Progress


def save(folder: Path, state: TrainState, identity: str) -> Path:
    """Write a checkpoint of ``state`` into ``folder``; ``identity`` says which job may resume from it."""
    final = folder / f"step-{state.progress.step:08d}"
    with whole_folder(final) as partial:
        save_file(_model_tensors(state.model), partial / _FILES[0])
        save_file(_optimizer_tensors(state), partial / _FILES[1])
        save_file(_random_tensors(), partial / _FILES[2])
        content = {
            "identity": identity,
            "progress": asdict(state.progress),
            "scheduler": {key: value for key, value in state.scheduler.state_dict().items() if key != "lr_lambdas"},
            "scaler": state.scaler.state_dict(),
            "sha256": {name: file_sha256(partial / name) for name in _FILES},
        }
        write_file(partial / "state.json", signed_json(finite(content)))
    return final


def load_newest(folder: Path, state: TrainState, identity: str) -> list[str]:
    """Restore the newest whole checkpoint into ``state``; returns what was wrong with newer ones.

    Raises ``TrainingError`` if the checkpoint belongs to another job.
    """
    problems = []
    for path in reversed(list_checkpoints(folder)):
        try:
            content = _checked(path)
        except (OSError, CacheCorrupt) as error:
            problems.append(f"checkpoint {path.name} is damaged and was passed over: {error}")
            continue
        if content["identity"] != identity:
            raise TrainingError(
                f"{path} was written by another job: its configuration, data or cache differ.",
                "Use another run folder, or delete this one to start over.",
            )
        _restore(path, content, state)
        break
    return problems


def load_model(path: Path, model: nn.Module) -> None:
    """Put a checkpoint's weights into ``model``."""
    _copy_into(model, load_file(path / _FILES[0]))


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in ``folder``, oldest first."""
    return sorted(folder.glob("step-*"))


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


def _optimizer_tensors(state: TrainState) -> dict[str, Tensor]:
    names: dict[Tensor, str] = {parameter: name for name, parameter in state.model.named_parameters()}
    return {
        f"{names[parameter]}.{key}": value.contiguous()
        for parameter, values in state.optimizer.state.items()
        for key, value in values.items()
    }


def _random_tensors() -> dict[str, Tensor]:
    tensors = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    return tensors


def _restore(path: Path, content: dict[str, Any], state: TrainState) -> None:
    load_model(path, state.model)
    parameters = dict(state.model.named_parameters())
    for full_name, value in load_file(path / _FILES[1]).items():
        name, _, key = full_name.rpartition(".")
        state.optimizer.state[parameters[name]][key] = value.to(parameters[name].device)
    state.scheduler.load_state_dict({**content["scheduler"], "lr_lambdas": [None] * len(state.optimizer.param_groups)})
    for group, rate in zip(state.optimizer.param_groups, content["scheduler"]["_last_lr"], strict=True):
        group["lr"] = rate
    state.scaler.load_state_dict(content["scaler"])
    random = load_file(path / _FILES[2])
    torch.set_rng_state(random["cpu"])
    if torch.cuda.is_available() and "cuda" in random:
        torch.cuda.set_rng_state(random["cuda"])
    for key, value in content["progress"].items():
        setattr(state.progress, key, value)


def _checked(path: Path) -> dict[str, Any]:
    content = verified_json((path / "state.json").read_bytes(), "state.json")
    for name in _FILES:
        if file_sha256(path / name) != content["sha256"][name]:
            raise CacheCorrupt(f"{name} differs from what was saved.")
    return content
