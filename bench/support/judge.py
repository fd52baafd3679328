"""Check which promises a disturbed service kept, by its files, its records and its jobs' ledgers.

P1  an accepted job exists, and ends in a state that its client's wishes allow
P2  at most one live writer: once another process has written, the one before writes no more. Of a
    cache that several workers capture together, no process writes a shard twice
P3  one terminal event in each life, versions that only grow, statuses that follow the table in
    ``jobs.lua``
P4  all bytes equal those of an undisturbed run, nothing is written twice, no process is left over
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

from bench.support.faults import Answer, Fault, RequestedJob, Soak
from bench.support.harness import Parts
from bench.support.light_child import POISON, LightWork, compute_digests
from bench.support.small.caches import make_cache
from cache.checking.verify import verify_cache
from cache.disk import TEMPORARY_PREFIX, hash_file, list_file_sizes
from cache.remote.address import is_mirror
from cache.shards.names import MANIFEST
from cache.store import open_cache
from kd.client.wire.jobs import TERMINAL_STATUSES, Job

#: The statuses that may follow each status: the table at the top of jobs.lua, written a second time
#: so that a mistake there is found.
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


#: After these faults another process continues the work.
ENDS_A_PROCESS = {"child killed", "child terminated", "worker killed", "worker terminated"}


@dataclass(frozen=True)
class LedgerLine:
    """One line of a ledger: ``what`` the ``writer`` did to ``number`` of ``of``, and when."""

    at: float
    writer: str
    what: str
    of: str
    number: int
    job: str


def read_ledger(run_dir: Path) -> list[LedgerLine]:
    """Everything that the processes of one job did, in order; those that helped too."""
    lines = [
        LedgerLine(**json.loads(line), job=run_dir.name)
        for file in (run_dir / "ledger", *run_dir.glob("helpers/*/ledger"))
        if file.exists()
        for line in file.read_bytes().splitlines()
    ]
    return sorted(lines, key=lambda line: line.at)


def list_written(run_dir: Path, of: str | None = None) -> list[int]:
    """List the numbers of the shards or steps that were written, in order."""
    return [
        line.number
        for line in read_ledger(run_dir)
        if line.what == "wrote" and of in (None, line.of)
    ]


def read_ledgers(home: Path) -> list[LedgerLine]:
    """Read the ledgers of all jobs, ordered by time."""
    lines = [line for run_dir in sorted((home / "runs").iterdir()) for line in read_ledger(run_dir)]
    return sorted(lines, key=lambda line: line.at)


# ---------------------------------------------------------------------- promises


def check_writers(
    lines: Iterable[LedgerLine], shared: frozenset[str] = frozenset()
) -> Iterator[str]:
    """Check that each thing has one live writer, and that nothing is written twice.

    ``shared`` are the fingerprints of caches that several workers capture together: two of them may
    write one shard, of which the first one counts, but none of them writes it twice.
    """
    turns: dict[str, list[str]] = defaultdict(list)
    times: Counter[tuple[str, int]] = Counter()
    own: Counter[tuple[str, str, int]] = Counter()
    for line in lines:
        if line.what not in ("write", "wrote"):
            continue
        if line.of in shared:
            own[line.writer, line.of, line.number] += line.what == "wrote"
            continue
        turn = turns[line.of]
        if line.writer in turn[:-1]:
            late = f"{line.writer} of {line.job} writes {line.number}"
            yield f"{line.of}: {late} after {turn[-1]} has begun"
        if not turn or turn[-1] != line.writer:
            turn.append(line.writer)
        times[line.of, line.number] += line.what == "wrote"
    yield from (
        f"{of}: {writer} wrote number {number} {count} times"
        for (writer, of, number), count in own.items()
        if count > 1
    )
    twice = {where: count for where, count in times.items() if count > 1}
    yield from (
        f"{of}: number {number} was written {count} times" for (of, number), count in twice.items()
    )


def check_history(job_id: str, statuses: list[str], retries: int) -> Iterator[str]:
    """Check that each status may follow the one before, and that only a retry follows an end."""
    last: str | None = None
    for status in statuses:
        if status not in FOLLOWERS[last]:
            yield f"{job_id}: {status} after {last}, in {statuses}"
        last = status
    ends = sum(status in TERMINAL_STATUSES for status in statuses)
    if not 1 <= ends <= 1 + retries:
        yield f"{job_id}: {ends} terminal events with {retries} retries, in {statuses}"


def check_effects(job_id: str, events: list[tuple[str, dict[str, Any]]]) -> Iterator[str]:
    """Check that no step was reported twice."""
    steps = Counter(
        (data["step"], data.get("writer")) for kind, data in events if kind == "metrics"
    )
    yield from (
        f"{job_id}: step {step} was reported {times} times"
        for step, times in steps.items()
        if times > 1
    )


def check_versions(answers: Iterable[Answer]) -> Iterator[str]:
    """Check that versions seen by a client never go back, and that one version has one status."""
    seen: dict[str, tuple[int, str | None]] = {}
    for answer in answers:
        if answer.version is None:
            continue
        version, status = seen.get(answer.path, (0, None))
        if answer.version < version or (answer.version == version and answer.job_status != status):
            now = f"version {answer.version} {answer.job_status}"
            yield f"{answer.path}: {now} after {version} {status}"
        seen[answer.path] = (answer.version, answer.job_status)


def check_answers(
    answers: Iterable[Answer], allowed: Iterable[int] = (200, 202, 409)
) -> Iterator[str]:
    """Check that every answer has a promised status, and every 503 a Retry-After."""
    for answer in answers:
        if answer.status == 503 and not answer.retry_after:
            yield f"{answer.path}: 503 without Retry-After"
        elif answer.status not in (None, 503, *allowed):
            yield f"{answer.path}: {answer.status}"


def find_allowed_ends(order: RequestedJob, parents: dict[str, str]) -> set[str]:
    """Find the final statuses that the client's wishes allow; ``parents`` maps jobs to ends."""
    if order.body["name"].startswith(POISON):
        natural = {"failed"}
    elif any(end in ("failed", "cancelled") for end in parents.values()):
        return {"cancelled"}
    else:
        natural = {"succeeded"}
    heard = [
        number for number, wish in enumerate(order.wishes) if wish.action == "retry" and wish.heard
    ]
    cancels = [wish for wish in order.wishes[max(heard, default=0) :] if wish.action == "cancel"]
    if any(wish.heard == "cancelled" for wish in cancels) and not _has_unheard_retry(order):
        return {"cancelled"}
    was_cancelled = any(
        parent_wish.action == "cancel" for parent in order.parents for parent_wish in parent.wishes
    )
    return natural | ({"cancelled"} if cancels or was_cancelled else set())


