"""The Celery worker: one task, which claims a stage and supervises the process that runs it. Imports no torch."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from contextlib import suppress
from typing import Any

from celery import Celery, signals
from redis.exceptions import RedisError

from services.jobs import Claim, JobStore, connect
from services.queue import PREFIX, TASK, celery_app, publish
from services.settings import STAGES, Settings
from services.worker.supervisor import Attempt

SIGN_OF_LIFE_SECONDS = 5.0
SIGN_OF_LIFE_TTL = 30
DEAF_SECONDS = 60.0

log = logging.getLogger("potstill.worker")


class Worker:
    """Runs one stage at a time for as long as it is not asked to stop."""

    def __init__(self, settings: Settings, app: Celery, store: JobStore, queues: list[str]) -> None:
        self.settings, self.app, self.store, self.queues = settings, app, store, queues
        self.id = f"{socket.gethostname()}:{os.getpid()}"
        self.stopping, self.ended = threading.Event(), threading.Event()
        self.job: str | None = None
        self._last_work = time.monotonic()

    def run_stage(self, job_id: str, stage: str) -> None:
        """The task. The hint may be old or double: only a claim starts anything, and any job of the stage will do."""
        self._last_work = time.monotonic()
        if self.stopping.is_set():
            return
        store, lease = self.store, self.settings.lease_seconds
        claim = store.claim(job_id, stage, self.id, lease) or store.claim_oldest(stage, self.id, lease)
        if claim is not None:
            self._run(claim, stage)

    def _run(self, claim: Claim, stage: str) -> None:
        self.job = claim.id
        try:
            log.info("%s: stage %s, attempt %d", claim.id, stage, claim.attempt)
            status = Attempt(self.store, self.settings, claim, stage, self.stopping).run()
            log.info("%s: %s", claim.id, status)
        finally:
            self.job, self._last_work = None, time.monotonic()
        if status == "queued" and (job := self.store.get(claim.id)) and job.stage in STAGES:
            publish(self.app, claim.id, job.stage)

    def show_life(self) -> None:
        """Write ``kd:worker:{id}`` every few seconds until the worker has ended."""
        while not self.ended.is_set():
            try:
                state = {"queues": self.queues, "job": self.job, "stopping": self.stopping.is_set()}
                self.store.redis.set(f"kd:worker:{self.id}", json.dumps(state), ex=SIGN_OF_LIFE_TTL)
                self._check_hearing()
            except RedisError:
                self._last_work = time.monotonic()
            self.ended.wait(SIGN_OF_LIFE_SECONDS)

    def _check_hearing(self) -> None:
        """End where hints wait and this idle worker takes none: a consumer can go deaf after a lost connection."""
        waiting = any(self.store.redis.llen(PREFIX + queue) for queue in self.queues)
        if self.job or not waiting or self.stopping.is_set():
            self._last_work = time.monotonic()
        elif time.monotonic() - self._last_work > DEAF_SECONDS:
            log.error("hints wait, but none arrive here: this worker ends, to be started again")
            os._exit(1)


def run(settings: Settings, queues: list[str]) -> None:
    """Work until SIGTERM, upon which the run under way saves its state and goes back to the queue."""
    assert settings.redis_url is not None
    app, store = celery_app(settings.redis_url), JobStore(connect(settings.redis_url))
    worker = Worker(settings, app, store, queues)

    @app.task(name=TASK)  # type: ignore[untyped-decorator]
    def run_stage(job_id: str, stage: str) -> None:
        worker.run_stage(job_id, stage)

    def stop(**_: Any) -> None:
        worker.stopping.set()

    signals.worker_shutting_down.connect(stop, weak=False)
    life = threading.Thread(target=worker.show_life, name="sign-of-life", daemon=True)
    life.start()
    quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    try:
        app.worker_main(["worker", "-P", "threads", "-c", "1", "-Q", ",".join(queues), "-n", worker.id, *quiet])
    finally:
        worker.ended.set()
        life.join()
        with suppress(RedisError):
            store.redis.delete(f"kd:worker:{worker.id}")
