"""The settings of a job that are not the defaults."""

from __future__ import annotations

from typing import Any

import pytest

from kd.config.jobfile import parse_config
from kd.config.section import Difference, find_differences

LEAST: dict[str, Any] = {
    "kind": "train",
    "student": {"init": {"layers": 1, "hidden_size": 16, "tokenizer": "x"}},
    "data": {"train": "text.txt"},
    "loss": {"alpha": 1.0},
    "train": {"max_steps": 2},
}


def find(**changes: Any) -> dict[str, Difference]:
    """Return the differences of the least job with these changes, by name."""
    return {each.name: each for each in find_differences(parse_config(LEAST | changes))}


def test_only_what_was_given_and_is_not_the_default_is_named() -> None:
    found = find(train={"max_steps": 2, "batch_size": 8, "learning_rate": 0.5}, name="job")
    assert list(found) == [
        "kind", "student.init.layers", "student.init.hidden_size", "student.init.tokenizer",
        "data.train", "loss.alpha", "train.max_steps", "train.learning_rate",
    ]  # fmt: skip
    assert found["kind"] == Difference("kind", "train", "distill")
    assert found["student.init.layers"] == Difference("student.init.layers", 1, required=True)
    assert found["train.learning_rate"].default == 3e-4
    assert found["data.train"].default == []


@pytest.mark.parametrize(
    ("changes", "name", "value", "default"),
    [
        ({"labels": {"a": "b"}}, "labels", {"a": "b"}, {}),
        ({"loss": {"alpha": 1.0, "features": {"kind": "cosine"}}},
         "loss.features.kind", "cosine", "mse"),
        ({"checks": {"spike_factor": 5.0}}, "checks.spike_factor", 5.0, 3.0),
    ],
)  # fmt: skip
def test_a_value_of_an_inner_section_is_compared_alone(
    changes: dict[str, Any], name: str, value: Any, default: Any
) -> None:
    found = find(**changes)
    assert (found[name].value, found[name].default) == (value, default)
    assert not [other for other in found if name.startswith(f"{other}.")]


def test_the_values_of_the_differences_make_the_same_job() -> None:
    config = parse_config(LEAST | {"checks": {"spike_factor": 4.0}, "labels": {"a": "b"}})
    again: dict[str, Any] = {}
    for each in find_differences(config):
        *path, last = each.name.split(".")
        inner = again
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = each.value
    assert parse_config(again) == config
