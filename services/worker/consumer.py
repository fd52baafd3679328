"""The Celery worker: it claims stages and supervises the processes that run them. No torch."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from celery import Celery, signals
from celery.utils.log import worker_logger
from redis.exceptions import AuthenticationError, RedisError, ResponseError

from cache.disk import require_locks
from kd.client.wire.service import Device as DeviceView
from kd.client.wire.service import WorkerState
from kd.config.kinds import CAPTURE, list_stage_names
from kd.python.version import read_version
from services.process.descriptors import raise_limit
from services.process.lasting_loops import flush_restarts, start_loop
from services.process.logs import bound
from services.process.names import name_process
from services.settings import Settings
from services.store.connection import connect_redis, describe_failure
from services.store.costs import find_price
from services.store.jobs.leases import Capacity, Claim
from services.store.jobs.script import is_own_mistake
from services.store.jobs.store import JobStore
from services.store.queue import QUEUE_PREFIX, TASK_NAME, make_celery_app, publish_hint
from services.store.ranges import RangeTable
from services.worker.devices import DeviceError, WorkerDevice, take_device
from services.worker.lock_waiter import LockWaiter
from services.worker.supervisor import Attempt
from services.worker.together.helping import CaptureHelp, GangHelp

#: Time between two heartbeats of a worker.
HEARTBEAT_SECONDS = 5.0
#: Seconds for which a heartbeat counts.
HEARTBEAT_TTL = 30
#: Time between two checks of the device.
DEVICE_SECONDS = 30.0
#: Workers that a job calls at once.
CALLED = 32
#: Time after which an idle worker that gets no hints, although hints wait, ends itself.
UNRESPONSIVE_SECONDS = 60.0

log = logging.getLogger("potstill.worker")


@dataclass(eq=False)
class StageWorker:
    """Runs one stage at a time until it is asked to stop."""

    settings: Settings
    app: Celery
    store: JobStore
    stages: list[str]
    device: WorkerDevice
    id: str = field(default_factory=name_process)
    stopping: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    failed: bool = False
    claim: Claim | None = None
    helped: Claim | None = None
    _failure: type[RedisError] | None = None
    _last_work: float = field(default_factory=time.monotonic)
    _device_seen: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._started = datetime.now(UTC)
        self.price = find_price(self.settings.prices, self.device.kind, self.device.name)
        lease = self.settings.lease_seconds
        self.lock_waiter = LockWaiter(self.store, lease, self.stopping, self._announce)

    def work(self, stage: str) -> None:
        """Run waiting stages until none is left, first in the queue of ``stage``.

        A hint only names the queue to look at first. A claim decides which job runs.
        """
        self._last_work = time.monotonic()
        lease = self.settings.lease_seconds
        try:
            while not self.stopping.is_set() and self._device_is_well():
                others = [other for other in self.stages if other != stage]
                claim = self.store.claim_next(stage, self.id, lease, self._capacity(), others)
                if claim is not None:
                    stage = self._run(claim)
                elif not self._help_once():
                    return
        except RedisError as error:  # the hint is gone, but the reconciler sends another one
            if is_own_mistake(error):
                raise
            self._tell(error)

    def _help_once(self) -> bool:
        """Take part in a job that wants more workers. Returns whether there was one."""
        table = RangeTable(self.store.redis)
        lease = self.settings.lease_seconds
        order = table.help(self.id, lease, self._capacity(), self.stages)
        if order is None:
            return False
        job = self.helped = order.claim
        names = {"job_id": job.id, "attempt": job.attempt}
        try:
            with bound(**names, request_id=job.request_id):
                log.info("helps with stage %s", job.stage)
                kind = CaptureHelp if job.stage == CAPTURE.name else GangHelp
                kind(self.store, self.settings, order, self.id, self.device, self.stopping).run()
        finally:
            self.helped = None
            self._last_work = time.monotonic()
        return True

    def _call_helpers(self, claim: Claim, workers: int | None) -> None:
        """Tell idle workers that a job wants them; the reconciler tells those that come."""
        for _ in range(min((workers or CALLED) - 1, CALLED)):
            if not publish_hint(self.app, claim.id, claim.stage):
                return

    def _capacity(self) -> Capacity:
        return Capacity(self.device.count, self.device.memory_bytes, self.price)

    def _tell(self, error: RedisError | None) -> None:
        """Log in one line what the job store does in place of its work, once for each reason."""
        failure = "" if error is None else describe_failure(error)
        if failure and type(error) is not self._failure:
            log.warning("no job is taken: the job store %s", failure)
        self._failure = None if error is None else type(error)

    def _run(self, claim: Claim) -> str:
        """Run a stage of a job. Returns the next stage to look for: the queues take turns."""
        stage = claim.stage
        names = {"job_id": claim.id, "attempt": claim.attempt, "fence": claim.fence}
        self.claim = claim
        try:
            with bound(**names, request_id=claim.request_id):
                self._supervise(claim)
        finally:
            self.claim = None
            self._last_work = time.monotonic()
        if stage not in self.stages:
            return stage
        return self.stages[(self.stages.index(stage) + 1) % len(self.stages)]

    def _supervise(self, claim: Claim) -> None:
        log.info("stage %s begins", claim.stage)
        given = (self.store, self.settings, claim, self.device, self.stopping, self.id)
        ended = Attempt(*given, self._call_helpers).run()
        if ended.held_lock is not None:
            log.info("another process does the same work: the job waits for it")
            self.lock_waiter.hold_claim(claim, ended.held_lock)
            return
        log.info("stage %s ends: %s", claim.stage, ended.status)
        if ended.status == "queued":
            self._announce(claim)
        if ended.unfit:
            # Otherwise this worker would take the jobs of all others, and fail them.
            seconds = self.settings.lease_seconds
            log.error("No job can be started here: %s Next try in %g s.", ended.unfit, seconds)
            self.stopping.wait(seconds)

    def _announce(self, claim: Claim) -> None:
        """Send a hint for the rest of a job. If that fails, the reconciler sends it."""
        with suppress(RedisError):
            job = self.store.get(claim.id)
            if (
                job is not None
                and job.status == "queued"
                and job.stage in list_stage_names("worker")
            ):
                publish_hint(self.app, claim.id, job.stage)

    def _device_is_well(self) -> bool:
        """Return whether the device is there. If not, this worker ends, and a new one takes over.

        It ends as on SIGTERM, so that a run saves its state first.
        """
        self._device_seen = time.monotonic()
        try:
            self.device.require_alive()
        except DeviceError as error:
            log.error("%s This worker ends, to be started again.", error)
            self.failed = True
            self.stopping.set()
            os.kill(os.getpid(), signal.SIGTERM)
        return not self.failed

    # -- heartbeats

    def send_heartbeats(self) -> None:
        """Show this worker in the list every few seconds, until it has ended."""
        while not self.ended.is_set():
            if time.monotonic() - self._device_seen > DEVICE_SECONDS and not self.stopping.is_set():
                self._device_is_well()
            try:
                self.store.show_worker(self.describe(), HEARTBEAT_TTL)
                self._end_if_unresponsive()
                flush_restarts(self.store)
                self._tell(None)
            except RedisError as error:
                self._tell(error)
                self._last_work = time.monotonic()
            self.ended.wait(HEARTBEAT_SECONDS)

    def describe(self) -> WorkerState:
        """The worker as GET /workers shows it."""
        # Read once: another thread sets it to None.
        helped = self.helped
        claim = self.claim or helped
        device = self.device
        return WorkerState(
            id=self.id,
            host=socket.gethostname(),
            pid=os.getpid(),
            stages=self.stages,
            device=DeviceView(
                kind=device.kind,
                name=device.name,
                index=",".join(str(gpu.index) for gpu in device.gpus),
                count=device.count,
                memory_bytes=device.memory_bytes,
                price=self.price,
            ),
            job=claim.id if claim else None,
            attempt=claim.attempt if claim else None,
            helping=helped is not None,
            stopping=self.stopping.is_set(),
            version=read_version(),
            started_at=self._started,
            # The clock of the job store: that of this host may be wrong.
            beat_at=self.store.read_clock(),
        )

    def _end_if_unresponsive(self) -> None:
        """End this worker if it is idle and gets no hints although hints wait.

        A Celery consumer can stop receiving after a lost connection.
        """
        waiting = any(self.store.redis.llen(QUEUE_PREFIX + stage) for stage in self.stages)
        if self.claim or self.helped or not waiting or self.stopping.is_set():
            self._last_work = time.monotonic()
        elif time.monotonic() - self._last_work > UNRESPONSIVE_SECONDS:
            log.error("hints wait, but none arrive here: this worker ends, to be started again")
            os._exit(1)


def require_writes(store: JobStore) -> None:
    """End this worker where the job store refuses its writes. Of a silent one, only warn."""
    try:
        store.redis.set("kd:ready", "1", ex=60)
    except (ResponseError, AuthenticationError) as error:
        log.error("This worker ends: the job store %s", describe_failure(error))
        sys.exit(1)
    except RedisError as error:  # Celery waits for it
        log.warning("the job store %s", describe_failure(error))


def shorten_end(record: logging.LogRecord) -> bool:
    """Say in one line that Celery ends because of the job store: its traceback tells no more."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, RedisError):
        record.msg, record.args = "This worker ends: the job store %s", (describe_failure(error),)
        record.exc_info = None
    return True


