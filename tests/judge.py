"""Says what a service that was hurt has kept of its promises, by what lies on disk and in the record, and by ledgers.

P1  a job that was accepted is there, and ends in the state that its client's wishes allow
P2  at most one live writer: once another process has written, the one before writes no more
P3  one terminal event a life, versions that only grow, statuses that follow the table in ``jobs.lua``
P4  what was written is byte for byte what an undisturbed run writes; nothing is written twice; no orphan is left
P6  the API answers 200, 202 or 503 with Retry-After, and nothing else
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache as remembered
from itertools import pairwise
from pathlib import Path
from typing import Any

from cache.disk import TEMPORARY, file_sha256, files_below
from cache.store import MANIFEST, open_cache, verify
from cache.testing import make_cache
from services.schemas import TERMINAL, Job
from tests.chaos import Answer, Chaos, Injury, Order, Soak
from tests.harness import Parts
from tests.light_child import POISON, Work, trained

#: From each status, those that may follow; the statuses of A.3 and the table at the head of jobs.lua.
FOLLOWERS: dict[str | None, set[str]] = {
    None: {"waiting", "queued"},
    "waiting": {"queued", "paused", "cancelled", "failed"},
    "queued": {"running", "paused", "cancelled", "failed"},
    "running": {"queued", "pausing", "cancelling", "succeeded", "failed"},
    "pausing": {"paused", "running", "cancelling", "succeeded", "failed"},
    "cancelling": {"cancelled", "succeeded", "failed"},
    "paused": {"waiting", "queued", "cancelled", "failed"},
    "failed": {"waiting", "queued"},
    "cancelled": {"waiting", "queued"},
    "succeeded": set(),
}


#: After these the work goes on in another process.
ENDS_A_PROCESS = {"child killed", "child terminated", "worker killed", "worker terminated"}


@dataclass(frozen=True)
class Line:
    """One line of a ledger."""

    at: float
    writer: str
    what: str
    of: str
    number: int
    job: str


def ledger(run_dir: Path) -> list[Line]:
    """What the processes of one job have done, in the order in which they did it."""
    file = run_dir / "ledger"
    lines = [json.loads(line) for line in file.read_bytes().splitlines()] if file.exists() else []
    return [Line(**line, job=run_dir.name) for line in lines]


def wrote(run_dir: Path, of: str | None = None) -> list[int]:
    """The shards or steps that were written, in order; each once where nothing was done twice."""
    return [line.number for line in ledger(run_dir) if line.what == "wrote" and of in (None, line.of)]


def ledgers(home: Path) -> list[Line]:
    """Those of every job, by time."""
    lines = [line for run_dir in sorted((home / "runs").iterdir()) for line in ledger(run_dir)]
    return sorted(lines, key=lambda line: line.at)


# ---------------------------------------------------------------------- single promises; each yields violations


def writers(lines: Iterable[Line]) -> Iterator[str]:
    """At most one live writer of each thing, and nothing written twice."""
    turns: dict[str, list[str]] = defaultdict(list)
    times: Counter[tuple[str, int]] = Counter()
    for line in lines:
        if line.what not in ("write", "wrote"):
            continue
        turn = turns[line.of]
        if line.writer in turn[:-1]:
            yield f"{line.of}: {line.writer} of {line.job} writes {line.number} after {turn[-1]} has begun"
        if not turn or turn[-1] != line.writer:
            turn.append(line.writer)
        times[line.of, line.number] += line.what == "wrote"
    twice = {where: count for where, count in times.items() if count > 1}
    yield from (f"{of}: number {number} was written {count} times" for (of, number), count in twice.items())


def history(job_id: str, statuses: list[str], retries: int) -> Iterator[str]:
    """Every status follows from the one before; a life has one end, and only a retry begins another."""
    last: str | None = None
    for status in statuses:
        if status not in FOLLOWERS[last]:
            yield f"{job_id}: {status} after {last}, in {statuses}"
        last = status
    ends = sum(status in TERMINAL for status in statuses)
    if not 1 <= ends <= 1 + retries:
        yield f"{job_id}: {ends} terminal events with {retries} retries, in {statuses}"


def effects(job_id: str, events: list[tuple[str, dict[str, Any]]]) -> Iterator[str]:
    """No event has come twice."""
    steps = Counter((data["step"], data.get("writer")) for kind, data in events if kind == "metrics")
    yield from (f"{job_id}: step {step} was reported {times} times" for step, times in steps.items() if times > 1)


def versions(answers: Iterable[Answer]) -> Iterator[str]:
    """The version that a client sees never goes back, and one version has one status."""
    seen: dict[str, tuple[int, str | None]] = {}
    for answer in answers:
        if answer.version is None:
            continue
        version, status = seen.get(answer.path, (0, None))
        if answer.version < version or (answer.version == version and answer.job_status != status):
            yield f"{answer.path}: version {answer.version} {answer.job_status} after {version} {status}"
        seen[answer.path] = (answer.version, answer.job_status)


def promised_answers(answers: Iterable[Answer], allowed: Iterable[int] = (200, 202, 409)) -> Iterator[str]:
    """Only statuses that are promised; a 503 says when to try again."""
    for answer in answers:
        if answer.status == 503 and not answer.retry_after:
            yield f"{answer.path}: 503 without Retry-After"
        elif answer.status not in (None, 503, *allowed):
            yield f"{answer.path}: {answer.status}"


def allowed_ends(order: Order, parents: dict[str, str]) -> set[str]:
    """The final statuses that the client's wishes leave open; ``parents`` are those of its order, with their ends."""
    if order.body["name"].startswith(POISON):
        natural = {"failed"}
    elif any(end in ("failed", "cancelled") for end in parents.values()):
        return {"cancelled"}
    else:
        natural = {"succeeded"}
    heard = [number for number, wish in enumerate(order.wishes) if wish.action == "retry" and wish.heard]
    cancels = [wish for wish in order.wishes[max(heard, default=0) :] if wish.action == "cancel"]
    if any(wish.heard == "cancelled" for wish in cancels) and not _retry_unheard(order):
        return {"cancelled"}
    was_cancelled = any(parent_wish.action == "cancel" for parent in order.parents for parent_wish in parent.wishes)
    return natural | ({"cancelled"} if cancels or was_cancelled else set())


