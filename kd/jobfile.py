"""From YAML, JSON or ``--set a.b=c`` to a job, or to a list of everything that is wrong with it."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ValidationError

from kd.config.data import DatasetSpec
from kd.config.job import JobConfig
from kd.errors import ConfigError, Problem


def parse_config(data: Any) -> JobConfig:
    """The job that ``data`` (parsed YAML or JSON) describes, or ``ConfigError`` with every problem in it."""
    if not isinstance(data, Mapping):
        raise ConfigError(
            [Problem("", f"a job must be a mapping, but got {type(data).__name__}.", "See examples/austen/job.yaml.")]
        )
    try:
        return JobConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(problems_of(error.errors())) from None


def load_config(path: Path, overrides: Iterable[str] = ()) -> JobConfig:
    """Read a YAML or JSON job file and apply ``a.b=value`` overrides (values are YAML)."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            [Problem("", f"no job file at {path}.", "Give the path of a YAML file; examples/austen/job.yaml is one.")]
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            [Problem("", f"{path} cannot be read: {error}.", "Give the path of a UTF-8 YAML file.")]
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError([Problem("", f"{path} is not valid YAML: {' '.join(str(error).split())}.")]) from None
    return parse_config(apply_overrides(data, overrides))


def apply_overrides(data: Any, overrides: Iterable[str]) -> Any:
    """``data`` with each ``a.b=value`` set in it; ``data`` itself is left as it is."""
    for override in overrides:
        dotted, separator, text = override.partition("=")
        keys = dotted.strip().split(".")
        if not separator or not all(keys):
            raise ConfigError(
                [
                    Problem(
                        "", f"override {override!r} is not of the form a.b=value.", "Example: --set train.max_steps=100"
                    )
                ]
            )
        try:
            data = _with_value(data, keys, yaml.safe_load(text))
        except yaml.YAMLError as error:
            raise ConfigError(
                [
                    Problem(
                        "/" + "/".join(keys),
                        f"override {override!r} is not valid YAML: {' '.join(str(error).split())}.",
                    )
                ]
            ) from None
    return data


def _with_value(data: Any, keys: list[str], value: Any) -> Any:
    if not keys:
        return value
    inner = dict(data) if isinstance(data, Mapping) else {}
    inner[keys[0]] = _with_value(inner.get(keys[0]), keys[1:], value)
    return inner


def problems_of(errors: Iterable[Mapping[str, Any]]) -> list[Problem]:
    """Pydantic's errors as ours: a pointer into the job, a sentence, and a did-you-mean for unknown keys."""
    return [_problem(error) for error in errors]


def _problem(error: Mapping[str, Any]) -> Problem:
    location = [part for part in error["loc"] if part != "body"]
    path, model = _walk(location)
    pointer = "/" + "/".join(str(part) for part in path) if path else ""
    if error["type"] == "extra_forbidden" and model is not None:
        known = list(model.model_fields)
        close = difflib.get_close_matches(str(location[-1]).lower(), known, n=1, cutoff=0.5)
        remedy = f"Did you mean {close[0]}?" if close else f"Known keys: {', '.join(known)}."
        return Problem(pointer, f"unknown key {location[-1]!r}.", remedy)
    if error["type"] == "missing":
        return Problem(pointer, "is required but missing.")
    message = str(error["msg"]).removeprefix("Value error, ")
    got = error.get("input")
    shown = f", but got {got!r}" if isinstance(got, str | int | float | bool) or got is None else ""
    return Problem(pointer, f"{message}{shown}.")


def _walk(location: list[Any]) -> tuple[list[Any], type[BaseModel] | None]:
    """The part of a pydantic location that names keys and indices, and the model that holds the last key."""
    model: type[BaseModel] | None = JobConfig
    holder = model
    path: list[Any] = []
    for before, part in zip([None, *location], location, strict=False):
        if isinstance(part, int):
            path.append(part)
            continue
        if isinstance(before, int):  # the tag that says which form of a source was meant
            model = DatasetSpec if part == "DatasetSpec" else None
            continue
        holder = model if model is not None else holder
        if model is not None and part in model.model_fields:
            path.append(part)
            model = _section_of(model.model_fields[part].annotation)
        elif part == location[-1]:
            path.append(part)  # an unknown key, or a key of a free mapping
    return path, holder


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The section class inside ``X``, ``X | None`` or ``Annotated[X, ...]``, if there is one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, Annotated):
        return next((found for part in typing.get_args(annotation) if (found := _section_of(part))), None)
    return None
