"""The fields that a search tries, and the jobs of its trials.

Imports neither torch nor Optuna, because the API process imports it.
"""

from __future__ import annotations

import difflib
import importlib.util
import typing
from collections.abc import Iterator, Mapping
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
    data |= {"kind": "train", "name": name_trial(config, number)}
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


def name_trial(config: JobConfig, number: int) -> str:
    """Return the name of a trial's job."""
    # 57 characters leave room for the number within the 63 of a job's name.
    return f"{config.name[:57]}-{number:04d}"


# ---------------------------------------------------------------------- checks of a space


def find_space_problems(config: JobConfig) -> list[Problem]:
    """List the problems of a job's search; none for a job of another kind."""
    if config.search is None:
        return []
    return [
        *_check_held_out_text(config),
        *_check_sampler(config.search),
        *_check_space(config, config.search.space),
    ]


def _check_held_out_text(config: JobConfig) -> Iterator[Problem]:
    if not config.data.validation and config.data.held_out_fraction == 0:
        remedy = "Give data.validation, or data.validation_fraction above 0."
        yield Problem(
            "/search",
            "a search compares students on held-out text, but data holds nothing out.",
            remedy,
        )


def _check_sampler(search: SearchConfig) -> Iterator[Problem]:
    # Optuna imports both only when it samples, long after the search began.
    missing = [name for name in ("scipy", "torch") if importlib.util.find_spec(name) is None]
    if search.sampler == "gp" and missing:
        are = "is" if len(missing) == 1 else "are"
        detail = f"gp needs {' and '.join(missing)}, which {are} not installed."
        yield Problem("/search/sampler", detail, f"Use tpe, or `pip install {' '.join(missing)}`.")


def _check_space(config: JobConfig, space: Mapping[str, Dimension]) -> Iterator[Problem]:
    names = sorted(space)
    for dotted in names:
        inside = [other for other in names if other.startswith(dotted + ".")]
        # The first problem of a field is enough: the others would follow from it.
        found = (
            _check_known(dotted)
            or _check_open(dotted)
            or _check_overlap(inside)
            or _check_values(config, dotted, space[dotted])
        )
        if found is not None:
            yield Problem(f"/search/space/{dotted}", *found)


Reason = tuple[str, str] | None
"""The problem of a field and its remedy; None where it has no problem."""


def _check_known(dotted: str) -> Reason:
    sections: list[type[BaseModel]] = [JobConfig]
    for depth, part in enumerate(keys := dotted.split(".")):
        known = {
            name: field for section in sections for name, field in section.model_fields.items()
        }
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
        forms = list(_list_forms(known[part].annotation))
        # The keys of a mapping are free: trial jobs show whether a key is valid.
        if any(typing.get_origin(form) is dict for form in forms):
            return None
        sections = [
            form for form in forms if isinstance(form, type) and issubclass(form, BaseModel)
        ]
    return None


def _list_forms(annotation: Any) -> Iterator[Any]:
    """Yield each type that the value of a field may have."""
    if typing.get_origin(annotation) in (None, dict, tuple, list):
        yield annotation
        return
    for part in typing.get_args(annotation):
        yield from _list_forms(part)


def _check_open(dotted: str) -> Reason:
    section, _, rest = dotted.partition(".")
    if section not in OPEN_SECTIONS:
        detail = f"{dotted} must be the same for every trial, because they share one cache."
        return detail, f"A search may try fields of {', '.join(OPEN_SECTIONS)}."
    if not rest:
        return (
            f"{section} is a whole section.",
            f"Name its fields, for example {section}.{_find_example(section)}.",
        )
    return None


def _find_example(section: str) -> str:
    annotation = JobConfig.model_fields[section].annotation
    models = (
        form
        for form in _list_forms(annotation)
        if isinstance(form, type) and issubclass(form, BaseModel)
    )
    return next(iter(next(models).model_fields))


def _check_overlap(inside: list[str]) -> Reason:
    return (
        (f"it contains {inside[0]}, which the space names too.", "Name only one of them.")
        if inside
        else None
    )


def _check_values(config: JobConfig, dotted: str, dimension: Dimension) -> Reason:
    """Check that each choice, or each end of the range, makes a valid job."""
    if dimension.integer and any(
        end is not None and end != int(end) for end in (dimension.min, dimension.max)
    ):
        return (
            "the ends of a range of integers must be whole numbers.",
            "Give whole numbers, or remove integer.",
        )
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
    assert dimension.min is not None and dimension.max is not None, (
        "Dimension has a range or choices"
    )
    whole = int if dimension.integer else float
    return whole(dimension.min), whole(dimension.max)
