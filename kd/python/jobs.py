"""Make a job of a file or a mapping and of the settings of a call."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kd.config.job import JobConfig
from kd.config.jobfile import apply_overrides, parse_config, read_job_file, set_value
from kd.errors import ConfigError, Problem

#: A name, or a folder or file.
Named = str | os.PathLike[str]


def load_job(job: Named | Mapping[str, Any] | JobConfig, **settings: Any) -> JobConfig:
    """Read a job, change some of its settings, and check it.

    ``job`` is the path of a YAML or JSON file, a mapping with the same keys, or a job. Settings are
    sections, ``train={"max_steps": 10}``, which change the given keys alone; or dotted names,
    ``set={"train.max_steps": 10}``. ``kd.run_job`` runs the job.

    Raises ``ConfigError``, which lists everything that is wrong, with the path of each key.
    """
    if isinstance(job, str | os.PathLike):
        data = read_job_file(Path(job))
    elif isinstance(job, JobConfig):
        data = job.model_dump(mode="json", exclude_unset=True)
    else:
        data = job
    return parse_config(apply_settings(data, settings))


def make_job(
    data: Mapping[str, Any], settings: Mapping[str, Any], prefix: str | None = None
) -> JobConfig:
    """Make the job of a call: ``data`` from its arguments, then its settings.

    A job that trains and does not say how long takes one pass over the text. Without a name it gets
    one, ``prefix`` (default its kind) and a digest of everything in it, so that equal calls use the
    same run folder and different calls do not.
    """
    job = apply_settings(data, settings)
    train = job.get("train")
    if "student" in job and (train is None or isinstance(train, Mapping)):
        job["train"] = dict(train or {})
        if not {"max_steps", "epochs"} & job["train"].keys():
            job["train"]["epochs"] = 1
    if "name" not in job:
        text = json.dumps(job, sort_keys=True, default=str)
        job["name"] = f"{prefix or job['kind']}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    return parse_config(job)


def apply_settings(data: Any, settings: Mapping[str, Any]) -> Any:
    """Return ``data`` with the sections of ``settings`` merged in, and then those under ``set``."""
    sections = {name: value for name, value in settings.items() if name != "set"}
    merged = merge_sections(make_plain(data), make_plain(sections)) if sections else data
    overrides = settings.get("set") or {}
    if isinstance(overrides, Mapping):
        for name, value in overrides.items():
            merged = set_value(merged, str(name).split("."), make_plain(value))
        return make_plain(merged)
    if isinstance(overrides, str) or not isinstance(overrides, Iterable):
        detail = f"set must be a mapping of dotted names, but got {overrides!r}."
        raise ConfigError([Problem("", detail, 'Example: set={"train.max_steps": 10}')])
    return make_plain(apply_overrides(merged, overrides))


def merge_sections(data: Any, changes: Mapping[str, Any]) -> Any:
    """Return ``data`` with ``changes``: in sections the given keys alone are replaced."""
    if not isinstance(data, Mapping):
        return data  # no job: ``parse_config`` says so
    merged = dict(data)
    for key, value in changes.items():
        inner = merged.get(key)
        both = isinstance(inner, Mapping) and isinstance(value, Mapping)
        merged[key] = merge_sections(inner, value) if both else value
    return merged


def make_plain(value: Any) -> Any:
    """Return ``value`` with text in place of paths, as a YAML file has them."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {key: make_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [make_plain(item) for item in value]
    return value
