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

Training resumed from a checkpoint equals training that was never stopped, bit for bit on a CPU with
the same number of threads.
"""

from __future__ import annotations

import shutil
from contextlib import nullcontext, suppress
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from cache.disk import (
    ASIDE_PREFIX,
    TEMPORARY_PREFIX,
    hash_file,
    make_folder,
    recover_folder,
    remove_path,
    write_file,
)
from cache.errors import CacheCorrupt
from cache.json_object import Json
from cache.manifest import sign_json, verify_json
from kd.buckets.runs import StoredRun
from kd.errors import TrainingError
from kd.files import locate_temporary, whole_folder
from kd.optim.schedules import scale_rates
from kd.parallel.group import Group
from kd.parallel.sharded_files import get_own, write_shards
from kd.progress import replace_nonfinite
from kd.training.saved.restoring import FILES, restore, restore_weights
from kd.training.saved.state import SavedState, TrainState, is_sharded
from kd.training.saved.state_file import FORMAT, STATE, read_state
from kd.training.saved.tensor_file import write_tensors
from kd.training.saved.tensors import (
    collect_extra_tensors,
    collect_model_tensors,
    collect_optimizer_state,
    collect_random_tensors,
    select_group_numbers,
)


class Snapshot(NamedTuple):
    """What a checkpoint of ``step`` will hold.

    ``files`` are tensors by file, of rank 0; ``parts`` are those of which each rank writes its own
    parts, or None. ``content`` is that of state.json, without the hashes.
    """

    step: int
    files: dict[str, dict[str, Tensor]]
    parts: dict[str, Tensor] | None
    content: Json

    @property
    def size(self) -> int:
        """Bytes of the tensors that this rank holds."""
        return sum(get_own(each).nbytes for each in self._list_tensors())

    def copy_to_host(self, kept: dict[str, Tensor]) -> Snapshot:
        """Copy all tensors into this machine's memory, so that training may go on.

        ``kept`` are the tensors of the last copy, which are used again: new memory is slow.
        """

        def copy(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: _copy_to_host(name, each, kept) for name, each in tensors.items()}

        files = {name: copy(tensors) for name, tensors in self.files.items()}
        return self._replace(files=files, parts=self.parts and copy(self.parts))

    def _list_tensors(self) -> list[Tensor]:
        groups = [*self.files.values(), self.parts or {}]
        return [tensor for tensors in groups for tensor in tensors.values()]


def _copy_to_host(name: str, tensor: Tensor, kept: dict[str, Tensor]) -> Tensor:
    old = kept.get(name)
    if old is not None and (old.shape, old.dtype) == (tensor.shape, tensor.dtype):
        get_own(old).copy_(get_own(tensor))
    else:
        kept[name] = tensor.to("cpu", copy=True)
    return kept[name]


def save_checkpoint(folder: Path, state: TrainState, identity: str) -> Path:
    """Write a checkpoint of ``state`` into ``folder``, and return its path.

    Only a job of the same ``identity`` may resume from it. All ranks call it, and return when it is
    written.
    """
    return write_snapshot(folder, take_snapshot(state, identity), state.group)


def take_snapshot(state: TrainState, identity: str) -> Snapshot:
    """Collect what a checkpoint holds; its tensors are those of ``state``. All ranks call it."""
    random = collect_random_tensors(state.group)
    tensors, numbers = collect_optimizer_state(state)
    if state.group.staged:
        numbers = {
            name: each for stage in state.group.gather(numbers) for name, each in stage.items()
        }
    model, extras = collect_model_tensors(state.model), collect_extra_tensors(state.extras)
    parts = model | tensors | extras if is_sharded(state) else None
    whole = {} if parts is not None else dict(zip(FILES, (model, tensors, extras), strict=False))
    schedule = state.scheduler.state_dict()
    content = {
        "format": FORMAT,
        "identity": identity,
        "progress": replace_nonfinite(asdict(state.progress)),
        "optimizer": numbers,
        "groups": [select_group_numbers(group) for group in state.optimizer.param_groups],
        "scheduler": {key: schedule[key] for key in schedule if key != "lr_lambdas"},
        "scaler": state.scaler.state_dict(),
    }
    files = whole | {FILES[3]: random} if state.group.leads else {}
    return Snapshot(state.progress.step, files, parts, deepcopy(content))


def write_snapshot(folder: Path, snapshot: Snapshot, group: Group) -> Path:
    """Write ``snapshot`` into ``folder``, as ``save_checkpoint`` does."""
    final = locate_checkpoint(folder, snapshot.step)
    # Rank 0 makes the folder, and gives it its name.
    with whole_folder(final) if group.leads else nullcontext(locate_temporary(final)) as partial:
        _write_tensors(partial, snapshot, group)
        if group.leads:
            content = snapshot.content | {"sha256": _hash_files(partial)}
            write_file(partial / STATE, sign_json(content))
    group.wait()
    return final


def put_snapshot(
    folder: Path, snapshot: Snapshot, group: Group, run: StoredRun, history: bytes
) -> None:
    """Put ``snapshot`` into the bucket of the run: each host its files, and rank 0 state.json last.

    ``folder`` is that of this host, which no other sees; nothing is left there. ``history`` is
    that of the run so far. Raises ``StoreError``.
    """
    place = folder / f"{TEMPORARY_PREFIX}put"
    partial = locate_checkpoint(place, snapshot.step)
    if group.leads_host:
        remove_path(place)
        make_folder(partial)
    try:
        _write_tensors(partial, snapshot, group)
        hashes = group.gather(_hash_files(partial) if group.leads_host else {})
        together = {name: digest for each in hashes for name, digest in each.items()}
        state = group.share(sign_json(snapshot.content | {"sha256": together}).decode())
        if group.leads_host:
            write_file(partial / STATE, state.encode())
            run.put_parts(partial)
        group.wait()
        if group.leads:
            run.complete_checkpoint(partial, history)
        group.wait()
    finally:
        if group.leads_host:
            remove_path(place)


def _write_tensors(folder: Path, snapshot: Snapshot, group: Group) -> None:
    if snapshot.parts is not None:
        group.wait()  # until the folder is there
        write_shards(folder, snapshot.parts, group)
    for name, tensors in snapshot.files.items():
        write_tensors(folder / name, tensors)


def _hash_files(folder: Path) -> dict[str, str]:
    return {path.name: hash_file(path) for path in sorted(folder.glob("[!.]*.safetensors"))}


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
            saved = _load_verified_state(path)
        except (OSError, CacheCorrupt) as error:
            # An older one is taken at once, so nobody has to do anything.
            why = error.detail if isinstance(error, CacheCorrupt) else str(error)
            problems.append(f"checkpoint {path.name} is damaged and was skipped: {why}")
            continue
        if saved.identity != identity:
            raise TrainingError(
                f"{path} was written by another job: its configuration, data or cache differ.",
                "Give the job another name (or --run-dir), or delete this run folder to start "
                "over.",
            )
        restore(path, saved, state)
        break
    return problems


def roll_back(folder: Path, state: TrainState, identity: str) -> Path:
    """Restore the newest whole checkpoint, halve the rate, and return its path.

    Newer checkpoints, which are damaged, are deleted.
    Raises ``TrainingError`` if no checkpoint is whole.
    """
    # Read before the checkpoint overwrites them: it knows nothing of the roll-backs since it was
    # saved.
    rollbacks = state.progress.rollbacks + 1
    rate_factor = state.progress.learning_rate_factor * 0.5
    problems = load_newest(folder, state, identity)
    paths = list_checkpoints(folder)
    state.group.wait()
    if len(problems) == len(paths):
        detail = f"{folder} holds no whole checkpoint to go back to."
        raise TrainingError(detail, "Lower train.save_steps or train.learning_rate.")
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
    restore_weights(path, _load_verified_state(path), state)


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
    return None if newest is None else newest.identity


def read_newest_state(folder: Path) -> SavedState | None:
    """The newest state.json that is whole; tensors are not read."""
    for path in reversed(list_checkpoints(folder)):
        with suppress(OSError, CacheCorrupt, KeyError):
            return SavedState.from_json(verify_json((path / STATE).read_bytes(), STATE))
    return None


def read_best_step(folder: Path) -> int | None:
    """The step of the best evaluation so far, by the newest state.json that is whole."""
    newest = read_newest_state(folder)
    return None if newest is None else newest.progress.best_step


def prune_checkpoints(folder: Path, limit: int, keep_step: int | None) -> None:
    """Delete the oldest until ``limit`` are left, but never the newest nor ``keep_step``'s."""
    paths = list_checkpoints(folder)
    kept = locate_checkpoint(folder, keep_step or 0)
    spare = [path for path in paths[:-1] if path != kept]
    for path in spare[: max(len(paths) - limit, 0)]:
        shutil.rmtree(path)


def _load_verified_state(path: Path) -> SavedState:
    """The contents of state.json. Raises ``CacheCorrupt`` where a file differs from its hash."""
    saved = SavedState.from_json(read_state(path))
    for name, digest in saved.sha256.items():
        if hash_file(path / name) != digest:
            detail = f"{name} differs from what was saved."
            raise CacheCorrupt(detail, "Delete the checkpoint: an older one is taken.")
    return saved