def _has_unheard_retry(order: RequestedJob) -> bool:
    return any(wish.action == "retry" and wish.heard is None for wish in order.wishes)


# ---------------------------------------------------------------------- files


@remembered
def make_reference(folder: Path, seed: int, shards: int) -> tuple[dict[str, str], tuple[str, ...]]:
    """Make an undisturbed cache; returns the hashes of its files and its training digests."""
    made = make_cache(folder, LightWork(seed, shards, 0.0).identity)
    return hash_files(made), tuple(compute_digests(open_cache(made)))


def hash_files(folder: Path) -> dict[str, str]:
    """Hash every file of a folder with sha256."""
    return {name: hash_file(folder / name) for name in list_file_sizes(folder)}


def check_products(parts: Parts, name: str, job_id: str, spare: Path) -> Iterator[str]:
    """Check that cache and student of a succeeded job equal those of an undisturbed run."""
    work = LightWork.of(name)
    files, digests = make_reference(spare, work.seed, work.shards)
    folder = parts.settings.caches / work.identity.fingerprint
    if damage := verify_cache(folder):
        yield f"{job_id}: {folder.name} is damaged: {damage[:3]}"
    if is_mirror(folder):
        # The manifest has the digest of every file.
        if hash_file(folder / MANIFEST) != files[MANIFEST]:
            yield f"{job_id}: {folder.name} in the bucket differs from an undisturbed capture"
    elif hash_files(folder) != files:
        yield f"{job_id}: {folder.name} differs from an undisturbed capture"
    run_dir = parts.settings.run_dir(job_id)
    steps = {f"{number:06d}": digest for number, digest in enumerate(digests, 1)}
    if {file.name: file.read_text() for file in (run_dir / "steps").iterdir()} != steps:
        yield f"{job_id}: its steps differ from those of an undisturbed run"
    if (run_dir / "student" / "digest").read_text() != digests[-1]:
        yield f"{job_id}: its student differs from that of an undisturbed run"


