"""Jobs as earlier versions have written them: an absent field keeps the meaning that it had then.

A record holds every field of its version. What it lacks is newer than it, and was done as the table
says, which a default of today may not do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kd.config.job import JobConfig
from kd.config.jobfile import parse_config

#: What was done before a field existed, where its default does something else.
MEANT_BEFORE: dict[str, dict[str, Any]] = {
    "train": {"lm_head_floor": 0.0},
    "loss": {"tail_control": False},
    "evaluation": {"samples": 0, "continuations": 0},
    "checks": {
        "max_skipped": 0, "exploding_norm": 0.0, "vanishing_norm": 0.0, "dead_activation": 0.0,
    },
}  # fmt: skip


def fill_record(written: Any) -> Any:
    """Return the JSON of a job's record with the fields that it lacks, as they were meant."""
    if not isinstance(written, dict):
        return written
    before = {
        section: meant | written[section]
        for section, meant in MEANT_BEFORE.items()
        if isinstance(written.get(section), dict)
    }
    return written | before


def read_record(written: Any) -> JobConfig:
    """Return the job of a record; raises ``ConfigError`` as ``parse_config`` does."""
    return parse_config(fill_record(written))


def keep_meaning(config: JobConfig, written: Mapping[str, Any]) -> JobConfig:
    """Return ``config``, which continues the run of the record ``written``, as was meant there.

    A field that the record lacks, or that a continued run has kept so, is taken from it where
    ``config`` leaves it open.
    """
    changes = {}
    filled = fill_record(dict(written))
    for name, meant in MEANT_BEFORE.items():
        section = getattr(config, name)
        known = filled.get(name)
        if section is None or not isinstance(known, dict):
            continue
        kept = {
            field: value
            for field, value in meant.items()
            if known[field] == value and field not in section.model_fields_set
        }
        changes[name] = section.model_copy(update=kept)
    return config.model_copy(update=changes)