def run(settings: Settings, stages: list[str]) -> None:
    """Work until SIGTERM. The run then saves its state, and its job goes back to the queue."""
    assert settings.redis_url is not None
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # until Celery's own handlers replace it
    raise_limit()
    for folder in settings.places.values():
        require_locks(folder)
    store = JobStore(connect_redis(settings.redis_url), settings.max_attempts)
    require_writes(store)
    device = take_device(settings.devices, settings.home)
    app = make_celery_app(settings.redis_url)
    worker = StageWorker(settings, app, store, stages, device)
    log.info("works on %s (%s)", device.name, ", ".join(device.list_names()))
    if device.count > 1:
        log.info("a job uses one device unless its resources.gpus asks for more")

    @app.task(name=TASK_NAME)  # type: ignore[untyped-decorator]
    def run_stage(_: str, stage: str) -> None:
        worker.work(stage)

    def stop(**_: Any) -> None:
        worker.stopping.set()

    signals.worker_shutting_down.connect(stop, weak=False)
    celery_workers: list[Any] = []

    def keep(sender: Any, **_: Any) -> None:
        celery_workers.append(sender)

    signals.worker_init.connect(keep, weak=False)
    worker_logger.addFilter(shorten_end)
    heartbeats = start_loop("sign-of-life", worker.send_heartbeats, worker.ended)
    quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    try:
        options = ["-P", "threads", "-c", "1", "-Q", ",".join(stages), "-n", worker.id, *quiet]
        app.worker_main(["--quiet", "worker", *options])
    finally:
        worker.stopping.set()
        worker.lock_waiter.close()
        worker.ended.set()
        heartbeats.join()
        with suppress(RedisError):
            store.hide_worker(worker.id)
        device.give_back()
    # Celery logs an error that it cannot survive, and returns as if all were well.
    if worker.failed or any(each.exitcode for each in celery_workers):
        sys.exit(1)
