"""A distillation on a number of devices: which of its models fit, and the time of its stages."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kd.config.job import JobConfig
from kd.memory.devices import HOST_DEVICES, DeviceRates
from kd.memory.training_phase import Place
from kd.memory.work import compute_cost
from kd.planning.devices import DeviceGroup
from kd.planning.distillation.limits import (
    Fleet,
    Limit,
    StageName,
    find_bound,
    list_capture_limits,
    list_tokenizing_limits,
    list_training_limits,
)
from kd.planning.distillation.models import PlannedModel, read_student, read_teacher
from kd.planning.distillation.rates import (
    Micro,
    StudentRate,
    TeacherRate,
    describe_training,
    rate_student,
    spread_teacher,
)
from kd.planning.distillation.request import PlanRequest
from kd.planning.distillation.sources import DEVICE_RATES
from kd.planning.distillation.storage import RecordSize, StoreSize, TokenCount


@dataclass(frozen=True)
class StageTime:
    """A stage on all devices: the tokens that it goes through, its rate, time and cost."""

    name: StageName
    tokens: int
    rate: float
    seconds: float
    device_hours: float
    cost: float | None
    bound: str
    source: str

    def to_json(self) -> dict[str, Any]:
        """Return the stage as JSON values."""
        return {
            "stage": self.name,
            "tokens": self.tokens,
            "tokens_per_second": float(f"{self.rate:.6g}"),
            "hours": float(f"{self.seconds / 3600:.6g}"),
            "device_hours": float(f"{self.device_hours:.6g}"),
            "cost": None if self.cost is None else float(f"{self.cost:.6g}"),
            "bound": self.bound,
            "source": self.source,
        }


@dataclass(frozen=True)
class PlannedJob:
    """A distillation to plan: its models, its text and its records."""

    config: JobConfig
    teacher: PlannedModel
    student: PlannedModel | None
    text: TokenCount
    records: RecordSize

    @classmethod
    def of(cls, config: JobConfig, request: PlanRequest, root: Path) -> PlannedJob:
        """Read the models of a job, and cut its text. Raises ``ConfigError``."""
        teacher = read_teacher(config, request.teacher, root)
        student = read_student(config, request.student, root, teacher)
        options = config.cache
        text = TokenCount(request.tokens, config.data.sequence_length, options.shard_sequences)
        width = teacher.plan.shape.width
        return cls(
            config, teacher, student, text, RecordSize.of(options, teacher.vocabulary, width)
        )  # fmt: skip

    @property
    def micro(self) -> Micro:
        """A micro-batch of the teacher."""
        batch = self.config.teacher.batch_size if self.config.teacher else 1
        return Micro(batch, self.text.length)


@dataclass(frozen=True)
class Fit:
    """A job on a number of devices of a kind: the rates of its models, None where they do not fit.

    A job without a student has no rate of one either.
    """

    job: PlannedJob
    kind: DeviceRates
    fleet: Fleet
    teacher: TeacherRate | None
    student: StudentRate | None

    @classmethod
    def of(cls, job: PlannedJob, kind: DeviceRates, count: int) -> Fit:
        """Find how the models of ``job`` run on ``count`` devices of ``kind``."""
        fleet = Fleet(count, math.ceil(count / HOST_DEVICES))
        teacher = spread_teacher(job.teacher, kind, job.micro, count)
        student = None
        if job.student is not None:
            group = DeviceGroup(Place.named(kind), count)
            training = describe_training(job.student, job.records, job.text, job.config, count)
            student = rate_student(training, group)
        return cls(job, kind, fleet, teacher, student)

    def list_limits(self) -> tuple[Limit, ...]:
        """The limits of all stages that fit."""
        job, fleet = self.job, self.fleet
        store = StoreSize.of(job.text, job.records.codec.vocabulary_size)
        limits = list_tokenizing_limits(store, fleet)
        if self.teacher is not None:
            limits += list_capture_limits(self.teacher, job.records, job.text, fleet)
        if self.student is not None:
            limits += list_training_limits(self.student, job.records, job.text, fleet)
        return limits

    def list_stages(self, price: float | None) -> Iterator[StageTime]:
        """The stages that fit, in their order; ``price`` is that of an hour of one device."""
        text, limits = self.job.text, self.list_limits()
        yield self._make_stage("tokenising", text.tokens, limits, price)
        if self.teacher is not None:
            yield self._make_stage("capture", text.tokens, limits, price)
        if self.student is not None:
            read = self.student.steps * self.student.step_tokens
            yield self._make_stage("training", read, limits, price)
            seconds = self.student.evaluation
            rate = self.student.evaluated / seconds
            bound = Limit("evaluation", "student", rate, True, DEVICE_RATES)
            yield self._make_stage("evaluation", self.student.evaluated, (bound,), price)

    def _make_stage(
        self, name: StageName, tokens: int, limits: tuple[Limit, ...], price: float | None
    ) -> StageTime:
        bound = find_bound(tuple(each for each in limits if each.stage == name))
        seconds = tokens / bound.full_at
        hours = self.fleet.devices * seconds / 3600
        return StageTime(
            name=name,
            tokens=tokens,
            rate=bound.full_at,
            seconds=seconds,
            device_hours=hours,
            cost=compute_cost(3600 * hours, price),
            bound=bound.name,
            source=bound.source,
        )

    def list_missing(self) -> list[str]:
        """Say which models do not fit on the devices."""
        devices = f"{self.fleet.devices} x {self.kind.name}"
        found = []
        if self.teacher is None:
            found.append(f"The teacher does not fit on {devices}, spread over all of them.")
        if self.job.student is not None and self.student is None:
            found.append(f"The student does not fit on {devices}; `kd plan JOB` prints what helps.")
        return found
