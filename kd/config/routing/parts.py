"""A job with several teachers as ordinary jobs: one for each teacher and the sources it reads.

A *part* is the sources of one route: all that one teacher reads, or one mixture of teachers. Each
teacher of a part is a *member*, whose ordinary job makes the cache that a job with that teacher and
those sources alone makes. What captures, checks or estimates takes the jobs of ``list_members``, so
that it knows of one teacher only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import ValidationError

from kd.config.data import Route, TextSources
from kd.config.job import JobConfig
from kd.errors import Problem


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
        records = job.cache.model_copy(update={"k": None}) if drops else job.cache
        own = {"teacher": teacher, "teachers": {}, "data": data, "cache": records, "loss": loss}
        members.append(Member(name, weight, JobConfig(**(dict(job) | own)), numbers))
    shares = [name if weight == 1.0 else f"{weight:.9g} {name}" for name, weight in route]
    # A name of metrics, in which trackers allow no other sign.
    return Part(" and ".join(shares), tuple(members))


def find_route_problems(job: JobConfig) -> Iterator[Problem]:
    """Find what does not fit of the teachers and the sources of a job; the ordinary jobs come last.

    Each of those is checked as a job of its own, under the names of its teachers.
    """
    found = list(_find_nameless(job) if job.teachers else _find_routed(job))
    yield from found
    if found or not job.teachers:
        return
    for route in sorted(_list_routes(job.data.train)):
        try:
            _make_part(job, route)
        except ValidationError as error:
            what = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
            detail = f"with {', '.join(dict(route))}: {what}."
            yield Problem("/teachers", detail, "Correct it, or leave this teacher out.")


def _list_places(job: JobConfig) -> Iterator[tuple[str, Route]]:
    for field in ("train", "validation"):
        for number, source in enumerate(getattr(job.data, field)):
            route = () if isinstance(source, str) else source.route
            yield f"/data/{field}/{number}", route


def _find_routed(job: JobConfig) -> Iterator[Problem]:
    """Find what a job of one teacher has no use for."""
    for pointer, route in _list_places(job):
        if route:
            detail = f"it names the teacher {route[0][0]}, but there is no section teachers."
            yield Problem(pointer, detail, "Add that section, or remove the name.")
    if job.loss.balance == "domains":
        yield Problem("/loss/balance", "domains is for a job with teachers.", "Set it to tokens.")


def _find_nameless(job: JobConfig) -> Iterator[Problem]:
    """Find sources without a teacher, and teachers without a source."""
    if "/teacher" in job.named_teachers:
        detail = "teacher and teachers are both given."
        yield Problem("/teacher", detail, "Move this section into teachers, under a name.")
    known = ", ".join(job.teachers)
    for pointer, route in _list_places(job):
        if not route:
            remedy = f"Write it as {{path: ..., teacher: NAME}}; teachers has {known}."
            yield Problem(pointer, "it names no teacher.", remedy)
        for name, _ in route:
            if name not in job.teachers:
                detail = f"it names the teacher {name}, but teachers has only {known}."
                yield Problem(pointer, detail, "Correct the name, or add the teacher.")
    routes, held_out = (_list_routes(sources) for sources in (job.data.train, job.data.validation))
    for name in sorted(job.teachers.keys() - {name for route in routes for name, _ in route}):
        detail = "no source of data.train names it."
        yield Problem(f"/teachers/{name}", detail, "Name it there, or remove it.")
    if job.data.validation and routes != held_out:
        yield Problem(
            "/data/validation",
            "it must name the same teachers and mixtures as data.train.",
            "Complete one of them, or remove it: then a share of each domain is held out.",
        )
    yield from _find_unserved(job, any(len(route) > 1 for route in routes))


def _find_unserved(job: JobConfig, mixes: bool) -> Iterator[Problem]:
    """Find what several teachers cannot serve; ``mixes``: some sources have a mixture of them."""
    no_search = "Use distill, precompute or train."
    each = "Capture each teacher with a job of its own: its cache is found then."
    refused = {
        "/kind": (job.kind not in ("distill", "precompute", "train"), no_search),
        "/loss/alpha": (not job.needs_cache, "Lower it: 1 needs no teacher."),
        "/cache/fingerprint": (job.cache.fingerprint is not None, "Remove it."),
        "/cache/extends": (job.cache.extends is not None, each),
        "/resources/workers": (job.resources.workers != 1, f"Set it to 1. {each}"),
        "/loss/divergence": (job.loss.divergence != "forward_kl", "Set it to forward_kl."),
        "/loss/temperature": (job.loss.learns_temperature, "Use a number or a schedule."),
        "/loss/features": (job.loss.features.weight > 0, "Set its weight to 0."),
    }
    for pointer, (is_refused, remedy) in refused.items():
        if is_refused:
            yield Problem(pointer, "it cannot be combined with teachers.", remedy)
    rules = job.cache.rules
    if mixes and not (rules.sampled or rules.any_divergence):
        yield Problem(
            "/cache/profile",
            f"a mixture needs records whose mean is the teacher, which {job.cache.profile} cuts.",
            "Set it to threshold, or give each source one teacher.",
        )