def _retry_unheard(order: Order) -> bool:
    return any(wish.action == "retry" and wish.heard is None for wish in order.wishes)


# ---------------------------------------------------------------------- what lies on disk


@remembered
def reference(folder: Path, seed: int, shards: int) -> tuple[dict[str, str], tuple[str, ...]]:
    """Files and training digests of a cache that nobody has disturbed."""
    made = make_cache(folder, Work(seed, shards, 0.0).identity)
    return contents(made), tuple(trained(open_cache(made)))


def contents(folder: Path) -> dict[str, str]:
    """Every file of a folder with its sha256."""
    return {name: file_sha256(folder / name) for name in files_below(folder)}


def products(parts: Parts, name: str, job_id: str, spare: Path) -> Iterator[str]:
    """The cache and the student of a job that succeeded are those of an undisturbed run."""
    work = Work.of(name)
    files, digests = reference(spare, work.seed, work.shards)
    folder = parts.settings.caches / work.identity.fingerprint
    if damage := verify(folder):
        yield f"{job_id}: {folder.name} is damaged: {damage[:3]}"
    if contents(folder) != files:
        yield f"{job_id}: {folder.name} differs from an undisturbed capture"
    run_dir = parts.settings.run_dir(job_id)
    steps = {f"{number:06d}": digest for number, digest in enumerate(digests, 1)}
    if {file.name: file.read_text() for file in (run_dir / "steps").iterdir()} != steps:
        yield f"{job_id}: its steps differ from those of an undisturbed run"
    if (run_dir / "student" / "digest").read_text() != digests[-1]:
        yield f"{job_id}: its student differs from that of an undisturbed run"


