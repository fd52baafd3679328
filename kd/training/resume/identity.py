"""Which job may resume from a checkpoint, and an early error for one that may not."""

from __future__ import annotations

import hashlib
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from cache.json_object import Json
from kd.capture.codec_identity import make_codec_identity
from kd.config.fields.removed import restore_removed
from kd.config.job import JobConfig
from kd.config.jobfile import read_record
from kd.errors import ConfigError, TrainingError
from kd.files import read_json
from kd.training import checkpoint

#: Fields of the train section that have no influence on the weights.
FREE_FIELDS = {
    "logging_steps", "save_steps", "save_total_limit", "report_to", "save_dtype",
    "dataloader_num_workers", "activation_offload", "strategy", "fsdp_offload",
}  # fmt: skip
#: Fields of the teacher section that shape its records alone, and a cache's identity has them.
TEACHER_FREE_FIELDS = (
    "parallel", "gpu_memory", "host_memory", "system", "context", "max_length", "proposal",
)  # fmt: skip
#: Fields that are newer than the first checkpoints, with the values that mean what was done before
#: they existed: then a checkpoint's identity does not have them.
NEWER_FIELDS: dict[str, float | None] = {
    "lm_head_floor": 0.0,
    "dropout": None,
    "fp8": False,
}
#: Fields that a longer run may change, and those that it may change where its schedule restarts.
LENGTH_FIELDS = frozenset({"max_steps", "epochs", "eval_steps", "early_stopping_patience"})
RATE_FIELDS = frozenset(
    {"learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"}
)
#: The rule by which windows are chosen. A run that began by another rule would read some sequences
#: of its epoch twice and others never.
WINDOWS = "windows by decoded bytes"


@dataclass(frozen=True)
class RunIdentity:
    """The digests by which a job finds the checkpoints from which it may go on.

    A checkpoint of the job itself has ``own``. One of a shorter run has the digest in ``shared``
    for the job's ``resume.schedule``: it leaves out what the longer run may change, which is the
    length, and with ``restart`` the learning rate.
    """

    own: str
    shared: dict[str, str]

    @classmethod
    def of(cls, config: JobConfig, source_identity: str) -> RunIdentity:
        """Compute the digests of a job that trains on the source of this identity."""
        rates = LENGTH_FIELDS | RATE_FIELDS
        free = {"extend": LENGTH_FIELDS, "constant": LENGTH_FIELDS, "restart": rates}
        alone = config.model_copy(update={"resume": None})
        shared = {
            schedule: compute_resume_identity(alone, source_identity, fields)
            for schedule, fields in free.items()
        }
        return cls(compute_resume_identity(config, source_identity), shared)


def compute_resume_identity(
    config: JobConfig, source_identity: str, free: Set[str] = frozenset()
) -> str:
    """A digest of everything that shapes the weights, but for the train section's fields ``free``.

    A job may resume from a checkpoint of the same identity.
    """
    train = config.require_train()
    # A field whose value means what was done before it existed is left out.
    # The state of the control variate in a checkpoint tells whether the run has one.
    unset: dict[str, Any] = {"loss": {"tail_control"}}
    if config.loss.balance == "tokens":
        unset["loss"].add("balance")
    if config.loss.router_balance is None:
        unset["loss"].add("router_balance")
    if config.loss.tokenizers == "same":
        unset["loss"].add("tokenizers")
    lora = None if config.student is None else config.student.lora
    if lora is not None and lora.base == "float32":
        unset["student"] = {"lora": {"base"}}
    unused = {name for name, value in NEWER_FIELDS.items() if getattr(train, name) == value}
    sections = config.model_dump(mode="json", include=_list_shaping_sections(config), exclude=unset)
    if teacher := sections.get("teacher"):
        for name in TEACHER_FREE_FIELDS:
            del teacher[name]
        if teacher["quantization"] is None:
            del teacher["quantization"]
    options = restore_removed(train.model_dump(mode="json"), "train.")
    for name in (FREE_FIELDS | unused | free) & options.keys():
        del options[name]
    content = [
        *(
            TypeAdapter(Json).dump_json(each).decode()
            for each in (restore_removed(sections), options)
        ),
        source_identity,
    ]
    if train.order == "windows":
        content.append(WINDOWS)
    if config.resume is not None:
        content.append(f"resume by {config.resume.schedule}")
    return hashlib.sha256("\n".join(content).encode()).hexdigest()