def find_job_violations(parts: Parts, job_id: str, name: str, spare: Path) -> list[str]:
    """Every promise that one job broke; the job should have succeeded."""
    job = parts.job(job_id)
    events = parts.events(job_id)
    statuses = [data["status"] for kind, data in events if kind == "status"]
    found = [
        *check_history(job_id, statuses, 0),
        *check_effects(job_id, events),
        *check_writers(read_ledgers(parts.settings.home)),
    ]
    if job.status != "succeeded":
        return [*found, f"{job_id}: {job.status} {job.error}"]
    return [*found, *check_products(parts, name, job_id, spare)]


# ---------------------------------------------------------------------- a whole soak


def find_shared(orders: Iterable[RequestedJob]) -> frozenset[str]:
    """Find the fingerprints of the caches that several workers may capture together."""
    return frozenset(
        LightWork.of(order.body["name"]).identity.fingerprint
        for order in orders
        if order.body.get("resources", {}).get("workers", 1) != 1
    )


def find_left_over(caches: Path) -> list[str]:
    """Find temporary folders in sealed caches.

    Caches that were never sealed are not searched: a killed and then cancelled job leaves such a
    folder for `kd gc`.
    """
    sealed = [manifest.parent for manifest in caches.glob(f"*/{MANIFEST}")]
    return [
        f"left over: {path}" for folder in sealed for path in folder.rglob(f"{TEMPORARY_PREFIX}*")
    ]


