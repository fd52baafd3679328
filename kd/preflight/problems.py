"""Is this job all right? ``find_problems`` lists every check that a job passes before it runs.

    configuration   always
    folders         with ``Folders``: what the job names must be allowed, and must be there; for
                    ``kd validate`` and ``kd run`` also what opening the files shows
    machine         with ``Machine``: what is installed, and what the device can compute

``kd validate``, ``kd run``, ``POST /jobs``, a worker's process and each stage of the pipeline call
it, each with what it can see. Two more checks need more than a job, and raise errors of other
classes: whether a run folder belongs to another job (kd/training/resume/identity.py), and whether
teacher and student fit once they are loaded (kd/pipeline.py).

Imports no torch, because the API and the terminal import it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kd.buckets.inputs import avoiding_buckets
from kd.config.extras import find_missing_extras, find_missing_harness
from kd.config.job import JobConfig
from kd.config.routing.parts import list_members
from kd.config.train import SHARDED, TrainConfig
from kd.errors import ConfigError, Problem
from kd.parallel.limits import list_unsharded_fields, list_unstaged_fields
from kd.parallel.variables import CPU, DEVICES_VARIABLE, split_names
from kd.preflight import teacher_checks, validate
from kd.preflight.confinement import find_confinement_problems
from kd.preflight.first_look import find_first_problems
from kd.preflight.learned_rows import Show, find_row_problems, hide_row
from kd.preflight.limits import Confinement
from kd.preflight.named_paths import find_url_problems
from kd.progress import Notice, ignore_notice
from kd.search.space import find_space_problems

if TYPE_CHECKING:
    import torch

_OFFLOAD_WITHOUT_GPU = Problem(
    "/train/activation_offload",
    "it moves activations from a GPU to the host's memory, but the device of this run is cpu.",
    "Set it to false; train.gradient_checkpointing needs less memory on a CPU too.",
)


@dataclass(frozen=True)
class Folders:
    """The folders in which the names of a job are looked up.

    ``root``: relative paths are resolved against it. ``home``: the data folder, with the caches;
    None = no file is looked at, only ``limits``. ``limits``: what the job may name; None =
    anything. ``opened``: whether files are opened too, and the hub is asked: this takes seconds.
    ``asked``: whether buckets are asked for what the job names in them: one may not answer.
    ``note`` receives what opening the files shows that is no problem, but worth knowing,
    ``show`` what is learned of some rows.
    """

    root: Path
    home: Path | None
    limits: Confinement | None = None
    opened: bool = False
    asked: bool = True
    note: Callable[[Notice], None] = ignore_notice
    show: Show = hide_row


@dataclass(frozen=True)
class Machine:
    """The machine that runs the job, as a process on it sees it.

    ``trains``: whether it trains a student, and does not only measure one. ``device``: where it
    computes; None = not checked.
    """

    trains: bool = True
    device: torch.device | None = None


def find_problems(
    config: JobConfig, folders: Folders | None = None, machine: Machine | None = None
) -> list[Problem]:
    """Return everything that is wrong with ``config``, as far as the arguments show it.

    Of a job with several teachers each ordinary job is checked (``kd.config.routing.parts``).
    """
    found = [
        replace(problem, pointer=member.locate(problem.pointer))
        for member in list_members(config)
        for problem in _find_own_problems(member.job, folders, machine)
    ]
    return list(dict.fromkeys(found))


def _find_own_problems(
    config: JobConfig, folders: Folders | None, machine: Machine | None
) -> list[Problem]:
    """Return what is wrong with a job of one teacher."""
    found = [
        *find_space_problems(config),
        *_find_evaluation_problems(config),
        *_find_resource_problems(config),
    ]
    if folders is not None:
        with nullcontext() if folders.asked else avoiding_buckets():
            found += _find_folder_problems(config, folders)
    if machine is not None:
        found += find_missing_extras(config) if machine.trains else find_missing_harness(config)
        teacher = config.active_teacher
        found += [] if teacher is None else teacher_checks.find_missing_readers(teacher)
        found += _find_device_problems(config, machine.device)
        looks = folders is not None and folders.home is not None and folders.asked
        if teacher is not None and folders is not None and looks:
            found += teacher_checks.find_unreadable_weights(teacher, folders.root)
    return found


def require_no_problems(
    config: JobConfig, folders: Folders | None = None, machine: Machine | None = None
) -> None:
    """Raise ``ConfigError`` with every problem that ``find_problems`` finds, if there are any."""
    if problems := find_problems(config, folders, machine):
        raise ConfigError(problems)


def _find_folder_problems(config: JobConfig, folders: Folders) -> list[Problem]:
    # These come first, and no others for their fields: other checks would speak of files.
    urls = list(find_url_problems(config))
    named = {problem.pointer for problem in urls}
    if folders.limits is not None:
        # Where a job names what it may not read, nothing is looked up: the answer would show what
        # is there.
        refused = find_confinement_problems(config, folders.root, folders.limits)
        if refused:
            return [*urls, *(each for each in refused if each.pointer not in named)]
    if folders.home is None:
        return urls
    looked_up = list[Problem]()
    # The tokenizer of a server's teacher is read also by a job that does not ask the server.
    teacher = config.active_teacher or config.served_teacher
    if teacher is not None:
        # A sealed cache fixes the length of its sequences.
        is_open = config.active_teacher is not None and config.cache.fingerprint is None
        length = teacher.count_read(config.data.sequence_length) if is_open else None
        looked_up += teacher_checks.find_teacher_problems(
            teacher, folders.root, config.cuts_teacher, length
        )
        if not teacher.is_local and is_open and config.cache.rules.needs_lm_head:
            looked_up += teacher_checks.find_missing_head(teacher, folders.root)
    looked_up += [
        *validate.find_student_problems(config, folders.root),
        *validate.find_text_problems(config, folders.root, folders.note),
        *validate.find_cache_problems(config, folders.home),
        *validate.find_extension_problems(config, folders.home),
        *validate.find_disk_problems(folders.home, config.cache.store),
    ]
    found = [*urls, *(each for each in looked_up if each.pointer not in named)]
    # The rows come first: they are shown before torch is imported, which takes many seconds.
    if folders.opened and not found:
        found += find_row_problems(config, folders.root, folders.note, folders.show)
    if folders.opened and not found:
        found += find_first_problems(config, folders.root, folders.home, folders.note)
    return found


def _find_evaluation_problems(config: JobConfig) -> Iterator[Problem]:
    """Find what the evaluation section needs and the job does not have.

    ``JobConfig`` refuses such a job when it is read. The check is repeated because ``kd eval``
    replaces the student and the train section of a job by those of a run.
    """
    wanted = config.evaluation
    why = config.explain_no_local_teacher()
    if wanted.teacher and why is not None:
        detail = f"it needs a teacher that runs on this machine, but {why}."
        remedy = "Name its folder in teacher.model, or set evaluation.teacher to false."
        yield Problem("/evaluation/teacher", detail, remedy)
    if wanted.baseline and (config.student is None or config.train is None):
        detail = "a baseline is trained, but the job has no student or no train section."
        remedy = "Give both, or set evaluation.baseline to false."
        yield Problem("/evaluation/baseline", detail, remedy)


def _find_resource_problems(config: JobConfig) -> Iterator[Problem]:
    """Refuse devices that the job could not use, and work that they cannot share equally."""
    devices, each = config.resources.devices, config.resources.gpus or 1
    teacher = config.captured_teacher
    parallel = "none" if teacher is None else teacher.parallel
    is_shared = teacher is not None and teacher.is_shared
    if config.resources.workers != 1 and is_shared:
        yield Problem(
            "/resources/workers",
            f"the processes of teacher.parallel {parallel} capture together, and no other worker "
            f"can help them, but workers is {config.resources.workers}.",
            "Set it to 1, or set teacher.parallel to none or device_map.",
        )
    if devices == 1 and is_shared:
        detail = f"{parallel} shares the teacher among several devices, but the job has one."
        remedy = "Set resources.gpus to 2 or more, or set this field to device_map."
        yield Problem("/teacher/parallel", detail, remedy)
    elif devices > 1 and (config.train is None or "train" not in config.own_kind.needs):
        if parallel == "none":
            yield Problem(
                "/resources/gpus",
                f"it asks for {devices} devices, but only a training uses more than one, or a "
                "teacher that is spread (teacher.parallel).",
                "Set it to 1, or submit several jobs: each worker runs one on a device of its own.",
            )
    elif devices > 1 and config.train is not None:
        for hosts in config.resources.host_counts:
            if found := list(_find_training_problems(config, config.train, hosts * each)):
                yield from found
                return


def _find_training_problems(
    config: JobConfig, train: TrainConfig, devices: int
) -> Iterator[Problem]:
    if train.strategy == "single":
        # The devices may be only for the teacher.
        teacher = config.captured_teacher
        if teacher is None or teacher.parallel == "none":
            yield Problem(
                "/train/strategy",
                f"single uses one device, but resources.gpus asks for {devices}.",
                "Set it to auto, ddp, fsdp or pipeline, or resources.gpus to 1.",
            )
    elif train.strategy == "pipeline":
        yield from _find_stage_problems(config, train, devices)
    elif (sequences := train.batch_size * train.gradient_accumulation_steps) % devices:
        yield Problem(
            "/train/batch_size",
            f"a step has {sequences} sequences (batch_size {train.batch_size} x "
            f"gradient_accumulation_steps {train.gradient_accumulation_steps}), which {devices} "
            "devices cannot share equally.",
            f"Make the product a multiple of {devices}, or change resources.gpus.",
        )
    elif train.strategy in SHARDED:
        # What cannot be done where each device holds a part of every parameter.
        remedy = "Change it, or set train.strategy to ddp."
        for name, why in list_unsharded_fields(train):
            yield Problem(
                f"/train/{name}", f"train.strategy is {train.strategy}, but {why}.", remedy
            )
        if config.loss.looks_ahead:
            mode = getattr(config.loss.temperature, "mode", "")
            detail = (
                f"train.strategy is {train.strategy}, but {mode} needs gradients of whole weights."
            )
            yield Problem("/loss/temperature/mode", detail, remedy)


def _find_stage_problems(config: JobConfig, train: TrainConfig, devices: int) -> Iterator[Problem]:
    """Refuse fewer micro-batches than stages, and what stages cannot do."""
    count = train.gradient_accumulation_steps
    if count < devices:
        yield Problem(
            "/train/gradient_accumulation_steps",
            f"train.strategy is pipeline, which needs a micro-batch for each of {devices} stages, "
            f"but a step has {count}.",
            f"Set it to {devices} or more, with a smaller train.batch_size.",
        )
    remedy = "Change it, or set train.strategy to ddp or fsdp."
    for pointer, why in list_unstaged_fields(config, train):
        yield Problem(pointer, f"train.strategy is pipeline, but {why}.", remedy)


def _find_device_problems(config: JobConfig, device: torch.device | None) -> list[Problem]:
    """Find what ``device`` or the student's base does not have, before a capture."""
    if device is None:
        return []
    wanted = config.resources.gpus or 0
    # As for a worker, one CPU is none of the devices that a job asks for.
    cpus = split_names(os.environ.get(DEVICES_VARIABLE, "")).count(CPU)
    if wanted and cpus < 2 and device.type == "cpu":
        detail = f"it asks for {wanted} GPU(s), but torch sees none on this machine."
        remedy = "Leave it out: then a CPU runs it. KD_DEVICES=cpu,cpu makes two devices of a CPU."
        return [Problem("/resources/gpus", detail, remedy)]
    if device.type == "cpu" and config.train is not None and config.train.activation_offload:
        return [_OFFLOAD_WITHOUT_GPU, *_find_compute_problems(config, device)]
    return _find_compute_problems(config, device)


