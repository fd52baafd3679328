"""A job with several teachers as ordinary jobs: one for each teacher and the sources it reads.

A *part* is the sources of one route: all that one teacher reads, or one mixture of teachers. Each
teacher of a part is a *member*, whose ordinary job makes the cache that a job with that teacher and
those sources alone makes. What captures, checks or estimates takes the jobs of ``list_members``, so
that it knows of one teacher only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import ValidationError

from kd.config.data import Route, TextSources

if TYPE_CHECKING:
    from kd.config.job import JobConfig


@dataclass(frozen=True)
class Member:
    """A teacher of a part: its name and weight, and the ordinary job of its cache.

    ``numbers`` has the places of the job's sources in the whole job, by field.
    """

    name: str
    weight: float
    job: JobConfig
    numbers: dict[str, list[int]]

    def locate(self, pointer: str) -> str:
        """Return the place in the whole job of what ``pointer`` names in the ordinary one."""
        match pointer.split("/"):
            case ["", "teacher", *rest] if self.name:
                return "/".join(["", "teachers", self.name, *rest])
            case ["", "data", field, number, *rest] if field in self.numbers:
                return "/".join(["", "data", field, str(self.numbers[field][int(number)]), *rest])
        return pointer


@dataclass(frozen=True)
class Part:
    """The sources of one route, under a name for people, with a job for each of its teachers."""

    name: str
    members: tuple[Member, ...]


def split_job(job: JobConfig) -> tuple[Part, ...]:
    """Split a job into parts, in the order of their routes; a job of one teacher is one part."""
    if not job.teachers:
        return (Part("", (Member("", 1.0, job, {}),)),)
    return tuple(_make_part(job, route) for route in sorted(_list_routes(job.data.train)))


def list_members(job: JobConfig) -> list[Member]:
    """List the members of all parts."""
    return [member for part in split_job(job) for member in part.members]


def _list_routes(sources: TextSources) -> set[Route]:
    return {() if isinstance(source, str) else source.route for source in sources}


def _make_part(job: JobConfig, route: Route) -> Part:
    texts: dict[str, tuple[object, ...]] = {}
    numbers: dict[str, list[int]] = {}
    for field in ("train", "validation"):
        sources = {
            number: source.leave_route()
            for number, source in enumerate(getattr(job.data, field))
            if not isinstance(source, str) and source.route == route
        }
        texts[field], numbers[field] = tuple(sources.values()), list(sources)
    data = job.data.model_copy(update=texts)
    loss = job.loss.model_copy(update={"balance": "tokens"})
    members = []
    for name, weight in route:
        teacher = job.teachers[name]
        # A server's ids are of no use to a teacher that gives all of its distribution.
        drops = job.cache.sampled and teacher.proposal is None
        cache = job.cache.model_copy(update={"k": None}) if drops else job.cache
        own = {"teacher": teacher, "teachers": {}, "data": data, "cache": cache, "loss": loss}
        members.append(Member(name, weight, type(job)(**(dict(job) | own)), numbers))
    shares = [name if weight == 1.0 else f"{weight:.3g} {name}" for name, weight in route]
    return Part(" + ".join(shares), tuple(members))


def require_routes(job: JobConfig) -> None:
    """Raise ``ValueError`` if the teachers and the sources of a job do not fit each other.

    The ordinary jobs are checked too, each under the name of its teacher.
    """
    if found := next(_find_faults(job), None):
        raise ValueError(found)
    if not job.teachers:
        return
    for route in sorted(_list_routes(job.data.train)):
        try:
            _make_part(job, route)
        except ValidationError as error:
            what = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
            raise ValueError(f"with teachers {', '.join(dict(route))}: {what}") from None


def _find_faults(job: JobConfig) -> Iterator[str]:
    """Yield what is wrong, with its place and a remedy."""
    fields = ("train", "validation")
    placed = [
        (f"data.{field}.{number}", () if isinstance(source, str) else source.route)
        for field in fields
        for number, source in enumerate(getattr(job.data, field))
    ]
    if not job.teachers:
        for place, route in placed:
            if route:
                what = f"{place} names the teacher {route[0][0]}"
                yield f"{what}, but there is no section teachers: add it, or remove the name"
        if job.loss.balance == "domains":
            yield "loss.balance domains is for a job with teachers: set it to tokens"
        return
    if job.teacher is not None:
        yield "teacher and teachers are both given: move the section teacher into teachers"
    known = ", ".join(job.teachers)
    for place, route in placed:
        if not route:
            yield f"{place} names no teacher: write it as {{path: ..., teacher: NAME}} ({known})"
        for name, _ in route:
            if name not in job.teachers:
                yield f"{place} names the teacher {name}, but teachers has only {known}"
    routes, held_out = (_list_routes(getattr(job.data, field)) for field in fields)
    for name in job.teachers.keys() - {name for route in routes for name, _ in route}:
        yield f"teachers.{name} is named by no source of data.train: name it, or remove it"
    if job.data.validation and routes != held_out:
        yield (
            "data.train and data.validation must name the same teachers and mixtures: complete "
            "one of them, or remove data.validation, so that a share of each is held out"
        )
    yield from _find_unserved(job, any(len(route) > 1 for route in routes))


def _find_unserved(job: JobConfig, mixes: bool) -> Iterator[str]:
    """Yield what several teachers cannot serve; ``mixes``: some sources have a mixture of them."""
    refused = {
        f"kind {job.kind}: use distill, precompute or train": job.kind
        not in ("distill", "precompute", "train"),
        "loss.alpha 1, which needs no teacher: lower it": not job.needs_cache,
        "cache.fingerprint: remove it, because each teacher has a cache of its own":
            job.cache.fingerprint is not None,
        "cache.extends: capture the longer text with a job of one teacher":
            job.cache.extends is not None,
        "resources.workers: capture each teacher with a job of its own, whose cache is found then":
            job.resources.workers != 1,
        "student.from_teacher: save such a student with a job of one teacher": job.cuts_teacher,
        "evaluation.teacher: set it to false; the report compares with the records":
            job.evaluation.teacher,
        f"loss.divergence {job.loss.divergence}: use forward_kl":
            job.loss.divergence != "forward_kl",
        "a learned loss.temperature: use a number or a schedule": job.loss.learns_temperature,
        "loss.features: set its weight to 0": job.loss.features.weight > 0,
    }  # fmt: skip
    yield from (
        f"teachers cannot be combined with {what}" for what, is_so in refused.items() if is_so
    )
    rules = job.cache.rules
    if mixes and not (rules.sampled or rules.any_divergence):
        yield (
            f"a mixture needs records whose mean is the teacher, but cache.profile "
            f"{job.cache.profile} cuts it off: use threshold, or one teacher for each source"
        )
