"""The kinds of jobs and their stages: one table, which all rooms read.

    kind        stages               a job of it makes
    distill     capture, train       a cache and a student
    precompute  capture              a cache
    train       train                a student
    search      capture, search      a cache, and a student for each trial
    verify      verify               a verdict on a sealed cache
    fidelity    fidelity             a verdict on a sealed cache

A new kind is a ``Kind`` here. A new stage is also a function in ``kd.pipeline.TASKS``. The job
store, the workers and the client need no change. A kind may repeat a stage: the *turn* of a stage
counts the stages of its name that came before it in the job, so it is 0 for all kinds of today.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, WithJsonSchema
from pydantic_core import PydanticCustomError


@dataclass(frozen=True)
class JobStage:
    """One stage of a job.

    Attributes:
        name: What people see, and the name of its queue. Stages of one name share a queue.
        task: What runs it, a key of ``kd.pipeline.TASKS``.
        needs: The sections of the job without which it cannot run.
        makes: What it leaves behind.
        last_file: The file of the run folder that it writes last.
        taken_by: Who runs it: a worker, or the reconciler of the API, which needs no device.

    """

    name: str
    task: str
    needs: tuple[str, ...]
    makes: Literal["cache", "student", "students", "verdict"]
    last_file: str
    taken_by: Literal["worker", "reconciler"] = "worker"


CAPTURE = JobStage("precompute", "capture", ("teacher",), "cache", "cache.json")
TRAIN = JobStage("train", "train", ("student", "train"), "student", "report.json")
SEARCH = JobStage(
    "search", "search", ("student", "train", "search"), "students", "report.json", "reconciler"
)
# A check reads a whole cache as a capture writes one, so the same workers take it.
VERIFY = JobStage(CAPTURE.name, "verify", (), "verdict", "verify.json")
FIDELITY = JobStage(CAPTURE.name, "fidelity", ("teacher",), "verdict", "fidelity.json")


@dataclass(frozen=True)
class Kind:
    """A kind of jobs: its stages in order, and what it does in a few words."""

    name: str
    stages: tuple[JobStage, ...]
    meaning: str

    @property
    def needs(self) -> set[str]:
        """The sections that a job of this kind must have."""
        return {section for stage in self.stages for section in stage.needs}

    @property
    def captures(self) -> bool:
        """True if its jobs capture a teacher."""
        return any(stage.makes == "cache" for stage in self.stages)

    @property
    def checks(self) -> bool:
        """True if its jobs only check a sealed cache."""
        return all(stage.makes == "verdict" for stage in self.stages)

    @property
    def trains_one(self) -> bool:
        """True if its jobs end with one student."""
        return self.stages[-1].makes == "student"

    @property
    def last_file(self) -> str:
        """The file that a finished run of this kind has."""
        return self.stages[-1].last_file

    def list_turns(self) -> Iterator[tuple[JobStage, int]]:
        """Yield each stage in order, with its turn."""
        for place, stage in enumerate(self.stages):
            yield stage, sum(other.name == stage.name for other in self.stages[:place])

    def find_stage(self, name: str, turn: int = 0) -> JobStage:
        """Return the stage of this name and turn."""
        return self.stages[self._find_place(name, turn)]

    def find_next(self, name: str, turn: int = 0) -> tuple[JobStage, int] | None:
        """Return the stage that follows, and its turn; None if there is none."""
        place = self._find_place(name, turn)
        turns = list(self.list_turns())
        return turns[place + 1] if place + 1 < len(turns) else None

    def find_capture(self, name: str, turn: int = 0) -> tuple[JobStage, int] | None:
        """Return the stage, and its turn, that captured the cache of a later stage, if one did."""
        before = list(self.list_turns())[: self._find_place(name, turn)]
        return next((each for each in reversed(before) if each[0].makes == "cache"), None)

    def _find_place(self, name: str, turn: int) -> int:
        """The place of a stage in its kind. An unknown one, of a damaged record, is the last."""
        places = {(stage.name, own): place for place, (stage, own) in enumerate(self.list_turns())}
        return places.get((name, turn), len(self.stages) - 1)


_KINDS = (
    Kind("distill", (CAPTURE, TRAIN), "precompute, then train"),
    Kind("precompute", (CAPTURE,), "only capture the teacher"),
    Kind("train", (TRAIN,), "from a sealed cache, or on plain text with alpha 1"),
    Kind(
        "search",
        (CAPTURE, SEARCH),
        "precompute, then train many students to find the best settings",
    ),
    Kind("verify", (VERIFY,), "read a whole sealed cache and compare every digest"),
    Kind("fidelity", (FIDELITY,), "compare some records of a sealed cache with its teacher"),
)
KINDS = {kind.name: kind for kind in _KINDS}


def list_stage_names(taken_by: str | None = None) -> list[str]:
    """The names of all stages of all kinds; with ``taken_by`` of those that it takes."""
    stages = [stage for kind in KINDS.values() for stage in kind.stages]
    wanted = [stage.name for stage in stages if taken_by in (None, stage.taken_by)]
    return list(dict.fromkeys(wanted))


def list_kinds_without(section: str) -> str:
    """Return the kinds that do not need a section, as ``"a, b or c"``."""
    *others, last = [kind.name for kind in KINDS.values() if section not in kind.needs]
    return f"{', '.join(others)} or {last}"


def describe_kinds() -> str:
    """Return each kind with its meaning, as one line."""
    return "; ".join(f"{kind.name} = {kind.meaning}" for kind in KINDS.values()) + "."


def _require_known(name: str) -> str:
    if name not in KINDS:
        *others, last = [repr(each) for each in KINDS]
        expected = f"{', '.join(others)} or {last}"
        raise PydanticCustomError(
            "literal_error", "Input should be {expected}", {"expected": expected}
        )
    return name


#: The name of a kind, as a job, a record and a request give it.
KindName = Annotated[
    str, AfterValidator(_require_known), WithJsonSchema({"type": "string", "enum": list(KINDS)})
]