def _find_compute_problems(config: JobConfig, device: torch.device) -> list[Problem]:
    # This imports torch, which a caller that has a device has imported already.
    from kd.models.precision import Precision, require_quantization
    from kd.models.products.float8 import require_float8
    from kd.parallel.devices import count_ranks

    teacher = config.active_teacher
    try:
        count_ranks(config)
        if teacher is not None and teacher.quantization:
            require_quantization(teacher.quantization, device)
        if config.train is None:
            return []
        if config.train.fp8:
            require_float8(device)
        precision = Precision.choose(config.train.precision, device)
    except ConfigError as error:
        return error.problems
    if config.train.strategy == "pipeline" and precision.scales_loss:
        detail = (
            f"train.strategy is pipeline, but {config.train.precision} means fp16 on this device, "
            "which scales gradients of all stages alike."
        )
        return [Problem("/train/precision", detail, "Set it to fp32, or train.strategy to ddp.")]
    if config.train.fsdp_offload and precision.scales_loss:
        detail = (
            "the loss scale of fp16, which this job trains in, is on the GPU, but its gradients "
            "would lie on the host."
        )
        remedy = "Set train.precision to fp32, or train.fsdp_offload to false."
        return [Problem("/train/fsdp_offload", detail, remedy)]
    lora = None if config.student is None else config.student.lora
    if lora is not None and lora.base == "bfloat16" and precision.name != "bf16":
        detail = (
            f"bfloat16 needs products in bfloat16, but train.precision is "
            f"{config.train.precision}, which means {precision.name} on this device."
        )
        remedy = "Set train.precision to bf16, or student.lora.base to float32."
        return [Problem("/student/lora/base", detail, remedy)]
    return []
