"""From YAML, JSON or ``--set a.b=c`` to a job, or to a list of everything that is wrong with it."""

from __future__ import annotations

import difflib
import json
import re
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, Tag, ValidationError

from kd.config.cache import FINGERPRINT
from kd.config.job import NAME, JobConfig
from kd.errors import ConfigError, Problem

#: What a text must be, by the pattern of its field.
IN_WORDS = {
    FINGERPRINT: "must be a whole fingerprint, 32 hexadecimal digits",
    NAME: "must be 1 to 63 lower-case letters, digits, dots, dashes and underscores, the first a letter or a digit",
}


def parse_config(data: Any) -> JobConfig:
    """The job that ``data`` (parsed YAML or JSON) describes, or ``ConfigError`` with every problem in it."""
    if not isinstance(data, Mapping):
        got = "a list" if isinstance(data, list) else _shown(data)
        raise ConfigError([Problem("", f"a job must be a mapping, but got {got}.", "See examples/austen/job.yaml.")])
    try:
        return JobConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(problems_of(error.errors())) from None


def load_config(path: Path, overrides: Iterable[str] = ()) -> JobConfig:
    """Read a YAML or JSON job file and apply ``a.b=value`` overrides (values are YAML)."""
    try:
        data = parse_yaml(path.read_text(encoding="utf-8"))
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


def parse_yaml(text: str) -> Any:
    """The value that ``text`` (YAML or JSON) means; ``yaml.YAMLError`` where a mapping has a key twice."""
    loader = OneOfEachKey(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


class OneOfEachKey(yaml.SafeLoader):
    """A SafeLoader that refuses a key given twice, of which the last would win without a word.

    It looks at mappings as they are written: what a merge key (``<<``) brings may be given anew.
    """

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        """As SafeLoader's."""
        mapping = super().compose_mapping_node(anchor)
        first: dict[tuple[str, str], int] = {}
        for key, _ in mapping.value:
            name, line = (key.tag, str(key.value)), key.start_mark.line + 1
            if name in first and key.tag != "tag:yaml.org,2002:merge" and isinstance(key, yaml.ScalarNode):
                where = f"line {line}" if line == first[name] else f"lines {first[name]} and {line}"
                raise yaml.YAMLError(f"key {key.value!r} is given twice ({where})")
            first.setdefault(name, line)
        return mapping


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
            data = _with_value(data, keys, parse_yaml(text))
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
    """Pydantic's errors as ours: a pointer into the job, a sentence, and a did-you-mean for unknown keys and choices.

    A value that is of no form that its field may have gives one problem, not one for each form.
    """
    forms_of: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for number, error in enumerate(errors):
        path, _, of_many = _walk(error["loc"])
        forms_of.setdefault((*path,) if of_many else (number, *error["loc"]), []).append(error)
    return [_problem(same) for same in forms_of.values()]


def _problem(errors: list[Mapping[str, Any]]) -> Problem:
    """What is wrong at one place: ``errors`` are more than one where a value may have several forms."""
    error, (path, section, _) = errors[0], _walk(errors[0]["loc"])
    pointer = "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)
    if error["type"] == "extra_forbidden" and section is not None:
        return Problem(pointer, f"unknown key {path[-1]!r}.", _meant(path[-1], list(section.model_fields), "keys"))
    if error["type"] == "missing":
        return Problem(pointer, "is required but missing.")
    if error["type"] == "value_error":
        return Problem(pointer, str(error["msg"]).removeprefix("Value error, ") + ".")
    if error["type"] == "string_pattern_mismatch" and (words := IN_WORDS.get(error["ctx"]["pattern"])):
        return Problem(pointer, f"{words}, but got {error['input']!r}.", _whole_fingerprint(error))
    first, *others = map(_told, errors)
    message = ", or ".join([first, *(other.removeprefix("Input should be ") for other in others)])
    got = error.get("input")
    shown = f", but got {_shown(got)}" if isinstance(got, str | int | float | bool) or got is None else ""
    choices = re.findall(r"'([^']+)'", str(error.get("ctx", {}).get("expected", "")))
    return Problem(pointer, f"{message}{shown}.", _meant(got, choices) if isinstance(got, str) else "")


def _whole_fingerprint(error: Mapping[str, Any]) -> str:
    """Where the rest of a fingerprint is found of which the beginning was given, as tables show it."""
    beginning = error["ctx"]["pattern"] == FINGERPRINT and re.fullmatch("[0-9a-f]{1,31}", error["input"])
    return f"`kd cache info {error['input']}` prints it." if beginning else ""


# What pydantic says of forms that YAML has other names for.
_FORMS_IN_YAML = {
    "tuple_type": "Input should be a list",
    "dict_type": "Input should be a mapping",
    "model_type": "Input should be a section (a mapping of fields)",
    "model_attributes_type": "Input should be a section (a mapping of fields)",  # of a body over HTTP
}


def _told(error: Mapping[str, Any]) -> str:
    """Pydantic's message, in the words of YAML."""
    if error["type"] in ("too_long", "too_short"):
        told = str(error["msg"]).removesuffix(" after validation").replace(" after validation,", ",")
        return told.replace("Tuple ", "List ").replace("Dictionary ", "Mapping ")
    return _FORMS_IN_YAML.get(error["type"], str(error["msg"]))


def _shown(value: Any) -> str:
    """``value`` as YAML has it where Python has another word for it."""
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)


def _meant(given: Any, known: list[str], what: str | None = None) -> str:
    """The one of ``known`` that ``given`` looks like; else all of them, if ``what`` they are is told."""
    close = difflib.get_close_matches(str(given).lower(), known, n=1, cutoff=0.5)
    if close:
        return f"Did you mean {close[0]}?"
    return f"Known {what}: {', '.join(known)}." if what else ""


def _walk(location: Iterable[Any]) -> tuple[list[Any], type[BaseModel] | None, bool]:
    """The keys and indices in a pydantic location, without the names of the forms that a value may have.

    Further the section that has or lacks the last key, and whether the error is about one form of several.
    """
    path: list[Any] = []
    section: type[BaseModel] | None = None
    here: Any = JobConfig
    of_many = False
    for part in location:
        forms = _forms(here)
        of_many = len(forms) > 1
        if of_many:  # the part says which of them was tried
            here = forms.get(part)
            of_many = here is None
        elif part != "[key]":
            path.append(part)
            section, here = _inside(next(iter(forms.values()), None), part)
    return path, section, of_many


def _forms(annotation: Any) -> dict[Any, Any]:
    """What a value may be, besides None; tagged forms go by their tag, others by themselves."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        tags = [each.tag for each in parts[1:] if isinstance(each, Tag)]
        return dict.fromkeys(tags, parts[0]) or _forms(parts[0])
    if origin in (typing.Union, types.UnionType):
        return {name: form for part in parts for name, form in _forms(part).items()}
    return {} if annotation in (None, type(None)) else {annotation: annotation}


def _inside(form: Any, key: Any) -> tuple[type[BaseModel] | None, Any]:
    """The section that ``form`` is, if it is one, and what a section, a mapping or a list holds under ``key``."""
    if isinstance(form, type) and issubclass(form, BaseModel):
        field = form.model_fields.get(key)
        return form, field.annotation if field is not None else None
    held = typing.get_args(form)
    if typing.get_origin(form) is dict:
        return None, held[1]
    return None, held[0] if typing.get_origin(form) is tuple else None
