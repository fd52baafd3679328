"""The fields for the service: valid forms, refusals, and no effect on a run; also kind verify."""

from __future__ import annotations

from typing import Any

import pytest

from kd.config.job import JobConfig
from kd.config.jobfile import apply_overrides, parse_config
from kd.config.kinds import KINDS
from kd.config.placement import PLACEMENT_FIELDS, Placement, Resources
from kd.errors import ConfigError

FINGERPRINT = "a" * 32
ID = "job_" + "0" * 25 + "z"
JOB: dict[str, Any] = {
    "kind": "train",
    "student": {"init": {"layers": 1, "hidden_size": 16, "tokenizer": "somewhere"}},
    "data": {"train": "text.txt"},
    "loss": {"alpha": 1.0},
    "train": {"max_steps": 1},
}
VERIFY: dict[str, Any] = {"kind": "verify", "cache": {"fingerprint": FINGERPRINT}}


def parse(**changes: Any) -> JobConfig:
    return parse_config(JOB | changes)


def refusal(data: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        parse_config(data)
    return str(error.value)


def test_a_job_need_not_say_where_it_runs() -> None:
    job = parse()
    assert {name: getattr(job, name) for name in PLACEMENT_FIELDS} == {
        "labels": {},
        "priority": 5,
        "depends_on": (),
        "deadline_seconds": None,
        "max_attempts": None,
        "resources": Resources(gpus=None, memory=None),
        "webhook": None,
    }


def test_placement_is_named_completely_and_is_part_of_a_job() -> None:
    assert frozenset(Placement.model_fields) == PLACEMENT_FIELDS
    assert set(JobConfig.model_fields) > PLACEMENT_FIELDS
    assert all(field.description for field in Placement.model_fields.values())


def test_all_that_a_job_may_ask_for() -> None:
    placement = {
        "labels": {"team": "nlp", "a/b.c-d_e": "1"},
        "priority": 9,
        "depends_on": [ID, ID[:-1] + "y"],
        "deadline_seconds": 86400,
        "max_attempts": 1000,
        "resources": {"gpus": 8, "memory": "80GiB"},
        "webhook": "https://example.org/hook?x=1",
    }
    job = parse(**placement)
    assert (job.labels, job.priority, job.depends_on) == (
        placement["labels"],
        9,
        tuple(placement["depends_on"]),
    )
    assert (job.resources.gpus, job.resources.memory) == (8, 80 << 30)
    assert parse_config(job.model_dump(mode="json")) == job, (
        "what the record holds is read as the same job"
    )
    assert (
        apply_overrides(JOB, ["priority=7", "resources.memory=16GiB", "labels.team=nlp"])[
            "priority"
        ]
        == 7
    )


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("16GiB", 16 << 30),
        ("16 GiB", 16 << 30),
        ("16gib", 16 << 30),
        ("16GB", 16_000_000_000),
        ("16G", 16_000_000_000),
        ("1.5GiB", 3 << 29),
        ("512MiB", 512 << 20),
        ("64KiB", 64 << 10),
        ("1TiB", 1 << 40),
        ("1024", 1024),
        ("1024B", 1024),
        (1024, 1024),
        (1 << 50, 1 << 50),
        (None, None),
    ],
)
def test_memory_is_a_number_or_says_its_unit(text: Any, number: int | None) -> None:
    assert parse(resources={"memory": text}).resources.memory == number


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"resources": {"memory": "16 gigs"}}, "resources.memory"),
        ({"resources": {"memory": "-1GiB"}}, "resources.memory"),
        ({"resources": {"memory": 0}}, "resources.memory"),
        ({"resources": {"memory": "0.1B"}}, "resources.memory"),
        ({"resources": {"memory": (1 << 50) + 1}}, "resources.memory"),
        ({"resources": {"memory": "nanGiB"}}, "resources.memory"),
        ({"resources": {"gpus": -1}}, "resources.gpus"),
        ({"resources": {"gpus": 65}}, "resources.gpus"),
        ({"resources": {"gpus": 0.5}}, "resources.gpus"),
        ({"resources": {"cpus": 1}}, "resources.cpus"),
        ({"resources": 3}, "resources"),
        ({"priority": 10}, "priority"),
        ({"priority": -1}, "priority"),
        ({"priority": "high"}, "priority"),
        ({"deadline_seconds": 0}, "deadline_seconds"),
        ({"deadline_seconds": 1e9}, "deadline_seconds"),
        ({"deadline_seconds": "soon"}, "deadline_seconds"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"max_attempts": 1001}, "max_attempts"),
        ({"depends_on": ["job_1"]}, "depends_on.0"),
        ({"depends_on": [ID, ID.upper()]}, "depends_on.1"),
        ({"depends_on": [ID + "\n"]}, "depends_on.0"),
        ({"depends_on": ID}, "depends_on"),
        ({"depends_on": [ID] * 33}, "depends_on"),
        ({"labels": {f"n{index}": "x" for index in range(17)}}, "labels"),
        ({"labels": {"": "x"}}, "labels"),
        ({"labels": {"a": ""}}, "labels.a"),
        ({"labels": {"a": 'x"y'}}, "labels.a"),
        ({"labels": {"a": "x\n"}}, "labels.a"),
        ({"labels": {"a=b": "x"}}, "labels"),
        ({"labels": {"a": "x" * 64}}, "labels.a"),
        ({"labels": {"-a": "x"}}, "labels"),
        ({"labels": {"a": 1}}, "labels.a"),
        ({"webhook": "ftp://example.org"}, "webhook"),
        ({"webhook": "example.org"}, "webhook"),
        ({"webhook": "https://example.org/a b"}, "webhook"),
        ({"webhook": "https://example.org/\n"}, "webhook"),
        ({"webhook": "https://example.org/" + "x" * 2048}, "webhook"),
    ],
)
def test_what_cannot_be_is_refused_by_name(changes: dict[str, Any], where: str) -> None:
    assert refusal(JOB | changes).startswith(where)


