"""The Celery worker: one task, which claims stages and supervises the processes that run them. Imports no torch."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from celery import Celery, signals
from redis.exceptions import RedisError

from services import telemetry
from services.jobs import Capacity, Claim, JobStore, connect
from services.logs import bound
from services.queue import PREFIX, TASK, celery_app, publish
from services.schemas import Device as DeviceView
from services.schemas import WorkerState
from services.settings import STAGES, Settings
from services.worker.devices import Device, DeviceError, take
from services.worker.parking import Parking
from services.worker.supervisor import Attempt

SIGN_OF_LIFE_SECONDS = 5.0
SIGN_OF_LIFE_TTL = 30
DEVICE_SECONDS = 30.0
DEAF_SECONDS = 60.0

log = logging.getLogger("potstill.worker")


class Worker:
    """Runs one stage at a time for as long as it is not asked to stop."""

    def __init__(self, settings: Settings, app: Celery, store: JobStore, stages: list[str], device: Device) -> None:
        self.settings, self.app, self.store, self.stages, self.device = settings, app, store, stages, device
        self.id = f"{socket.gethostname()}:{os.getpid()}"
        self.stopping, self.ended = threading.Event(), threading.Event()
        self.failed = False
        self.claim: Claim | None = None
        self.parking = Parking(store, settings.lease_seconds, self.stopping, self._announce)
        self._started = datetime.now(UTC)
        self._last_work = self._device_seen = time.monotonic()

    def work(self, stage: str) -> None:
        """The task: run what waits until nothing does. The hint only says where to look first: a claim decides."""
        self._last_work = time.monotonic()
        while not self.stopping.is_set() and self._device_is_well():
            found = self._next(stage)
            if found is None:
                return
            stage = self._run(*found)

    def _next(self, first: str) -> tuple[Claim, str] | None:
        """The first job in the queue of ``first``, else in another one of ours, that fits this worker."""
        capacity = Capacity(len(self.device.gpus), self.device.memory_bytes)
        for stage in (first, *(other for other in self.stages if other != first)):
            if claim := self.store.claim_next(stage, self.id, self.settings.lease_seconds, capacity):
                return claim, stage
        return None

    def _run(self, claim: Claim, stage: str) -> str:
        """Run a stage of a job; returns the stage to look for next, so that each queue has its turn."""
        names = {"job_id": claim.id, "attempt": claim.attempt, "fence": claim.fence}
        self.claim = claim
        try:
            with (
                bound(**names, request_id=claim.request_id),
                telemetry.span("attempt", claim.traceparent, "CONSUMER", stage=stage, **names),
            ):
                self._supervise(claim, stage)
        finally:
            self.claim, self._last_work = None, time.monotonic()
        return self.stages[(self.stages.index(stage) + 1) % len(self.stages)] if stage in self.stages else stage

    def _supervise(self, claim: Claim, stage: str) -> None:
        log.info("stage %s begins", stage)
        ended = Attempt(self.store, self.settings, claim, stage, self.device, self.stopping).run()
        if ended.elsewhere is not None:
            log.info("another process does the same work: the job waits for it")
            self.parking.park(claim, ended.elsewhere)
            return
        log.info("stage %s ends: %s", stage, ended.status)
        if ended.status == "queued":
            self._announce(claim)

    def _announce(self, claim: Claim) -> None:
        """Tell whoever may run what is left of a job; where that fails, the reconciler does."""
        with suppress(RedisError):
            if (job := self.store.get(claim.id)) and job.status == "queued" and job.stage in STAGES:
                publish(self.app, claim.id, job.stage)

    def _device_is_well(self) -> bool:
        self._device_seen = time.monotonic()
        try:
            self.device.require_alive()
        except DeviceError as error:
            self._fail(str(error))
            return False
        return True

    def _fail(self, why: str) -> None:
        """End, to be started again: a run under way saves its state first, as it does on SIGTERM."""
        log.error("%s This worker ends, to be started again.", why)
        self.failed = True
        self.stopping.set()
        os.kill(os.getpid(), signal.SIGTERM)

    # -- signs of life

    def show_life(self) -> None:
        """Say every few seconds that this worker is there, until it has ended."""
        while not self.ended.is_set():
            if time.monotonic() - self._device_seen > DEVICE_SECONDS and not self.stopping.is_set():
                self._device_is_well()
            try:
                self.store.show_worker(self.state(), SIGN_OF_LIFE_TTL)
                self._check_hearing()
            except RedisError:
                self._last_work = time.monotonic()
            self.ended.wait(SIGN_OF_LIFE_SECONDS)

    def state(self) -> WorkerState:
        """What GET /workers tells of it."""
        claim, device = self.claim, self.device
        return WorkerState(
            id=self.id,
            host=socket.gethostname(),
            pid=os.getpid(),
            stages=self.stages,
            device=DeviceView(
                kind=device.kind,
                name=device.name,
                index=",".join(str(gpu.index) for gpu in device.gpus),
                count=len(device.gpus),
                memory_bytes=device.memory_bytes,
            ),
            job=claim.id if claim else None,
            attempt=claim.attempt if claim else None,
            stopping=self.stopping.is_set(),
            version=version("potstill"),
            started_at=self._started,
            beat_at=datetime.now(UTC),
        )

    def _check_hearing(self) -> None:
        """End where hints wait and this idle worker takes none: a consumer can go deaf after a lost connection."""
        waiting = any(self.store.redis.llen(PREFIX + stage) for stage in self.stages)
        if self.claim or not waiting or self.stopping.is_set():
            self._last_work = time.monotonic()
        elif time.monotonic() - self._last_work > DEAF_SECONDS:
            log.error("hints wait, but none arrive here: this worker ends, to be started again")
            os._exit(1)


def _leave(*_: Any) -> None:
    """On SIGTERM while the worker starts; from then on Celery has handlers of its own."""
    raise SystemExit(0)


def run(settings: Settings, stages: list[str]) -> None:
    """Work until SIGTERM, upon which the run under way saves its state and goes back to the queue."""
    assert settings.redis_url is not None
    signal.signal(signal.SIGTERM, _leave)
    telemetry.configure(settings.otlp_endpoint, "worker")
    device = take(settings.devices, settings.home)
    app, store = celery_app(settings.redis_url), JobStore(connect(settings.redis_url), settings.max_attempts)
    worker = Worker(settings, app, store, stages, device)
    log.info("works on %s (%s)", device.name, ", ".join(gpu.uuid for gpu in device.gpus) or device.kind)

    @app.task(name=TASK)  # type: ignore[untyped-decorator]
    def run_stage(_: str, stage: str) -> None:
        worker.work(stage)

    def stop(**_: Any) -> None:
        worker.stopping.set()

    signals.worker_shutting_down.connect(stop, weak=False)
    life = threading.Thread(target=worker.show_life, name="sign-of-life", daemon=True)
    life.start()
    quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    try:
        app.worker_main(
            ["--quiet", "worker", "-P", "threads", "-c", "1", "-Q", ",".join(stages), "-n", worker.id, *quiet]
        )
    finally:
        worker.stopping.set()
        worker.parking.close()
        worker.ended.set()
        life.join()
        with suppress(RedisError):
            store.hide_worker(worker.id)
        device.give_back()
        telemetry.shutdown()
    if worker.failed:
        sys.exit(1)