def job_violations(parts: Parts, job_id: str, name: str, spare: Path) -> list[str]:
    """What one job that was to succeed has not kept."""
    job, events = parts.job(job_id), parts.events(job_id)
    statuses = [data["status"] for kind, data in events if kind == "status"]
    found = [*history(job_id, statuses, 0), *effects(job_id, events), *writers(ledgers(parts.settings.home))]
    if job.status != "succeeded":
        return [*found, f"{job_id}: {job.status} {job.error}"]
    return [*found, *products(parts, name, job_id, spare)]


# ---------------------------------------------------------------------- a whole soak


def left_over(caches: Path) -> list[str]:
    """Temporary folders in sealed caches; what a killed and then cancelled job never sealed is for `kd cache gc`."""
    sealed = [manifest.parent for manifest in caches.glob(f"*/{MANIFEST}")]
    return [f"left over: {path}" for folder in sealed for path in folder.rglob(f"{TEMPORARY}*")]


class Verdict:
    """All that a soak has not kept, and how long each kind of fault took to get over."""

    def __init__(self, soak: Soak, spare: Path) -> None:
        self.soak, self.cluster = soak, soak.cluster
        self.parts = soak.cluster.parts
        self.lines = ledgers(self.cluster.home)
        self.jobs = {order.id: self.parts.job(order.id) for order in soak.orders}
        self.violations = list(self._violations(spare))

    def _violations(self, spare: Path) -> Iterator[str]:
        yield from self._nothing_lost()
        yield from writers(self.lines)
        yield from versions(self.soak.prober.answers)
        for client in (self.soak.prober.client, self.soak.client, self.soak.chaos.client):
            yield from promised_answers(client.answers)
        for order in self.soak.orders:
            yield from self._of(order, spare)
        yield from (f"orphan: process {pid} of {job}" for pid, job in self.cluster.runs_alive().items())
        yield from left_over(self.parts.settings.caches)

    def _nothing_lost(self) -> Iterator[str]:
        wanted = {order.id for order in self.soak.orders}
        known = set(self.parts.jobs.redis.zrange("kd:index:*:*", 0, -1))  # type: ignore[arg-type]
        if len(wanted) != len(self.soak.orders):
            yield "two keys were given one job"
        yield from (f"{job_id}: accepted, and lost" for job_id in wanted - known)
        yield from (f"{job_id}: made, though nobody was told of it" for job_id in known - wanted)

    def _of(self, order: Order, spare: Path) -> Iterator[str]:
        job, events = self.jobs[order.id], self.parts.events(order.id)
        statuses = [data["status"] for kind, data in events if kind == "status"]
        yield from history(job.id, statuses, sum(wish.action == "retry" for wish in order.wishes))
        yield from effects(job.id, events)
        allowed = allowed_ends(order, {parent.id: self.jobs[parent.id].status for parent in order.parents})
        if job.status not in allowed:
            yield f"{job.id}: {job.status} ({job.reason}), but {order.wishes} allow {allowed}; {statuses}"
        name = order.body["name"]
        if job.status == "succeeded" and name != POISON:
            yield from products(self.parts, name, job.id, spare)
        if job.status == "failed":
            yield from self._rightly_failed(job)

    def _rightly_failed(self, job: Job) -> Iterator[str]:
        begun = sum(line.what == "begin" for line in self.lines if line.job == job.id)
        if job.error is None or job.error.type not in ("worker_lost", "out_of_memory"):
            yield f"{job.id}: failed with {job.error}"
        if begun > job.attempt:
            yield f"{job.id}: {begun} executions in {job.attempt} attempts"

    # -- the table

    def rows(self) -> list[tuple[str, int, list[float]]]:
        """Kind of fault, how many there were, and the seconds that it took to get over those that can be measured."""
        found = []
        for kind in Chaos.KINDS:
            injuries = [injury for injury in self.soak.chaos.injuries if injury.kind == kind]
            times = [seconds for injury in injuries if (seconds := self._recovery(injury)) is not None]
            found.append((kind, len(injuries), times))
        return found

    def _recovery(self, injury: Injury) -> float | None:
        if injury.victim == "plane":
            return until_ready(injury, self.soak.prober.answers)
        if injury.victim in self.cluster.workers and injury.job is not None:
            return self._until_useful(injury)
        return None

    def _until_useful(self, injury: Injury) -> float | None:
        """From the fault until the next write for that job; None where a client stopped it, or it had nothing to do."""
        order = next(order for order in self.soak.orders if order.id == injury.job)
        if order.wishes:
            return None
        lines = [line for line in self.lines if line.job == injury.job]
        ended = {line.writer for line in lines if line.at <= injury.at} if injury.kind in ENDS_A_PROCESS else set()
        after = (line.at for line in lines if line.what == "wrote" and line.at > injury.at and line.writer not in ended)
        found = next(after, None)
        return None if found is None else found - injury.at - self._queued(order.id, injury.at, found)

    def _queued(self, job_id: str, begin: float, end: float) -> float:
        """Seconds of a span that the job stood in the queue: there it waits for its turn, and not for a recovery."""
        offset, since, total = time.time() - time.monotonic(), math.inf, 0.0
        for event_id, fields in self.parts.jobs.redis.xrange(f"kd:job:{job_id}:events"):  # type: ignore[union-attr]
            if fields["type"] != "status":
                continue
            at = int(event_id.partition("-")[0]) / 1000 - offset
            total += max(min(at, end) - max(since, begin), 0.0)
            since = at if json.loads(fields["data"])["status"] == "queued" else math.inf
        return total

    def longest_pause(self) -> float:
        """Seconds without useful work, at the most, while there was any to do."""
        times = [line.at for line in self.lines if line.what == "wrote"]
        return max((b - a for a, b in pairwise(times)), default=0.0)

    def summary(self) -> Iterator[str]:
        """What it all came to."""
        ends = Counter(job.status for job in self.jobs.values())
        answers = self.soak.prober.answers
        heard = Counter("none" if answer.status is None else str(answer.status) for answer in answers)
        yield f"{len(self.soak.chaos.injuries)} faults, {len(self.jobs)} jobs, {self.soak.seconds:.0f} s"
        yield "jobs: " + ", ".join(f"{count} {status}" for status, count in sorted(ends.items()))
        written = [line.of for line in self.lines if line.what == "wrote"]
        writes = Counter("steps" if of.startswith("job_") else "shards" for of in written)
        yield f"written: {writes['shards']} shards, {writes['steps']} steps, each once and as undisturbed"
        yield f"the longest pause without useful work: {self.longest_pause():.1f} s"
        yield "API: " + ", ".join(f"{count} × {status}" for status, count in sorted(heard.items()))
        yield f"violations: {len(self.violations)}"


def until_ready(injury: Injury, answers: Iterable[Answer]) -> float | None:
    """From when the cause was gone until /readyz said yes to a question that was asked after that."""
    ready = (
        answer.at + answer.seconds
        for answer in answers
        if answer.path == "/readyz" and answer.status == 200 and answer.at >= injury.healed
    )
    found = next(ready, None)
    return None if found is None else found - injury.healed


def render(rows: Iterable[tuple[str, int, list[float]]], summary: Iterable[str]) -> str:
    """The table of recoveries, and what it all came to, in markdown."""
    head = ["| fault | injected | measured | recovery, median s | most s |", "|---|--:|--:|--:|--:|"]
    return "\n".join([*head, *(_row(*row) for row in rows), "", *(f"- {line}" for line in summary)])


def _row(kind: str, count: int, times: list[float]) -> str:
    middle, most = (f"{of(times):.1f}" if times else "-" for of in (statistics.median, max))
    return f"| {kind} | {count} | {len(times)} | {middle} | {most} |"
