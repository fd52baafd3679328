"""One attempt at one stage: a claim, a child process, and a heartbeat between child and record.

    child --events--> Outbox --beat, about once a second--> record in Redis
    child <--signals, bytes-- Attempt <--go | cancel | pause | fenced-- the beat's reply

While Redis is away the child works on, and its events wait in the outbox.
"""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from redis.exceptions import RedisError

from cache.disk import storage_errors
from cache.errors import PotstillError, StorageError, StoreError
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.config.kinds import CAPTURE, KINDS
from kd.memory.host import OomKills
from kd.memory.model_memory import estimate_least_memory
from kd.progress import Event, HostPlace, SharedCapture
from kd.python.version import read_version
from services.settings import Settings
from services.store.jobs.gangs import GangTable
from services.store.jobs.leases import BEAT_SECONDS, BEATS_PER_LEASE, Capacity, Claim
from services.store.jobs.store import JobStore
from services.store.ranges import Membership, RangeTable, SharedTerms
from services.worker import failures
from services.worker.devices import WorkerDevice
from services.worker.heartbeat import Heartbeat
from services.worker.memory_limit import MemoryLimit, choose_limit_bytes
from services.worker.stage_child import EXIT_HELD, EXIT_PASSING, EXIT_STOPPED
from services.worker.stage_process import Child, start_child
from services.worker.together.gang import GangMember, find_host_counts, gather
from services.worker.together.range_server import RangeServer, count_workers, find_place

#: Time between two turns of the supervisor at most.
TURN_SECONDS = 0.25
#: Leases without Redis and without an event after which the leader of a gang counts as cut off.
CUT_OFF_LEASES = 3

#: What a child must do: go on, save its state and end, or end at once.
Instruction = Literal["go", "stop", "end"]

log = logging.getLogger("potstill.worker")


@dataclass(frozen=True)
class AttemptResult:
    """The end of an attempt: the job's status, "fenced", or "lost" if Redis could not be reached.

    ``held_lock`` is the lock of another process that does the same work. The claim is then still
    held. ``unfit`` says why no process could be started on this host; empty if one was started.
    """

    status: str
    held_lock: Path | None = None
    unfit: str = ""