class SoakVerdict:
    """The promises that a soak broke, and how long recovery took after each kind of fault."""

    def __init__(self, soak: Soak, spare: Path) -> None:
        self.soak = soak
        self.cluster = soak.cluster
        self.parts = soak.cluster.parts
        self.lines = read_ledgers(self.cluster.home)
        self.jobs = {order.id: self.parts.job(order.id) for order in soak.orders}
        self.violations = list(self._violations(spare))

    def _violations(self, spare: Path) -> Iterator[str]:
        yield from self._nothing_lost()
        yield from check_writers(self.lines, find_shared(self.soak.orders))
        yield from check_versions(self.soak.prober.answers)
        for client in (self.soak.prober.client, self.soak.client, self.soak.chaos.client):
            yield from check_answers(client.answers)
        for order in self.soak.orders:
            yield from self._of(order, spare)
        yield from (
            f"orphan: process {pid} of {job}" for pid, job in self.cluster.find_live_runs().items()
        )
        yield from find_left_over(self.parts.settings.caches)

    def _nothing_lost(self) -> Iterator[str]:
        wanted = {order.id for order in self.soak.orders}
        known = set(self.parts.jobs.redis.zrange("kd:index:*:*", 0, -1))  # type: ignore[arg-type]
        if len(wanted) != len(self.soak.orders):
            yield "two keys were given one job"
        yield from (f"{job_id}: accepted, and lost" for job_id in wanted - known)
        yield from (f"{job_id}: made, though nobody was told of it" for job_id in known - wanted)

    def _of(self, order: RequestedJob, spare: Path) -> Iterator[str]:
        job = self.jobs[order.id]
        events = self.parts.events(order.id)
        statuses = [data["status"] for kind, data in events if kind == "status"]
        yield from check_history(
            job.id, statuses, sum(wish.action == "retry" for wish in order.wishes)
        )
        yield from check_effects(job.id, events)
        allowed = find_allowed_ends(
            order, {parent.id: self.jobs[parent.id].status for parent in order.parents}
        )
        if job.status not in allowed:
            ended = f"{job.status} ({job.reason})"
            yield f"{job.id}: {ended}, but {order.wishes} allow {allowed}; {statuses}"
        name = order.body["name"]
        if job.status == "succeeded" and name != POISON:
            yield from check_products(self.parts, name, job.id, spare)
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
        """For each kind of fault: its name, how many there were, and its recoveries in seconds."""
        found = []
        for kind in self.soak.chaos.kinds:
            injuries = [injury for injury in self.soak.chaos.injuries if injury.kind == kind]
            times = [
                seconds for injury in injuries if (seconds := self._recovery(injury)) is not None
            ]
            found.append((kind, len(injuries), times))
        return found

    def _recovery(self, injury: Fault) -> float | None:
        if injury.victim in ("plane", "bucket"):
            return measure_time_to_ready(injury, self.soak.prober.answers)
        if injury.victim in self.cluster.workers and injury.job is not None:
            return self._until_useful(injury)
        return None

    def _until_useful(self, injury: Fault) -> float | None:
        """Seconds from the fault until the job's next write; None if a client stopped it."""
        order = next(order for order in self.soak.orders if order.id == injury.job)
        if order.wishes:
            return None
        lines = [line for line in self.lines if line.job == injury.job]
        ended = (
            {line.writer for line in lines if line.at <= injury.at}
            if injury.kind in ENDS_A_PROCESS
            else set()
        )
        after = (
            line.at
            for line in lines
            if line.what == "wrote" and line.at > injury.at and line.writer not in ended
        )
        found = next(after, None)
        return (
            None if found is None else found - injury.at - self._queued(order.id, injury.at, found)
        )

    def _queued(self, job_id: str, begin: float, end: float) -> float:
        """Seconds between ``begin`` and ``end`` in which the job was queued.

        In the queue a job waits for its turn, which is no part of a recovery.
        """
        offset = time.time() - time.monotonic()
        since = math.inf
        total = 0.0
        stream = f"kd:job:{job_id}:events"
        for event_id, fields in self.parts.jobs.redis.xrange(stream):  # type: ignore[union-attr]
            if fields["type"] != "status":
                continue
            at = int(event_id.partition("-")[0]) / 1000 - offset
            total += max(min(at, end) - max(since, begin), 0.0)
            since = at if json.loads(fields["data"])["status"] == "queued" else math.inf
        return total

    def longest_pause(self) -> float:
        """Return the longest time in seconds between two useful writes."""
        times = [line.at for line in self.lines if line.what == "wrote"]
        return max((b - a for a, b in pairwise(times)), default=0.0)

    def summary(self) -> Iterator[str]:
        """Return the lines of the summary."""
        ends = Counter(job.status for job in self.jobs.values())
        answers = self.soak.prober.answers
        heard = Counter(
            "none" if answer.status is None else str(answer.status) for answer in answers
        )
        faults = len(self.soak.chaos.injuries)
        yield f"{faults} faults, {len(self.jobs)} jobs, {self.soak.seconds:.0f} s"
        yield "jobs: " + ", ".join(f"{count} {status}" for status, count in sorted(ends.items()))
        written = [line.of for line in self.lines if line.what == "wrote"]
        writes = Counter("steps" if of.startswith("job_") else "shards" for of in written)
        counts = f"{writes['shards']} shards, {writes['steps']} steps"
        yield f"written: {counts}, each once and as undisturbed"
        shared = find_shared(self.soak.orders)
        helped = {line.writer for line in self.lines if line.of in shared}
        yield f"caches that several workers captured: {len(shared)}, by {len(helped)} processes"
        yield f"the longest pause without useful work: {self.longest_pause():.1f} s"
        yield "API: " + ", ".join(f"{count} × {status}" for status, count in sorted(heard.items()))
        yield f"violations: {len(self.violations)}"


def measure_time_to_ready(injury: Fault, answers: Iterable[Answer]) -> float | None:
    """Seconds from the end of the fault until a later question to /readyz succeeded."""
    ready = (
        answer.at + answer.seconds
        for answer in answers
        if answer.path == "/readyz" and answer.status == 200 and answer.at >= injury.healed
    )
    found = next(ready, None)
    return None if found is None else found - injury.healed


def render_recoveries(rows: Iterable[tuple[str, int, list[float]]], summary: Iterable[str]) -> str:
    """Return the table of recoveries and the summary, in markdown."""
    head = [
        "| fault | injected | measured | recovery, median s | most s |",
        "|---|--:|--:|--:|--:|",
    ]
    return "\n".join(
        [*head, *(_format_row(*row) for row in rows), "", *(f"- {line}" for line in summary)]
    )


def _format_row(kind: str, count: int, times: list[float]) -> str:
    middle, most = (f"{of(times):.1f}" if times else "-" for of in (statistics.median, max))
    return f"| {kind} | {count} | {len(times)} | {middle} | {most} |"
