"""Which job may go on from a checkpoint, and a word before the capture to one that may not."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from kd import checkpoint
from kd.config.job import JobConfig
from kd.errors import ConfigError, TrainingError
from kd.estimate import codec_identity
from kd.files import read_json
from kd.jobfile import parse_config

#: What of the train section does not shape the weights.
FREE = {
    "logging_steps", "save_steps", "save_total_limit", "report_to", "trace_steps", "dataloader_num_workers",
    "dataloader_prefetch_factor", "dataloader_pin_memory", "save_dtype",
}  # fmt: skip


def resume_identity(config: JobConfig, source_identity: str) -> str:
    """What must be equal for a checkpoint to be resumed: all that shapes the weights, and nothing that does not."""
    assert config.train is not None, "JobConfig refuses a training job without a train section"
    content = [
        config.model_dump_json(include=_sections(config)),
        config.train.model_dump_json(exclude=FREE),
        source_identity,
    ]
    return hashlib.sha256("\n".join(content).encode()).hexdigest()


def require_same_job(config: JobConfig, run_dir: Path) -> None:
    """Raise ``TrainingError`` if ``run_dir`` is known to hold checkpoints from which ``config`` may not go on.

    It is known where the folder's config.json and cache.json are those that the newest checkpoint was written with.
    Whatever only reading text or teacher can tell is left to ``kd.checkpoint``.
    """
    earlier = _earlier(run_dir) if config.train is not None and config.needs_cache else None
    if earlier is None or earlier.train is None:
        return
    if fields := [*_changed(_shaping(earlier), _shaping(config)), *_changed_capture(earlier, config)]:
        raise TrainingError(
            f"{run_dir} holds checkpoints of another job, from which this one differs in {', '.join(fields)}.",
            f"Give another run folder (--run-dir) or another name, or delete {run_dir} to start over.",
        )


def _earlier(run_dir: Path) -> JobConfig | None:
    """The job that wrote the newest checkpoint in ``run_dir``; None where there is none, or where it is not sure."""
    written_by = checkpoint.newest_identity(run_dir / "checkpoints")
    if written_by is None:
        return None
    try:
        config, captured = parse_config(read_json(run_dir / "config.json")), read_json(run_dir / "cache.json") or {}
    except (ConfigError, ValueError):  # missing, damaged, or of another version
        return None
    source_identity = config.cache.fingerprint or captured.get("fingerprint")
    if config.train is None or resume_identity(config, str(source_identity)) != written_by:
        return None
    return config


def _sections(config: JobConfig) -> set[str]:
    cut_from_teacher = config.student is not None and config.student.from_teacher is not None
    return {"student", "loss"} | ({"teacher"} if cut_from_teacher else set())


def _shaping(config: JobConfig) -> dict[str, Any]:
    free = dict.fromkeys(FREE, True)
    return config.model_dump(mode="json", include={*_sections(config), "train"}, exclude={"train": free})


def _changed_capture(earlier: JobConfig, config: JobConfig) -> list[str]:
    """The fields that make another cache of whatever text and teacher."""
    if earlier.cache.fingerprint is not None or config.cache.fingerprint is not None:
        return []
    cut = {"data": {"sequence_length": True, "packing": True}}
    same = codec_identity(earlier.cache) == codec_identity(config.cache)
    kept = cut if same else cut | {"cache": True}
    return _changed(earlier.model_dump(mode="json", include=kept), config.model_dump(mode="json", include=kept))


def _changed(before: Any, now: Any, name: str = "") -> list[str]:
    """The dotted names of all that differs."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return [] if before == now else [name]
    names = dict.fromkeys([*before, *now])
    return [each for key in names for each in _changed(before.get(key), now.get(key), f"{name}.{key}".lstrip("."))]
