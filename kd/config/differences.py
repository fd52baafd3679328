"""The settings of a job that are not the defaults of ``JobConfig``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from kd.config.job import JobConfig


@dataclass(frozen=True)
class Difference:
    """A setting that was given: its dotted name, its value, and the default as JSON values.

    ``required``: there is no default. A section that is off by default has the default None.
    """

    name: str
    value: Any
    default: Any = None
    required: bool = False


def find_differences(config: JobConfig) -> list[Difference]:
    """Return the settings whose values are not the defaults, in the order of the sections."""
    return list(_walk(config, None, ""))


def _walk(section: BaseModel, defaults: BaseModel | None, path: str) -> Iterator[Difference]:
    """Compare a section with ``defaults``; None: with the defaults of its class."""
    shown = section.model_dump(mode="json")
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        required = defaults is None and field.is_required()
        default: Any = None
        if defaults is not None:
            default = getattr(defaults, name)
        elif not required:
            default = field.get_default(call_default_factory=True)
        if not required and value == default:
            continue
        if isinstance(value, BaseModel):
            same = type(value) is type(default)
            found = list(_walk(value, default if same else None, f"{path}{name}."))
            if found:
                yield from found
                continue
        yield Difference(f"{path}{name}", shown[name], _to_json(default), required)


def _to_json(value: Any) -> Any:
    """A default as JSON has it."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, tuple | list):
        return [_to_json(each) for each in value]
    return value
