"""Complete checkpoints: model, optimiser, schedule, loss scale, random state and progress.

    checkpoints/step-00000120/
        model.safetensors        parameters and persistent buffers
        optimizer.safetensors    {parameter}.{exp_avg | momentum_buffer | z | step ...}; the plain
                                 tensors of a state of 8 bits: {parameter}.exp_avg/{codes ...}
        extras.safetensors       {extra}/{key}: temperature, average of the weights, projections
        random.safetensors       torch's generators; those of rank 1 as cpu/1 and cuda/1
        state.json               all other state, sha256 of the files above, and its own digest

A checkpoint appears by one rename, and its hashes are checked before it is used. Where a step is
saved again after a roll-back, the old checkpoint keeps another name beside the place until the new
one is there. No file is a pickle.

Where each rank holds a part of every parameter (train.strategy fsdp) or some layers (pipeline),
shard-*.safetensors take the place of the first three files, one from each rank with its parts of
all their tensors. A run of any strategy and of any number of ranks goes on from either kind.

Training resumed from a checkpoint equals training that was never stopped, bit for bit on a CPU.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cache.disk import ASIDE_PREFIX, hash_file, recover_folder, remove_path, write_file
from cache.errors import CacheCorrupt
from cache.manifest import sign_json, verify_json
from kd.errors import TrainingError
from kd.files import locate_temporary, whole_folder
from kd.models.precision import forget_unscaling
from kd.optim.schedules import scale_rates
from kd.parallel.group import ALONE, Group
from kd.parallel.sharded_files import fill_tensors, list_stored, write_shards
from kd.progress import replace_nonfinite
from kd.training.tensor_file import list_tensors, write_tensors

#: The files with tensors, in the order of the list above.
_FILES = ("model.safetensors", "optimizer.safetensors", "extras.safetensors", "random.safetensors")
#: The format of state.json; a checkpoint of another format is refused.
_FORMAT = 2
#: Keys of an optimiser's group that choose its kernels: a run may be resumed on a machine with
#: other kernels.
_IMPLEMENTATION_KEYS = {"params", "fused", "foreach", "capturable"}


@dataclass
class TrainingProgress:
    """The state of training that is not a tensor.

    ``seconds`` are those of the steps; ``batch_size`` is the micro-batch that ``train.auto_batch``
    found. ``evaluation_due`` is set where the run was stopped in the evaluation after ``step``,
    which is then made anew. ``skipped`` lists the batches that were left out, each with its
    ``step`` (counted from 1) and the numbers of its ``sequences`` whose loss or gradient is not
    finite. ``schedule_began`` is the step at which the present schedule of the learning rate began.
    ``stems`` are the identities of the longer runs that may continue this one
    (``kd.training.resume.identity.compute_stems``).
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_loss: float | None = None
    best_step: int = 0
    evaluations_since_best: int = 0
    evaluation_due: bool = False
    first_evaluation: dict[str, Any] | None = None
    last_evaluation: dict[str, Any] = field(default_factory=dict)
    rollbacks: int = 0
    learning_rate_factor: float = 1.0
    skipped: list[dict[str, Any]] = field(default_factory=list)
    batch_size: int | None = None
    schedule_began: int = 0
    stems: dict[str, str] = field(default_factory=dict)
    watch: dict[str, Any] = field(default_factory=dict)
    scale_watch: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainState:
    """The objects whose state a checkpoint holds.

    ``extras`` are named modules beside the model, whose ``state_dict`` is all of their state.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    scaler: Any
    progress: TrainingProgress
    extras: dict[str, nn.Module] = field(default_factory=dict)
    group: Group = ALONE


def save_checkpoint(folder: Path, state: TrainState, identity: str) -> Path:
    """Write a checkpoint of ``state`` into ``folder``, and return its path.

    Only a job of the same ``identity`` may resume from it. All ranks call it, and return when it is
    written.
    """
    final = locate_checkpoint(folder, state.progress.step)
    random = _collect_random_tensors(state.group)
    if state.group.leads or is_sharded(state):
        _write_checkpoint(final, state, identity, random)
    state.group.wait()
    return final


def _write_checkpoint(
    final: Path, state: TrainState, identity: str, random: dict[str, Tensor]
) -> None:
    tensors, numbers = _collect_optimizer_state(state)
    if state.group.staged:
        numbers = {
            name: each for stage in state.group.gather(numbers) for name, each in stage.items()
        }
    with _writing_folder(final, state.group) as partial:
        if is_sharded(state):
            state.group.wait()  # until the folder is there
            model = _collect_model_tensors(state.model)
            write_shards(partial, model | tensors | _collect_extra_tensors(state.extras))
        else:
            write_tensors(partial / _FILES[0], _collect_model_tensors(state.model))
            write_tensors(partial / _FILES[1], tensors)
            write_tensors(partial / _FILES[2], _collect_extra_tensors(state.extras))
        if not state.group.leads:
            return
        write_tensors(partial / _FILES[3], random)
        content = {
            "format": _FORMAT,
            "identity": identity,
            "progress": replace_nonfinite(asdict(state.progress)),
            "optimizer": numbers,
            "groups": [_select_group_numbers(group) for group in state.optimizer.param_groups],
            "scheduler": {
                key: value
                for key, value in state.scheduler.state_dict().items()
                if key != "lr_lambdas"
            },
            "scaler": state.scaler.state_dict(),
            "sha256": {
                path.name: hash_file(path) for path in sorted(partial.glob("*.safetensors"))
            },
        }
        write_file(partial / "state.json", sign_json(content))


@contextmanager
def _writing_folder(final: Path, group: Group) -> Iterator[Path]:
    """Yield the folder that becomes ``final``; rank 0 makes it, and gives it its name."""
    if not group.leads:
        yield locate_temporary(final)
        return
    with whole_folder(final) as partial:
        yield partial


def is_sharded(state: TrainState) -> bool:
    """Whether each rank holds a part of every parameter, or a stage of the model."""
    return state.group.staged or any(isinstance(each, DTensor) for each in state.model.parameters())


def load_newest(folder: Path, state: TrainState, identity: str) -> list[str]:
    """Restore the newest whole checkpoint into ``state``; returns the problems of newer ones.

    A checkpoint that was being replaced when its run was killed is first put back in its place.
    Raises ``TrainingError`` if the checkpoint belongs to another job.
    """
    if state.group.leads:
        for aside in list(folder.glob(f"{ASIDE_PREFIX}*")):
            recover_folder(folder / aside.name.removeprefix(ASIDE_PREFIX))
    state.group.wait()
    problems = []
    for path in reversed(list_checkpoints(folder)):
        try:
            content = _load_verified_state(path)
        except (OSError, CacheCorrupt) as error:
            problems.append(f"checkpoint {path.name} is damaged and was skipped: {error}")
            continue
        _require_same_job(path, content, identity)
        _restore(path, content, state)
        break
    return problems


def load_step(folder: Path, step: int, state: TrainState, identity: str) -> None:
    """Restore the checkpoint of ``step`` into ``state``, whose earlier contents are dropped.

    Raises ``TrainingError`` if it is missing or damaged, or belongs to another job.
    """
    path = locate_checkpoint(folder, step)
    try:
        content = _load_verified_state(path)
    except (OSError, CacheCorrupt) as error:
        raise TrainingError(
            f"the checkpoint of step {step} cannot be restored: {error}",
            "Run the job again: it goes on from the newest whole checkpoint.",
        ) from error
    _require_same_job(path, content, identity)
    _restore(path, content, state)


def roll_back(folder: Path, state: TrainState, identity: str, factor: float = 0.5) -> Path:
    """Restore the newest whole checkpoint, multiply the rate by ``factor``, and return its path.

    The factors of several roll-backs multiply. Newer checkpoints, which are damaged, are deleted.
    Raises ``TrainingError`` if no checkpoint is whole.
    """
    # Read before the checkpoint overwrites them: it knows nothing of the roll-backs since it was
    # saved.
    rollbacks = state.progress.rollbacks + 1
    rate_factor = state.progress.learning_rate_factor * factor
    problems = load_newest(folder, state, identity)
    paths = list_checkpoints(folder)
    state.group.wait()
    if len(problems) == len(paths):
        raise TrainingError(
            f"{folder} holds no whole checkpoint to go back to.",
            "Lower train.save_steps or train.learning_rate.",
        )
    kept = len(paths) - len(problems)
    for path in paths[kept:] if state.group.leads else []:
        remove_path(path)
    scale_rates(state.scheduler, rate_factor / state.progress.learning_rate_factor)
    state.progress.rollbacks = rollbacks
    state.progress.learning_rate_factor = rate_factor
    return paths[kept - 1]


def load_weights(path: Path, state: TrainState) -> None:
    """Restore a checkpoint's weights, and the optimiser and extras that average them.

    Progress, schedule, loss scale and random state stay as they are. Call
    ``kd.optim.averaging.use_served_weights`` next: it puts averaged weights into the student where
    the job asks for them.
    """
    _restore_weights(path, _load_verified_state(path), state)


def load_trained_weights(path: Path, model: nn.Module, group: Group = ALONE) -> None:
    """Put a checkpoint's weights into ``model``, as they were trained and without averaging."""
    _copy_into(_collect_model_tensors(model), path, 0, group)


