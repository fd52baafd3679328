"""Jobs as users write them, for each section of the configuration; the problems of a wrong job."""

import copy
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from pydantic import BaseModel

from kd.config.cache import CacheConfig, TemperatureRange
from kd.config.checks import ChecksConfig
from kd.config.data import DataConfig, DatasetSpec
from kd.config.evaluation import EvaluationConfig
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.config.loss import FeatureConfig, LearnedTemperature, LossConfig, Ramp
from kd.config.optimisation.resuming import ResumeConfig
from kd.config.placement import Resources
from kd.config.search import Dimension, SearchConfig
from kd.config.student import LoraConfig, StudentConfig, StudentFromTeacher, StudentInit
from kd.config.teacher import TeacherConfig
from kd.config.train import TrainConfig
from kd.errors import ConfigError, Problem

JOB: dict[str, Any] = {
    "kind": "distill",
    "name": "tiny",
    "teacher": {"model": "somewhere/teacher", "batch_size": 4},
    "student": {"init": {"layers": 2, "hidden_size": 64}},
    "data": {
        "train": ["a.txt", {"path": "org/set", "split": "train[:1%]"}],
        "sequence_length": 128,
    },
    "cache": {"threshold": 0.05},
    "loss": {"alpha": 0.2},
    "train": {"max_steps": 10, "learning_rate": 1e-3, "lr_scheduler_kwargs": {"num_cycles": 2}},
}


def changed(path: str, value: Any, job: dict[str, Any] = JOB) -> dict[str, Any]:
    """Return a copy of the job with the value at ``path`` (such as ``a.b.0.c``) replaced."""
    job = copy.deepcopy(job)
    *parents, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    inner: Any = job
    for key in parents:
        inner = inner.setdefault(key, {}) if isinstance(key, str) else inner[key]
    inner[last] = value
    return job


RAMP = {"schedule": "linear", "start": 0.9, "end": 0.5}
LEARNED = {"mode": "adversarial", "min": 0.5, "max": 2.0}
TEMPERED = {"profile": "tempered", "temperatures": {"min": 0.5, "max": 2}}
SEARCH = {"space": {"x": {"min": 0, "max": 1}}}

# Jobs with the sections that JOB does not have.
LORA = JOB | {"student": {"model": "x", "lora": {}}}
CUT_OUT = JOB | {"student": {"from_teacher": {"layers": 1}}}
RAMPED = changed("loss.alpha", RAMP)
COOLING = JOB | {"cache": {"profile": "dense"}, "loss": {"temperature": RAMP}}
DROPPING = changed("train.dropout", RAMP)
LEARNING = JOB | {"cache": {"profile": "dense"}, "loss": {"temperature": LEARNED}}
SEARCHING = JOB | {"kind": "search", "search": SEARCH}


def problems(job: Any) -> list[Problem]:
    """Check that the job is refused; return its problems."""
    with pytest.raises(ConfigError) as caught:
        parse_config(job)
    assert caught.value.detail
    return caught.value.problems


def sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield each section class inside an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType, Annotated, tuple, dict):
        for part in typing.get_args(annotation):
            yield from sections(part)


def all_sections(root: type[BaseModel] = JobConfig) -> set[type[BaseModel]]:
    """Return the section classes of the tree below ``root``, with ``root``."""
    below = {found for field in root.model_fields.values() for found in sections(field.annotation)}
    return {root}.union(*(all_sections(section) for section in below))


#: Each section: its path in a job, its class, and a job that contains it.
LEVELS = [
    ("", JobConfig, JOB),
    ("teacher", TeacherConfig, JOB),
    ("student", StudentConfig, JOB),
    ("student.init", StudentInit, JOB),
    ("student.from_teacher", StudentFromTeacher, CUT_OUT),
    ("student.lora", LoraConfig, LORA),
    ("data", DataConfig, JOB),
    ("data.train.1", DatasetSpec, JOB),
    ("cache", CacheConfig, JOB),
    ("cache.temperatures", TemperatureRange, JOB),
    ("loss", LossConfig, JOB),
    ("loss.alpha", Ramp, RAMPED),
    ("loss.temperature", Ramp, COOLING),
    ("loss.temperature", LearnedTemperature, LEARNING),
    ("loss.features", FeatureConfig, JOB),
    ("train", TrainConfig, JOB),
    ("train.dropout", Ramp, DROPPING),
    ("checks", ChecksConfig, JOB),
    ("evaluation", EvaluationConfig, JOB),
    ("search", SearchConfig, SEARCHING),
    ("search.space.x", Dimension, SEARCHING),
    ("resume", ResumeConfig, JOB),
    ("resources", Resources, JOB),
]