def require_same_job(config: JobConfig, run_dir: Path) -> None:
    """Raise ``TrainingError`` if ``run_dir`` is known to hold checkpoints of another job.

    It is known where the newest checkpoint was written with the folder's config.json and
    cache.json. Differences that only the text or the teacher show are found by
    ``kd.training.checkpoint``.
    """
    # Before the capture, which may take days. Without one, the checkpoint itself is read soon
    # enough.
    if config.train is None or not config.needs_cache:
        return
    earlier = _load_earlier_job(run_dir)
    if earlier is None or earlier.train is None:
        return
    # The fields in which a longer run may differ from the one that it continues.
    may_change: Set[str] = frozenset()
    if config.resume is not None:
        rates = RATE_FIELDS if config.resume.schedule == "restart" else frozenset[str]()
        may_change = LENGTH_FIELDS | rates
    free = {f"train.{name}" for name in may_change}
    changed = [
        *_list_changed_fields(_dump_shaping_fields(earlier), _dump_shaping_fields(config)),
        *_list_changed_capture_fields(earlier, config),
    ]
    if fields := [name for name in changed if ".".join(name.split(".")[:2]) not in free]:
        raise TrainingError(
            f"{run_dir} holds checkpoints of another job, from which this one differs in "
            f"{', '.join(fields)}.",
            f"Give another run folder (--run-dir) or another name, or delete {run_dir} to start "
            "over. The section resume continues a finished run for more steps.",
        )


def _load_earlier_job(run_dir: Path) -> JobConfig | None:
    """The job that wrote the newest checkpoint in ``run_dir``; None where that is not known."""
    written_by = checkpoint.read_newest_identity(run_dir / "checkpoints")
    if written_by is None:
        return None
    try:
        config = read_record(read_json(run_dir / "config.json"))
        captured = read_json(run_dir / "cache.json") or {}
    except (ConfigError, ValueError):
        # Missing, damaged, or written by another version.
        return None
    source_identity = config.cache.fingerprint or captured.get("join", captured.get("fingerprint"))
    if config.train is None or compute_resume_identity(config, str(source_identity)) != written_by:
        return None
    return config


def _list_shaping_sections(config: JobConfig) -> set[str]:
    # Layers of the teacher become the student: then another teacher makes other weights.
    cut_from_teacher = config.student is not None and config.student.from_teacher is not None
    return {"student", "loss"} | ({"teacher"} if cut_from_teacher else set())


def _dump_shaping_fields(config: JobConfig) -> Json:
    free = dict.fromkeys(FREE_FIELDS, True)
    return config.model_dump(
        mode="json", include={*_list_shaping_sections(config), "train"}, exclude={"train": free}
    )


def _list_changed_capture_fields(earlier: JobConfig, config: JobConfig) -> list[str]:
    """The changed fields that make another cache, for any text and teacher."""
    if earlier.cache.fingerprint is not None or config.cache.fingerprint is not None:
        return []
    cut = {"data": {"sequence_length": True, "packing": True}}
    # Whether entropies are kept follows from the loss, which is compared whole.
    same = make_codec_identity(earlier.cache) == make_codec_identity(config.cache)
    kept = cut if same else cut | {"cache": True}
    return _list_changed_fields(
        earlier.model_dump(mode="json", include=kept), config.model_dump(mode="json", include=kept)
    )


def _list_changed_fields(before: Any, now: Any, name: str = "") -> list[str]:
    """The dotted names of the fields that differ."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return [] if before == now else [name]
    return [
        each
        for key in dict.fromkeys([*before, *now])
        for each in _list_changed_fields(before.get(key), now.get(key), f"{name}.{key}".lstrip("."))
    ]