def locate_checkpoint(folder: Path, step: int) -> Path:
    """The place of the checkpoint of ``step`` in ``folder``, whether it exists or not."""
    return folder / f"step-{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in ``folder``, oldest first."""
    return sorted(folder.glob("step-*"))


def find_newest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint in ``folder``, whole or not; None if there is none."""
    return next(reversed(list_checkpoints(folder)), None)


def read_newest_identity(folder: Path) -> str | None:
    """The identity in the newest checkpoint whose state.json is whole; its tensors are not read."""
    newest = read_newest_state(folder)
    return None if newest is None else str(newest["identity"])


def read_newest_state(folder: Path) -> dict[str, Any] | None:
    """The newest state.json that is whole, with identity and progress; tensors are not read."""
    for path in reversed(list_checkpoints(folder)):
        try:
            content = verify_json((path / "state.json").read_bytes(), "state.json")
        except (OSError, CacheCorrupt):
            continue
        if {"identity", "progress"} <= content.keys():
            return dict(content)
    return None


def prune_checkpoints(folder: Path, limit: int, keep_step: int | None) -> None:
    """Delete the oldest until ``limit`` are left, but never the newest nor ``keep_step``'s."""
    paths = list_checkpoints(folder)
    kept = locate_checkpoint(folder, keep_step or 0)
    spare = [path for path in paths[:-1] if path != kept]
    for path in spare[: max(len(paths) - limit, 0)]:
        shutil.rmtree(path)


