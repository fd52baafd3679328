"""Which addresses of buckets a job of the service may name: the credentials are the operator's."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.preflight.confinement import find_confinement_problems
from kd.preflight.limits import AllowedModel, Confinement

MINE = "job_" + "1" * 26
OTHER = "job_" + "2" * 26
CACHE = "a" * 32
OTHER_CACHE = "b" * 32
STORE = "s3://ours/caches"


def job(**changes: Any) -> JobConfig:
    plain = {
        "teacher": {"model": "model"},
        "student": {"init": {"layers": 1, "hidden_size": 32}},
        "data": {"train": "text"},
        "train": {"max_steps": 1},
    }
    return parse_config(plain | changes)


def searching(field: str, name: str) -> JobConfig:
    space = {field: {"choices": ["model", name]}}
    student = {"student": {"model": "model"}} if field == "student.model" else {}
    return job(kind="search", search={"space": space}, **student)


FIELDS: dict[str, Callable[[str], JobConfig]] = {
    "/teacher/model": lambda name: job(teacher={"model": name}),
    "/student/model": lambda name: job(student={"model": name}),
    "/student/init/tokenizer": lambda name: job(
        student={"init": {"layers": 1, "hidden_size": 32, "tokenizer": name}}
    ),
    "/data/train/0": lambda name: job(data={"train": name}),
    "/data/validation/0": lambda name: job(data={"train": "text", "validation": name}),
    "/search/space/student.model": lambda name: searching("student.model", name),
    "/search/space/student.init.tokenizer": lambda name: searching("student.init.tokenizer", name),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("root/model", "root/text", "root/home"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path / "root"


@pytest.fixture
def limits(root: Path) -> Confinement:
    return Confinement(
        home=root / "home",
        roots=(root,),
        may_read_run={MINE}.__contains__,
        may_read_cache={CACHE}.__contains__,
        store=STORE,
        stores=("s3://theirs/text",),
    )


def pointers(config: JobConfig, root: Path, limits: Confinement) -> list[str]:
    return [problem.pointer for problem in find_confinement_problems(config, root, limits)]


def rebuilt(limits: Confinement, config: JobConfig, root: Path) -> Confinement:
    """The limits as the process that runs the job has them."""
    return Confinement.from_order(json.loads(json.dumps(limits.to_order(config, root))))


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        (f"{STORE}/text", True),
        (f"{STORE}/text/a.txt", True),
        ("s3://theirs/text/a.txt", True),
        (f"{STORE}/runs/{MINE}/student", True),
        (f"{STORE}/runs/{OTHER}/student", False),
        (f"{STORE}/runs", False),
        (f"{STORE}/{CACHE}/x", True),
        (f"{STORE}/{OTHER_CACHE}/x", False),
        (STORE, False),  # it contains what is others'
        ("s3://ours", False),
        (f"{STORE}andmore", False),
        ("s3://theirs/textandmore", False),
        ("s3://theirs", False),
        ("s3://theirs/text/.hidden/a.txt", False),
        ("s3://elsewhere/text", False),
    ],
)
@pytest.mark.parametrize("pointer", FIELDS)
def test_a_job_reads_the_operators_buckets_alone(
    root: Path, limits: Confinement, pointer: str, name: str, allowed: bool
) -> None:
    config = FIELDS[pointer](name)
    for each in (limits, rebuilt(limits, config, root)):
        found = find_confinement_problems(config, root, each)
        assert [problem.pointer for problem in found] == ([] if allowed else [pointer])
        assert allowed or "KD_DATA_STORES" in found[0].remedy
    assert pointers(config, root, replace(limits, store=None, stores=())) == [pointer]


def test_a_bucket_that_contains_the_store_does_not_open_it(root: Path, limits: Confinement) -> None:
    limits = replace(limits, stores=("s3://ours",))
    assert pointers(job(data={"train": "s3://ours/text"}), root, limits) == []
    for name in (f"{STORE}/runs/{OTHER}", "s3://ours", STORE, f"{STORE}/{OTHER_CACHE}"):
        assert pointers(job(data={"train": name}), root, limits) == ["/data/train/0"]


def test_the_list_of_models_names_buckets_too(root: Path, limits: Confinement) -> None:
    models = (AllowedModel("s3://theirs/models"), AllowedModel("model"))
    limits = replace(limits, models=models)
    refused = ["/teacher/model"]
    for name, expected in {
        "s3://theirs/models/a": [],
        "s3://theirs/other": refused,
        f"{STORE}/model": refused,
        f"{STORE}/runs/{MINE}/student": [],
    }.items():
        assert pointers(job(teacher={"model": name}), root, limits) == expected
