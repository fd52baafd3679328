"""The fields that a search tries, and the jobs that come of them. Imports no torch and no Optuna: the API asks it."""

from __future__ import annotations

import difflib
import importlib.util
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from kd.config.job import JobConfig
from kd.config.search import Dimension, SearchConfig
from kd.errors import ConfigError, Problem
from kd.jobfile import parse_config

#: What trials may differ in. The rest decides what the cache holds, and they share one.
OPEN_SECTIONS = ("loss", "train", "student", "checks")

Overrides = dict[str, Any]
"""Values by the dotted names of their fields."""


def search_of(config: JobConfig) -> SearchConfig:
    """The search section, which a job of kind search always has."""
    assert config.search is not None, "JobConfig refuses a search without a search section"
    return config.search


# ---------------------------------------------------------------------- the jobs of a search


def best_job(config: JobConfig, overrides: Overrides) -> JobConfig:
    """The job of one point of the space, to be run by itself: kind distill, from the search's text and teacher.

    Raises ``ConfigError`` where the values do not go together.
    """
    data = config.model_dump(mode="json") | {"kind": "distill", "search": None, "name": f"{config.name[:57]}-best"}
    for dotted, value in overrides.items():
        data = _with_value(data, dotted.split("."), value)
    return parse_config(data)


def trial_job(config: JobConfig, overrides: Overrides, fingerprint: str, number: int) -> JobConfig:
    """The job of trial ``number``: kind train, from the sealed cache that all of them share.

    The cache was captured from the search's own text, so the text is cut as the cache is. What the evaluation section
    asks for beyond the records is left to the best job: trials are compared by their held-out loss.
    """
    data = best_job(config, overrides).model_dump(mode="json")
    data |= {"kind": "train", "name": trial_name(config, number)}
    data |= {"depends_on": [], "deadline_seconds": None, "webhook": None}  # which the search as a whole has
    data["cache"] |= {"fingerprint": fingerprint}
    data["evaluation"] |= {"teacher": False, "baseline": False, "prompts": [], "tasks": []}
    return parse_config(data)


def keeps_best(config: JobConfig, overrides: Overrides) -> bool:
    """Whether a trial saves its best weights, as early stopping does, and not its last."""
    train = best_job(config, overrides).train
    return train is not None and train.early_stopping_patience is not None


def trial_name(config: JobConfig, number: int) -> str:
    """What a trial is called."""
    return f"{config.name[:57]}-{number:04d}"


def _with_value(data: Any, keys: list[str], value: Any) -> dict[str, Any]:
    inner = dict(data) if isinstance(data, Mapping) else {}
    inner[keys[0]] = value if len(keys) == 1 else _with_value(inner.get(keys[0]), keys[1:], value)
    return inner


# ---------------------------------------------------------------------- what is wrong with a space


def space_problems(config: JobConfig) -> list[Problem]:
    """What is wrong with the search of a job; nothing for a job of another kind."""
    if config.search is None:
        return []
    return [*_measure(config), *_sampler(config.search), *_space(config, config.search.space)]


def _measure(config: JobConfig) -> Iterator[Problem]:
    if not config.data.validation and config.data.held_out_fraction == 0:
        remedy = "Give data.validation, or data.validation_fraction above 0."
        yield Problem("/search", "a search compares students on held-out text, but data holds nothing out.", remedy)


def _sampler(search: SearchConfig) -> Iterator[Problem]:
    missing = [name for name in ("scipy", "torch") if importlib.util.find_spec(name) is None]
    if search.sampler == "gp" and missing:
        detail = f"gp needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed."
        yield Problem("/search/sampler", detail, f"Use tpe, or `pip install {' '.join(missing)}`.")


def _space(config: JobConfig, space: Mapping[str, Dimension]) -> Iterator[Problem]:
    names = sorted(space)
    for dotted in names:
        inside = [other for other in names if other.startswith(dotted + ".")]
        found = _unknown(dotted) or _closed(dotted) or _overlap(inside) or _values(config, dotted, space[dotted])
        if found is not None:
            yield Problem(f"/search/space/{dotted}", *found)


Complaint = tuple[str, str] | None
"""What is wrong with a field, and what to do about it."""


def _unknown(dotted: str) -> Complaint:
    sections: list[type[BaseModel]] = [JobConfig]
    for depth, part in enumerate(keys := dotted.split(".")):
        known = {name: field for section in sections for name, field in section.model_fields.items()}
        if part not in known:
            close = difflib.get_close_matches(part.lower(), known, n=1, cutoff=0.5)
            before = ".".join(keys[:depth])
            known_here = f"{before or 'A job'} has: {', '.join(known)}." if known else f"{before} is one value."
            right = ".".join([*keys[:depth], *close, *keys[depth + 1 :]])
            return f"there is no field {dotted}.", f"Did you mean {right}?" if close else known_here
        forms = list(_forms(known[part].annotation))
        if any(typing.get_origin(form) is dict for form in forms):
            return None
        sections = [form for form in forms if isinstance(form, type) and issubclass(form, BaseModel)]
    return None


def _forms(annotation: Any) -> Iterator[Any]:
    """The types of which a field may be one."""
    if typing.get_origin(annotation) in (None, dict, tuple, list):
        yield annotation
        return
    for part in typing.get_args(annotation):
        yield from _forms(part)


def _closed(dotted: str) -> Complaint:
    section, _, rest = dotted.partition(".")
    if section not in OPEN_SECTIONS:
        detail = f"{dotted} is the same for every trial: they share one cache."
        return detail, f"A search may try fields of {', '.join(OPEN_SECTIONS)}."
    if not rest:
        return f"{section} is a whole section.", f"Name its fields, for example {section}.{_example(section)}."
    return None


def _example(section: str) -> str:
    annotation = JobConfig.model_fields[section].annotation
    models = (form for form in _forms(annotation) if isinstance(form, type) and issubclass(form, BaseModel))
    return next(iter(next(models).model_fields))


def _overlap(inside: list[str]) -> Complaint:
    return (f"it holds {inside[0]}, which the space names too.", "Name one of them.") if inside else None


def _values(config: JobConfig, dotted: str, dimension: Dimension) -> Complaint:
    """Each choice, or each end of the range, must make a valid job."""
    if dimension.integer and any(end is not None and end != int(end) for end in (dimension.min, dimension.max)):
        return "the ends of a range of integers must be whole numbers.", "Or leave integer out."
    for value in ends(dimension):
        try:
            best_job(config, {dotted: value})
        except ConfigError as error:
            return f"with {value!r} the job is not valid: {error}", ""
    return None


def ends(dimension: Dimension) -> tuple[Any, ...]:
    """The choices, or both ends of the range."""
    if dimension.choices is not None:
        return dimension.choices
    assert dimension.min is not None and dimension.max is not None, "Dimension has a range or choices"
    whole = int if dimension.integer else float
    return whole(dimension.min), whole(dimension.max)