# ---------------------------------------------------------------------- tensors


def _collect_model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Each parameter once, tied ones under their first name, and persistent buffers."""
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    transient = {
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    tensors.update(
        {name: buffer for name, buffer in model.named_buffers() if name not in transient}
    )
    return tensors


def _copy_into(mine: dict[str, Tensor], path: Path, file: int, group: Group) -> None:
    """Set ``mine`` to the tensors of these names in the checkpoint ``path``.

    A checkpoint of one process has them in the file of that number, and no others.
    """
    single = path / _FILES[file]
    stored = list_tensors(single) if single.exists() else list_stored(path).keys()
    whole = single.exists() and not group.staged
    different = mine.keys() ^ stored if whole else mine.keys() - stored
    if different:
        raise TrainingError(
            f"{single if single.exists() else path} and this run differ in "
            f"{sorted(different)[:5]}.",
            "Use another run folder, or delete this one to start over.",
        )
    with torch.no_grad():
        if whole and not any(isinstance(each, DTensor) for each in mine.values()):
            for name, tensor in load_file(single).items():
                mine[name].copy_(tensor)
        elif mine:
            fill_tensors(path, mine, group)


def _name_parameters(state: TrainState) -> dict[Tensor, str]:
    """Names of all parameters that the optimiser may hold; those of an extra are {extra}/{name}."""
    names: dict[Tensor, str] = {
        parameter: name for name, parameter in state.model.named_parameters()
    }
    for extra, module in state.extras.items():
        names.update(
            {parameter: f"{extra}/{name}" for name, parameter in module.named_parameters()}
        )
    return names


def _collect_optimizer_state(state: TrainState) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the plain numbers that the optimiser keeps, each as {parameter}.{key}."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    names = _name_parameters(state)
    for parameter, values in state.optimizer.state.items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                tensors.update(_split_tensor(f"{names[parameter]}.{key}", value))
            else:
                numbers[f"{names[parameter]}.{key}"] = value
    return tensors, numbers


def _split_tensor(name: str, value: Tensor) -> dict[str, Tensor]:
    """The plain tensors of ``value``: itself, or as {name}/{part} those of a state of 8 bits."""
    if isinstance(value, DTensor) or not hasattr(value, "__tensor_flatten__"):
        return {name: value.detach()}
    parts, _ = value.__tensor_flatten__()
    return {f"{name}/{part}": getattr(value, part) for part in parts}


def _select_group_numbers(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _IMPLEMENTATION_KEYS}


def _collect_extra_tensors(extras: dict[str, nn.Module]) -> dict[str, Tensor]:
    return {
        f"{extra}/{key}": value.detach()
        for extra, module in extras.items()
        for key, value in module.state_dict().items()
    }


def _collect_random_tensors(group: Group) -> dict[str, Tensor]:
    """The states of the generators of every rank."""
    own = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        own["cuda"] = torch.cuda.get_rng_state()
    states = group.gather({name: state.tolist() for name, state in own.items()})
    return {
        _name_random_state(name, rank): torch.tensor(values, dtype=torch.uint8)
        for rank, each in enumerate(states)
        for name, values in each.items()
    }


def _name_random_state(generator: str, rank: int) -> str:
    return f"{generator}/{rank}" if rank else generator


# ---------------------------------------------------------------------- restoring


def _restore(path: Path, content: dict[str, Any], state: TrainState) -> None:
    """Put all of a checkpoint into ``state``, which may be in the middle of a step."""
    _restore_weights(path, content, state)
    _restore_scheduler(content["scheduler"], state.scheduler)
    _restore_scaler(content["scaler"], state.scaler)
    _restore_random(load_file(path / _FILES[3]), state.group.rank)
    known = {each.name for each in fields(TrainingProgress)}
    saved = TrainingProgress(
        **{key: value for key, value in content["progress"].items() if key in known}
    )
    for key in known:
        setattr(state.progress, key, getattr(saved, key))


def _restore_weights(path: Path, content: dict[str, Any], state: TrainState) -> None:
    # First, because it may refuse the checkpoint: then the model is as it was.
    _copy_into(_collect_extra_tensors(state.extras), path, 2, state.group)
    load_trained_weights(path, state.model, state.group)
    _restore_optimizer(path, content, state)


def _restore_optimizer(path: Path, content: dict[str, Any], state: TrainState) -> None:
    """Restore exactly the state that was saved, and drop all state since, for every parameter."""
    optimizer = state.optimizer
    parameters = {name: parameter for parameter, name in _name_parameters(state).items()}
    for module in (state.model, *state.extras.values()):
        module.zero_grad(set_to_none=True)
    for group, saved in zip(optimizer.param_groups, content["groups"], strict=True):
        _restore_group(group, saved)
    group_of = {
        parameter: group for group in optimizer.param_groups for parameter in group["params"]
    }
    optimizer.state.clear()
    tensors = _load_optimizer_tensors(path, parameters, state)
    for full_name, value in {**tensors, **content["optimizer"]}.items():
        name, _, key = full_name.rpartition(".")
        if name not in parameters and state.group.staged:
            continue  # another stage has it
        parameter = parameters[name]
        if isinstance(value, Tensor) and not _stays_on_host(key, group_of[parameter]):
            value = value.to(parameter.device)
        optimizer.state[parameter][key] = value
    for parameter, values in optimizer.state.items():
        _join_split_tensors(values, parameter.dtype)


def _load_optimizer_tensors(
    path: Path, parameters: dict[str, Tensor], state: TrainState
) -> dict[str, Tensor]:
    """The tensors of the optimiser's state; of sharded parameters, this rank's parts."""
    single = path / _FILES[1]
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


def _stays_on_host(key: str, group: dict[str, Any]) -> bool:
    """Whether torch keeps this state on the CPU: the step count, unless a kernel reads it."""
    return key == "step" and not (group.get("fused") or group.get("capturable"))


def _restore_group(group: dict[str, Any], saved: dict[str, Any]) -> None:
    # A later step may have added keys to the group that the checkpoint does not have.
    for key in _select_group_numbers(group).keys() - saved.keys():
        del group[key]
    for key, value in saved.items():
        # JSON turned the tuples of betas into lists.
        group[key] = tuple(value) if isinstance(value, list) else value


def _restore_scheduler(saved: dict[str, Any], scheduler: Any) -> None:
    """Restore all but ``lr_lambdas``, which are functions that the configuration determines."""
    lambdas = (
        {"lr_lambdas": [None] * len(scheduler.lr_lambdas)}
        if hasattr(scheduler, "lr_lambdas")
        else {}
    )
    scheduler.load_state_dict({**saved, **lambdas})


def _restore_scaler(saved: dict[str, Any], scaler: Any) -> None:
    if not scaler.is_enabled():
        return
    forget_unscaling(scaler)
    # A run on a device without loss scaling saved nothing.
    if saved:
        scaler.load_state_dict(saved)


def _restore_random(tensors: dict[str, Tensor], rank: int) -> None:
    """Restore this rank's generators; a rank that the checkpoint does not know keeps its seed."""
    cpu = tensors.get(_name_random_state("cpu", rank))
    cuda = tensors.get(_name_random_state("cuda", rank))
    if cpu is not None:
        torch.set_rng_state(cpu)
    if torch.cuda.is_available() and cuda is not None:
        torch.cuda.set_rng_state(cuda)


def _load_verified_state(path: Path) -> dict[str, Any]:
    """The contents of state.json. Raises ``CacheCorrupt`` where a file differs from its hash."""
    content = verify_json((path / "state.json").read_bytes(), "state.json")
    if content.get("format") != _FORMAT:
        raise TrainingError(
            f"{path} has checkpoint format {content.get('format', 1)}, but this version reads "
            f"{_FORMAT}.",
            "Finish the run with the version that began it, or delete its folder to start over.",
        )
    for name, digest in content["sha256"].items():
        if hash_file(path / name) != digest:
            raise CacheCorrupt(f"{name} differs from what was saved.")
    return content


def _require_same_job(path: Path, content: dict[str, Any], identity: str) -> None:
    if content["identity"] != identity:
        raise TrainingError(
            f"{path} was written by another job: its configuration, data or cache differ.",
            "Use another run folder, or delete this one to start over.",
        )