@dataclass(eq=False)
class Attempt:
    """Supervises the child of one claim until it ends, and writes the outcome to the record.

    The last argument asks other workers to help with the capture of a job.
    """

    _store: JobStore
    _settings: Settings
    _claim: Claim
    _device: WorkerDevice
    _stopping: threading.Event
    _worker: str = ""
    _call_helpers: Callable[[Claim, int | None], None] = lambda *_: None
    _child: Child | None = None
    _gang: GangMember | None = None

    @property
    def _run_dir(self) -> Path:
        return self._settings.run_dir(self._claim.id)

    def run(self) -> AttemptResult:
        """Run the stage to its end."""
        kills = OomKills.count()
        try:
            config = parse_config(self._claim.config)
            server = self._make_range_server(config)
            hosts = find_host_counts(config, self._claim.stage)
            place = None
            if hosts[-1] > 1:
                place = self._gather(hosts)
                if place is None:
                    table = GangTable(self._store.redis)
                    return self._write(lambda: table.give_up(self._claim))
            given = (self._store, self._settings, self._device, self._claim, self._run_dir)
            with storage_errors(self._run_dir):
                child = self._child = start_child(*given, server, host=place)
        except (PotstillError, OSError, RedisError) as error:
            return self._record_failed_start(error)
        limit = choose_limit_bytes(config.resources, self._device)
        lease = self._settings.lease_seconds
        with (
            server or nullcontext(),
            self._gang or nullcontext(),
            child,
            Heartbeat(self._store, self._claim, lease, child.outbox, child.counters) as heartbeat,
        ):
            supervise(child, self._settings, limit, lambda: self._instruct(heartbeat))
            if self._gang is not None and is_unexplained(child):
                self._gang.await_loss(2 * lease)
        heartbeat.deliver(self._stopping)
        if heartbeat.reply == "fenced":
            return AttemptResult("fenced")
        if child.process.returncode == EXIT_HELD and child.held_lock is not None:
            return AttemptResult("running", child.held_lock)
        return self._write(lambda: self._conclude(child, limit, kills))

    def _make_range_server(self, config: JobConfig) -> RangeServer | None:
        """Return what hands out the shards of this stage; None if this worker is alone."""
        workers = count_workers(config)
        if self._claim.stage != CAPTURE.name or workers == 1 or not config.needs_cache:
            return None
        table = RangeTable(self._store.redis)
        place = find_place(self._settings, config)
        lease = self._settings.lease_seconds

        def open_table(shared: SharedCapture, shards: int) -> Membership | None:
            terms = SharedTerms(read_version(), place, shared)
            opened = table.open(self._claim, self._worker, lease, terms, shards, workers)
            self._call_helpers(self._claim, workers)
            return opened

        def report(event: Event) -> None:
            if self._child is not None:
                self._child.outbox.put(event)

        return RangeServer(table, lease, None, open_table, report)

    def _gather(self, hosts: range) -> HostPlace | None:
        """Gather the hosts of this stage; None if it cannot begin now. Raises ``RedisError``."""
        call = partial(self._call_helpers, self._claim, hosts[-1])
        capacity = Capacity(self._device.count, self._device.memory_bytes)
        given = (self._store, self._settings, self._claim, self._worker, capacity, hosts)
        found = gather(*given, self._stopping, call)
        if found is None:
            return None
        member, place = found
        table = GangTable(self._store.redis)
        self._gang = GangMember(table, self._settings.lease_seconds, member)
        return place

    def _record_failed_start(self, error: Exception) -> AttemptResult:
        """Record that no child started. If Redis is away, the job goes back to the queue.

        It also goes back if this host is at fault, as with a full disk: another worker may be able
        to run it. That costs an attempt, so that a job does not wait forever for such a host.
        """
        if isinstance(error, RedisError):
            return self._write(lambda: self._store.release(self._claim))
        failure = failures.describe_error(error)
        if isinstance(error, OSError | StorageError) and not isinstance(error, StoreError):
            ended = self._write(lambda: self._store.fail_attempt(self._claim, failure))
            return replace(ended, unfit=failure["detail"])
        return self._write(lambda: self._store.finish(self._claim, "failed", failure))

    def _write(self, conclude: Callable[[], str]) -> AttemptResult:
        return AttemptResult(retry_until_answered(conclude, self._stopping))

    def _instruct(self, heartbeat: Heartbeat) -> Instruction:
        """Choose what the child must do now. After a long outage it must stop."""
        if heartbeat.reply == "fenced" or (self._gang is not None and self._gang.is_over):
            return "end"
        if self._gang is not None and self._is_cut_off(heartbeat.outage_seconds):
            return "end"
        asked = heartbeat.reply in ("cancel", "pause") or self._stopping.is_set()
        asked = asked or (self._gang is not None and self._gang.last.reply == "grow")
        stops = asked or heartbeat.outage_seconds > self._settings.outage_seconds
        return "stop" if stops else "go"

    def _is_cut_off(self, outage: float) -> bool:
        """Whether this host reaches neither Redis nor, as it seems, the other hosts of its gang.

        They go on without it, and need the run folder, which its child holds. If only Redis is away
        while it saves or evaluates for long, it ends in vain: the next attempt does that again.
        """
        limit = CUT_OFF_LEASES * self._settings.lease_seconds
        child = self._child
        return outage > limit and child is not None and child.silence_timer.has_stuck(limit)

    def _conclude(self, child: Child, limit: int, kills: OomKills) -> str:
        store = self._store
        claim = self._claim
        code = child.process.returncode
        if code == 0 and child.result is not None:
            following = KINDS[claim.config["kind"]].find_next(claim.stage, claim.turn)
            if following is None:
                return store.finish(claim, "succeeded")
            stage, turn = following
            return store.advance(claim, stage.name, turn)
        if has_stopped(child):
            return store.release(claim)
        if self._gang is not None and self._gang.last.reply == "lost" and is_unexplained(child):
            return store.fail_attempt(claim, failures.describe_lost_host(self._gang.last.detail))
        was_killed = child.kill_reason == "memory" or code < 0
        least = None
        if was_killed:  # no other failure names the bytes that the job's models need at least
            least = estimate_least_memory(parse_config(claim.config), self._settings.root)
        where = f"stage {claim.stage}, attempt {claim.attempt}"
        short = OomKills.count().since(kills)
        failure = describe_end(child, where, self._settings, limit, self._run_dir, least, short)
        if was_killed or (code == EXIT_PASSING and child.error is not None):
            return store.fail_attempt(claim, failure)
        return store.finish(claim, "failed", failure)


