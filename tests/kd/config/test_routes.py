"""Jobs with several teachers: what is refused, and the ordinary jobs that they are split into."""

from __future__ import annotations

from typing import Any

import pytest

from kd.config.data import DatasetSpec
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.config.routing.parts import list_members, split_job
from kd.errors import ConfigError
from tests.support.kd.jobs import changed

JOB: dict[str, Any] = {
    "kind": "distill",
    "name": "several",
    "teachers": {"math": {"model": "m"}, "code": {"model": "c", "batch_size": 2}},
    "student": {"model": "s"},
    "data": {
        "train": [
            {"path": "math/*.jsonl", "teacher": "math"},
            {"path": "org/both", "mixture": {"math": 0.5, "code": 0.5}},
            {"path": "more.txt.gz", "teacher": "math"},
        ],
        "sequence_length": 128,
    },
    "train": {"max_steps": 10},
}
MATH, CODE = {"path": "a.txt", "teacher": "math"}, {"path": "b.txt", "teacher": "code"}
SERVER = {"backend": "http", "model": "x", "url": "http://localhost:8000", "tokenizer": "t"}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("teacher", {"model": "m"}, "teacher: teacher and teachers are both given"),
        ("teachers", {}, "teacher is required for kind distill"),
        ("data.train.0.teacher", "maths", "data.train.0: it names the teacher maths, but teachers"),
        ("data.train.0", "a.txt", "data.train.0: it names no teacher"),
        ("data.train.0", {"path": "a"}, "data.train.0: it names no teacher"),
        ("data.train", [MATH], "teachers.code: no source of data.train names it"),
        ("data.train.1.mixture", {"math": 0.5, "code": 0.4}, "must add up to 1, but got 0.9"),
        ("data.train.1.teacher", "math", "teacher and mixture are both given"),
        ("data.validation", [MATH], "data.validation: it must name the same teachers and mixtures"),
        ("data.validation", ["v.txt"], "data.validation.0: it names no teacher"),
        ("cache.extends", "a" * 32, "cache.extends: it cannot be combined with teachers"),
        (
            "cache.profile",
            "topk",
            "cache.profile: a mixture needs records whose mean is the teacher",
        ),
        ("resources.workers", 2, "resources.workers: it cannot be combined with teachers"),
        ("evaluation.teacher", True, "evaluation.teacher needs a teacher .* there are several"),
        ("student", {"from_teacher": {"layers": 1}}, "student.from_teacher needs .* are several"),
        (
            "student",
            {"init": {"layers": 1, "hidden_size": 8}},
            "student.init.tokenizer is required",
        ),
        ("cache.k", 8, "cache.profile threshold has no use for k without teacher.proposal"),
        ("teachers.code", SERVER, "with code, math: teacher.backend http returns only"),
        ("teachers.Code", {"model": "c"}, "String should match pattern"),
    ],
)
def test_what_does_not_fit_together_is_refused(path: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(changed(path, value, JOB))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"divergence": "reverse_kl"}, "loss.divergence: it cannot be combined with teachers"),
        ({"features": {"weight": 1.0}}, "loss.features: it cannot be combined with teachers"),
        (
            {"temperature": {"mode": "adversarial"}},
            "loss.temperature: it cannot be combined with teachers",
        ),
    ],
)
def test_losses_that_need_one_distribution_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(JOB | {"loss": changes, "cache": {"profile": "hidden"}})


def test_hard_labels_and_searches_need_one_teacher() -> None:
    search = {"space": {"train.learning_rate": {"min": 1e-4, "max": 1e-3}}}
    with pytest.raises(ConfigError, match="kind: it cannot be combined with teachers"):
        parse_config(JOB | {"kind": "search", "search": search})
    with pytest.raises(ConfigError, match=r"loss\.alpha: it cannot be combined with teachers"):
        parse_config(JOB | {"kind": "train", "loss": {"alpha": 1.0}})
    lone = {key: value for key, value in JOB.items() if key != "teachers"}
    lone |= {"teacher": {"model": "m"}, "data": {"train": "a.txt"}}
    with pytest.raises(ConfigError, match=r"loss\.balance: domains is for a job with teachers"):
        parse_config(lone | {"loss": {"balance": "domains"}})
    with pytest.raises(ConfigError, match="names the teacher math, but there is no section"):
        parse_config(lone | {"data": {"train": [MATH]}})
    named = {"kind": "train", "cache": {"fingerprint": "a" * 32}}
    with pytest.raises(ConfigError, match=r"cache\.fingerprint: it cannot be combined"):
        parse_config(JOB | named)
    with pytest.raises(ConfigError, match="kind: it cannot be combined with teachers"):
        parse_config(JOB | named | {"kind": "verify"})


def test_a_job_is_split_into_ordinary_ones() -> None:
    parts = split_job(parse_config(JOB | {"loss": {"balance": "domains"}}))
    assert [part.name for part in parts] == ["0.5 code and 0.5 math", "math"]
    assert [[member.weight for member in part.members] for part in parts] == [[0.5, 0.5], [1.0]]
    math = parts[1].members[0]
    lone = {key: value for key, value in JOB.items() if key != "teachers"}
    lone |= {"teacher": {"model": "m"}}
    lone["data"] = JOB["data"] | {"train": ["math/*.jsonl", "more.txt.gz"]}
    assert math.job == parse_config(lone)
    assert math.locate("/data/train/1") == "/data/train/2"
    assert math.locate("/teacher/model") == "/teachers/math/model"
    assert math.locate("/student/model") == "/student/model"
    (source,) = parts[0].members[0].job.data.train
    assert not isinstance(source, str) and source.path == "org/both" and source.route == ()


def test_a_job_of_one_teacher_is_one_part(tmp_path: Any) -> None:
    lone = {key: value for key, value in JOB.items() if key != "teachers"}
    config = parse_config(lone | {"teacher": {"model": "m"}, "data": {"train": "a.txt"}})
    (member,) = list_members(config)
    assert member.job is config and member.locate("/teacher/model") == "/teacher/model"


def test_ids_that_a_server_scores_are_left_out_for_other_teachers() -> None:
    job = changed("teachers.code", SERVER | {"proposal": "p"}, JOB)
    job = job | {"data": {"train": [MATH, CODE]}, "cache": {"k": 8}}
    jobs = {member.name: member.job for member in list_members(parse_config(job))}
    assert {name: each.cache.k for name, each in jobs.items()} == {"math": None, "code": 8}


@pytest.mark.parametrize(
    ("path", "is_text"),
    [
        ("a.txt", True), ("x/a.jsonl.zst", True), ("x/*", True), ("/abs/folder", True),
        ("./folder", True), ("s3://bucket/x", True), ("owner/name", False), ("name", False),
    ],
)  # fmt: skip
def test_a_path_that_is_no_id_of_a_hub_is_read_as_a_text(path: str, is_text: bool) -> None:
    spec = DatasetSpec.model_validate({"path": path, "teacher": "math"})
    assert spec.leave_route() == (path if is_text else DatasetSpec(path=path))
    parted = DatasetSpec.model_validate({"path": path, "teacher": "math", "split": "train[:9]"})
    assert parted.leave_route() == DatasetSpec(path=path, split="train[:9]")


def test_thirds_add_up() -> None:
    shares = {"math": 0.333333, "code": 0.666667}
    job = parse_config(changed("data.train.1.mixture", shares, JOB))
    weights = [member.weight for member in split_job(job)[0].members]
    assert sum(weights) == pytest.approx(1.0, abs=1e-15)
    assert isinstance(job, JobConfig) and parse_config(job.model_dump(mode="json")) == job
