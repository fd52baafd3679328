"""The fields that a search tries, and the jobs of its trials.

Imports neither torch nor Optuna, because the API process imports it.
"""

from __future__ import annotations

import difflib
import importlib.util
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from kd.config.job import JobConfig
from kd.config.jobfile import parse_config, set_value
from kd.config.search import Dimension, SearchConfig
from kd.errors import ConfigError, Problem

#: The sections in which trials may differ. The others decide what the cache holds, and all trials
#: share one.
OPEN_SECTIONS = ("loss", "train", "student", "checks")

Overrides = dict[str, Any]
"""Values by the dotted names of their fields."""


def get_search(config: JobConfig) -> SearchConfig:
    """Return the search section, which every job of kind search has."""
    assert config.search is not None, "JobConfig refuses a search without a search section"
    return config.search


# ---------------------------------------------------------------------- the jobs of a search


def make_best_job(config: JobConfig, overrides: Overrides) -> JobConfig:
    """Make the job of one point of the space: kind distill, with the search's text and teacher.

    Raises ``ConfigError`` if the values contradict each other.
    """
    data = config.model_dump(mode="json") | {
        "kind": "distill",
        "search": None,
        "name": f"{config.name[:57]}-best",  # at most the 63 characters of a name
    }
    for dotted, value in overrides.items():
        data = set_value(data, dotted.split("."), value)
    return parse_config(data)


def make_trial_job(
    config: JobConfig, overrides: Overrides, fingerprint: str, number: int
) -> JobConfig:
    """Make the job of trial ``number``: kind train, from the sealed cache that all trials share.

    Trials are compared by their held-out loss, so that the costly parts of the evaluation section
    are left to the best job.
    """
    data = make_best_job(config, overrides).model_dump(mode="json")
    # 57 characters leave room for the number within the 63 of a job's name.
    data |= {"kind": "train", "name": f"{config.name[:57]}-{number:04d}"}
    # The search as a whole has these, and not each of its trials.
    data |= {"depends_on": [], "deadline_seconds": None, "webhook": None}
    data["cache"] |= {"fingerprint": fingerprint}
    data["evaluation"] |= {"teacher": False, "baseline": False, "prompts": [], "tasks": []}
    data["evaluation"] |= {"continuations": 0, "samples": 0}
    return parse_config(data)


def keeps_best(config: JobConfig, overrides: Overrides) -> bool:
    """Return whether a trial saves its best weights (with early stopping), and not its last."""
    train = make_best_job(config, overrides).train
    return train is not None and train.early_stopping_patience is not None


# ---------------------------------------------------------------------- checks of a space


def find_space_problems(config: JobConfig) -> list[Problem]:
    """List the problems of a job's search; none for a job of another kind."""
    search = config.search
    if search is None:
        return []
    problems = []
    if not config.data.validation and config.data.held_out_fraction == 0:
        detail = "a search compares students on held-out text, but data holds nothing out."
        remedy = "Give data.validation, or data.validation_fraction above 0."
        problems.append(Problem("/search", detail, remedy))
    # Optuna imports both only when it samples, long after the search began.
    missing = [name for name in ("scipy", "torch") if importlib.util.find_spec(name) is None]
    if search.sampler == "gp" and missing:
        are = "is" if len(missing) == 1 else "are"
        detail = f"gp needs {' and '.join(missing)}, which {are} not installed."
        remedy = f"Use tpe, or `pip install {' '.join(missing)}`."
        problems.append(Problem("/search/sampler", detail, remedy))
    for dotted in sorted(search.space):
        inside = [other for other in sorted(search.space) if other.startswith(dotted + ".")]
        # The first problem of a field is enough: the others would follow from it.
        found = _check_known(dotted) or _check_open(dotted)
        if found is None and inside:
            found = f"it contains {inside[0]}, which the space names too.", "Name only one of them."
        found = found or _check_values(config, dotted, search.space[dotted])
        if found is not None:
            problems.append(Problem(f"/search/space/{dotted}", *found))
    return problems


Reason = tuple[str, str] | None
"""The problem of a field and its remedy; None where it has no problem."""


def _check_known(dotted: str) -> Reason:
    sections: list[type[BaseModel]] = [JobConfig]
    for depth, part in enumerate(keys := dotted.split(".")):
        known = {name: field for each in sections for name, field in each.model_fields.items()}
        if part not in known:
            close = difflib.get_close_matches(part.lower(), known, n=1, cutoff=0.5)
            before = ".".join(keys[:depth])
            known_here = (
                f"{before or 'A job'} has: {', '.join(known)}."
                if known
                else f"{before} is one value."
            )
            right = ".".join([*keys[:depth], *close, *keys[depth + 1 :]])
            return f"there is no field {dotted}.", f"Did you mean {right}?" if close else known_here
        # The keys of a mapping are free: trial jobs show whether a key is valid.
        if any(typing.get_origin(form) is dict for form in _list_forms(known[part].annotation)):
            return None
        sections = _list_models(known[part].annotation)
    return None


def _list_forms(annotation: Any) -> Iterator[Any]:
    """Yield each type that the value of a field may have."""
    if typing.get_origin(annotation) in (None, dict, tuple, list):
        yield annotation
        return
    for part in typing.get_args(annotation):
        yield from _list_forms(part)


def _list_models(annotation: Any) -> list[type[BaseModel]]:
    """List the sections that the value of a field may be."""
    forms = _list_forms(annotation)
    return [form for form in forms if isinstance(form, type) and issubclass(form, BaseModel)]


def _check_open(dotted: str) -> Reason:
    section, _, rest = dotted.partition(".")
    if section not in OPEN_SECTIONS:
        detail = f"{dotted} must be the same for every trial, because they share one cache."
        return detail, f"A search may try fields of {', '.join(OPEN_SECTIONS)}."
    if not rest:
        models = _list_models(JobConfig.model_fields[section].annotation)
        example = next(iter(models[0].model_fields))
        remedy = f"Name its fields, for example {section}.{example}."
        return f"{section} is a whole section.", remedy
    return None


def _check_values(config: JobConfig, dotted: str, dimension: Dimension) -> Reason:
    """Check that each choice, or each end of the range, makes a valid job."""
    ends = [end for end in (dimension.min, dimension.max) if end is not None]
    if dimension.integer and any(end != int(end) for end in ends):
        detail = "the ends of a range of integers must be whole numbers."
        return detail, "Give whole numbers, or remove integer."
    for value in list_ends(dimension):
        try:
            make_best_job(config, {dotted: value})
        except ConfigError as error:
            return f"with {value!r} the job is not valid: {error}", ""
    return None


def list_ends(dimension: Dimension) -> tuple[Any, ...]:
    """Return the choices, or both ends of the range."""
    if dimension.choices is not None:
        return dimension.choices
    assert dimension.min is not None and dimension.max is not None, "a range or choices"
    whole = int if dimension.integer else float
    return whole(dimension.min), whole(dimension.max)