def supervise(child: Child, settings: Settings, limit: int, ask: Callable[[], Instruction]) -> None:
    """Let a child work until it has ended. ``ask`` says in every turn what it must do.

    It is killed if it does not stop in time, is silent for too long, or needs more than ``limit``
    bytes of memory.
    """
    turn = min(TURN_SECONDS, settings.lease_seconds / BEATS_PER_LEASE)
    with MemoryLimit(child.process.pid, limit) as memory:
        while child.process.poll() is None and (wanted := ask()) != "end":
            child.send_heartbeat()
            if wanted == "stop":
                child.stop(settings.stop_grace_seconds)
            if child.kill_at is not None and time.monotonic() > child.kill_at:
                child.kill("grace")
            if child.silence_timer.is_silent(settings.silence_seconds):
                child.kill("silence")
            if memory.is_exceeded():
                child.kill("memory")
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(turn)
        child.end()
        if memory.is_exceeded():  # the kernel may have killed it
            child.kill_reason = "memory"


def has_stopped(child: Child) -> bool:
    """Return whether a child has ended because it was asked to."""
    asked = child.kill_at is not None and child.error is None
    return asked or child.process.returncode == EXIT_STOPPED


def is_unexplained(child: Child) -> bool:
    """Return whether a child has failed, and told no error of its own; it may have lost others."""
    if child.result is not None or has_stopped(child):
        return False
    return child.error is None or child.error["type"] == failures.INTERNAL


def describe_end(
    child: Child,
    where: str,
    settings: Settings,
    limit: int,
    run_dir: Path,
    least_memory: int | None = None,
    short_of_memory: str = "",
) -> failures.Failure:
    """Describe why the child that did the work ``where`` has failed (``services.worker.failures``).

    ``limit`` is that of its memory in bytes.
    """
    code = child.process.returncode
    log_file = run_dir / "log.txt"
    if child.kill_reason == "memory":
        return failures.describe_memory_limit(where, limit, least_memory)
    if code < 0 and child.kill_reason == "silence":
        seconds = child.silence_timer.patience(settings.silence_seconds)
        return failures.describe_hang(where, seconds, log_file)
    if code < 0:
        return failures.describe_kill(-code, where, short_of_memory, log_file, least_memory)
    return child.error or failures.describe_crash(code, where, log_file, child.hide)


def retry_until_answered(conclude: Callable[[], str], give_up: threading.Event) -> str:
    """Write the outcome until Redis answers. Repeating is safe: the second write is fenced.

    Once ``give_up`` is set, it tries once more and returns "lost". The lease then expires, and the
    reconciler takes the job back.
    """
    while True:
        last = give_up.is_set()
        try:
            return conclude()
        except RedisError:
            if last:
                log.warning("the end of the run could not be written to Redis")
                return "lost"
            give_up.wait(BEAT_SECONDS)
