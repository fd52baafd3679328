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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

from cache.disk import storage_errors
from cache.errors import PotstillError, StorageError, StoreError
from kd.config.jobfile import parse_config
from kd.config.kinds import CAPTURE, KINDS
from kd.memory.host import OomKills
from kd.memory.model_memory import estimate_least_memory
from services.settings import Settings
from services.store.jobs.leases import BEAT_SECONDS, BEATS_PER_LEASE, Claim
from services.store.jobs.store import JobStore
from services.store.ranges import Membership, RangeTable
from services.worker.devices import WorkerDevice
from services.worker.failures import (
    describe_crash,
    describe_error,
    describe_hang,
    describe_kill,
    describe_memory_limit,
)
from services.worker.heartbeat import Heartbeat
from services.worker.helping import count_workers, describe_place
from services.worker.memory_limit import MemoryLimit, choose_limit_bytes
from services.worker.range_server import RangeServer
from services.worker.stage_child import EXIT_HELD, EXIT_PASSING, EXIT_STOPPED
from services.worker.stage_process import Child, StageJob, prepare_child, start_child

#: Time between two turns of the supervisor at most.
TURN_SECONDS = 0.25

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


class Attempt:
    """Supervises the child of one claim until it ends, and writes the outcome to the record."""

    def __init__(
        self,
        store: JobStore,
        settings: Settings,
        claim: Claim,
        stage: str,
        device: WorkerDevice,
        stopping: threading.Event,
        worker: str = "",
        call_helpers: Callable[[str, int | None], None] = lambda *_: None,
    ) -> None:
        """``call_helpers`` asks other workers to help with the capture of a job."""
        self._worker = worker
        self._call_helpers = call_helpers
        self._child: Child | None = None
        self._store = store
        self._settings = settings
        self._claim = claim
        self._stage = stage
        self._device = device
        self._stopping = stopping
        self._run_dir = settings.run_dir(claim.id)
        self._where = f"stage {stage}, attempt {claim.attempt}"

    def run(self) -> AttemptResult:
        """Run the stage to its end."""
        kills = OomKills.count()
        try:
            server = self._make_range_server()
            child = self._start(server)
        except (PotstillError, OSError, RedisError) as error:
            return self._record_failed_start(error)
        limit = choose_limit_bytes(parse_config(self._claim.config).resources, self._device)
        with (
            server or nullcontext(),
            child,
            MemoryLimit(child.process.pid, limit) as memory,
            Heartbeat(
                self._store, self._claim, self._settings.lease_seconds, child.outbox, child.counters
            ) as heartbeat,
        ):
            while child.process.poll() is None and heartbeat.reply != "fenced":
                child.send_heartbeat()
                self._govern(child, heartbeat)
                if memory.is_exceeded():
                    child.kill("memory")
                self._wait(child)
            if heartbeat.reply == "fenced":
                child.kill("fenced")
            child.end()
        heartbeat.deliver(self._stopping)
        if heartbeat.reply == "fenced":
            return AttemptResult("fenced")
        if child.process.returncode == EXIT_HELD and child.held_lock is not None:
            return AttemptResult("running", child.held_lock)
        return AttemptResult(
            retry_until_answered(lambda: self._conclude(child, kills, memory), self._stopping)
        )

    def _make_range_server(self) -> RangeServer | None:
        """Return what hands out the shards of this stage; None where this worker is alone."""
        config = parse_config(self._claim.config)
        workers = count_workers(config)
        if self._stage != CAPTURE.name or workers == 1 or not config.needs_cache:
            return None
        table = RangeTable(self._store.redis)
        place = describe_place(self._settings, config)
        lease = self._settings.lease_seconds

        def open_table(shared: dict[str, Any], shards: int) -> Membership | None:
            opened = table.open(self._claim, self._worker, lease, shared | place, shards, workers)
            self._call_helpers(self._claim.id, workers)
            return opened

        return RangeServer(table, lease, open_table=open_table, report=self._take_progress)

    def _take_progress(self, event: dict[str, Any]) -> None:
        if self._child is not None:
            self._child.outbox.put(event)

    def _start(self, server: RangeServer | None) -> Child:
        claim = self._claim
        job = StageJob(claim.id, self._stage, claim.owner, claim.config, claim.turn)
        with storage_errors(self._run_dir):
            order, environment = prepare_child(
                self._store, self._settings, self._device, job, self._run_dir
            )
            self._child = start_child(self._settings, order, environment, server)
        return self._child

    def _record_failed_start(self, error: Exception) -> AttemptResult:
        """Record that no child started. If Redis is away, the job goes back to the queue.

        It also goes back if this host is at fault, as with a full disk: another worker may be able
        to run it. That costs an attempt, so that a job does not wait forever for such a host.
        """
        if isinstance(error, RedisError):
            return AttemptResult(
                retry_until_answered(lambda: self._store.release(self._claim), self._stopping)
            )
        failure = describe_error(error)
        if isinstance(error, OSError | StorageError) and not isinstance(error, StoreError):
            status = retry_until_answered(
                lambda: self._store.fail_attempt(self._claim, failure), self._stopping
            )
            return AttemptResult(status, unfit=failure["detail"])
        return AttemptResult(
            retry_until_answered(
                lambda: self._store.finish(self._claim, "failed", failure), self._stopping
            )
        )

    def _govern(self, child: Child, heartbeat: Heartbeat) -> None:
        """Stop the child on request, and kill it if it does not obey or is silent for too long."""
        if self._is_to_stop(heartbeat):
            child.stop(self._settings.stop_grace_seconds)
        if child.kill_at is not None and time.monotonic() > child.kill_at:
            child.kill("grace")
        if child.silence_timer.is_silent(self._settings.silence_seconds):
            child.kill("silence")

    def _is_to_stop(self, heartbeat: Heartbeat) -> bool:
        """Whether the child must save its state and end: on request, or after a long outage."""
        asked = heartbeat.reply in ("cancel", "pause") or self._stopping.is_set()
        return asked or heartbeat.outage_seconds > self._settings.outage_seconds

    def _wait(self, child: Child) -> None:
        with suppress(subprocess.TimeoutExpired):
            child.process.wait(min(TURN_SECONDS, self._settings.lease_seconds / BEATS_PER_LEASE))

    def _conclude(self, child: Child, kills: OomKills, memory: MemoryLimit) -> str:
        store = self._store
        claim = self._claim
        code = child.process.returncode
        if code == 0 and child.result is not None:
            following = KINDS[claim.config["kind"]].find_next(self._stage, claim.turn)
            if following is None:
                return store.finish(claim, "succeeded")
            stage, turn = following
            return store.advance(claim, stage.name, turn)
        if code == EXIT_STOPPED or (child.kill_at is not None and child.error is None):
            return store.release(claim)
        log_file = self._run_dir / "log.txt"
        if memory.is_exceeded():
            failure = describe_memory_limit(self._where, memory.limit_bytes, self._least_memory())
            return store.fail_attempt(claim, failure)
        if code < 0 and child.kill_reason == "silence":
            seconds = child.silence_timer.patience(self._settings.silence_seconds)
            return store.fail_attempt(claim, describe_hang(self._where, seconds, log_file))
        if code < 0:
            short = OomKills.count().since(kills)
            failure = describe_kill(-code, self._where, short, log_file, self._least_memory())
            return store.fail_attempt(claim, failure)
        if code == EXIT_PASSING and child.error is not None:
            return store.fail_attempt(claim, child.error)
        return store.finish(
            claim, "failed", child.error or describe_crash(code, self._where, log_file, child.hide)
        )

    def _least_memory(self) -> int | None:
        """The bytes that the job's models need at least; None if that is unknown."""
        return estimate_least_memory(parse_config(self._claim.config), self._settings.root)


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