def test_a_cache_is_verified_by_its_fingerprint_and_nothing_else() -> None:
    job = parse_config(VERIFY)
    assert (job.kind, job.stages, job.needs_cache, job.cache.fingerprint) == (
        "verify",
        ("precompute",),
        False,
        FINGERPRINT,
    )
    assert job.teacher is job.student is job.train is None
    assert parse_config(job.model_dump(mode="json")) == job


@pytest.mark.parametrize("kind", [kind.name for kind in KINDS.values() if kind.checks])
def test_a_check_names_its_cache(kind: str) -> None:
    message = refusal({"kind": kind, "teacher": {"model": "t"}})
    assert f"cache.fingerprint is required for kind {kind}" in message


def test_fidelity_is_measured_with_a_teacher() -> None:
    assert "teacher is required for kind fidelity" in refusal(VERIFY | {"kind": "fidelity"})
    job = parse_config(VERIFY | {"kind": "fidelity", "teacher": {"model": "t"}})
    assert (job.checks_cache, job.needs_cache) == (True, False)
    assert job.active_teacher == job.teacher is not None
    assert job.stages == ("precompute",)
    assert parse_config(VERIFY | {"teacher": {"model": "t"}}).active_teacher is None


def test_only_a_search_has_a_search() -> None:
    assert "search is required for kind search, and for no other kind" in refusal(
        VERIFY | {"search": SEARCH}
    )


SEARCH = {"space": {"train.learning_rate": {"choices": [0.1]}}}


@pytest.mark.parametrize("kind", ["distill", "precompute", "search"])
def test_only_train_and_verify_read_a_sealed_cache_by_name(kind: str) -> None:
    whole = JOB | {
        "teacher": {"model": "t"},
        "loss": {"alpha": 0.1},
        "cache": {"fingerprint": FINGERPRINT},
    }
    message = refusal(whole | {"kind": kind} | ({"search": SEARCH} if kind == "search" else {}))
    assert f"kind {kind} captures one itself" in message
