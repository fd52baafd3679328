"""One worker that helps with the capture of a job which another worker holds.

It takes ranges of shards from the board (``services.store.ranges``) and captures them in a child of
its own. What it cannot do ends its help, and not the job.
"""

from __future__ import annotations

import logging
import re
import subprocess
import threading
import time
from contextlib import suppress
from typing import Any

from redis.exceptions import RedisError

from cache.errors import PotstillError
from cache.remote.address import name_place
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.config.kinds import CAPTURE
from kd.errors import OtherCapture
from kd.files import HELPERS, find_caches
from kd.python.version import read_version
from services.settings import Settings
from services.store.jobs.leases import BEATS_PER_LEASE
from services.store.jobs.store import JobStore
from services.store.ranges import HelpOrder, RangeBoard
from services.worker.child import EXIT_PASSING, EXIT_STOPPED
from services.worker.child_process import Child, StageJob, prepare_child, start_child
from services.worker.devices import WorkerDevice
from services.worker.failures import (
    Failure,
    describe_crash,
    describe_error,
    describe_hang,
    describe_kill,
    describe_memory_limit,
)
from services.worker.memory_limit import MemoryLimit, choose_limit_bytes
from services.worker.range_broker import RangeBroker

#: Time between two turns of the supervisor at most.
TURN_SECONDS = 0.25
#: The work of the child, as errors name it.
WHERE = f"a helper of stage {CAPTURE.name}"

log = logging.getLogger("potstill.worker")


def describe_place(settings: Settings, config: JobConfig) -> dict[str, str]:
    """Return the version of this program and the name of its store of caches.

    All workers of one capture must have the same.
    """
    caches = find_caches(settings.home, config.cache.store or settings.store)
    return {"version": read_version(), "place": name_place(caches)}


class CaptureHelp:
    """Supervises the child that helps, until no range is left or the capture stops."""

    def __init__(
        self,
        store: JobStore,
        settings: Settings,
        order: HelpOrder,
        worker: str,
        device: WorkerDevice,
        stopping: threading.Event,
    ) -> None:
        self._store = store
        self._settings = settings
        self._order = order
        self._worker = worker
        self._device = device
        self._stopping = stopping
        name = re.sub(r"[^A-Za-z0-9.-]", "-", worker)
        self._run_dir = settings.run_dir(order.member.id) / HELPERS / name

    def run(self) -> None:
        """Help to the end. A failure is a warning of the job, and this worker helps no more."""
        board = RangeBoard(self._store.redis)
        broker = RangeBroker(board, self._settings.lease_seconds, self._order.member)
        try:
            with broker:
                warning = self._supervise(broker)
        except RedisError as error:
            log.warning("the help ends: %s", type(error).__name__)
            return
        broker.leave(warning)
        log.info("the help with %s ends: %s", self._order.member.id, warning or "as it should")

    def _supervise(self, broker: RangeBroker) -> str:
        """Run the child; return the warning that the job gets, or nothing."""
        try:
            # First, because a job of another version may not be readable here.
            self._require_same_version()
            config = parse_config(self._order.config)
            self._require_same_place(config)
            child = self._start(broker)
        except (PotstillError, OSError) as error:
            return self._describe_failure(describe_error(error))
        limit = choose_limit_bytes(config.resources, self._device)
        with child, MemoryLimit(child.process.pid, limit) as memory:
            while child.process.poll() is None:
                child.show_life()
                self._govern(child, broker)
                if memory.is_exceeded():
                    child.kill("memory")
                with suppress(subprocess.TimeoutExpired):
                    child.process.wait(
                        min(TURN_SECONDS, self._settings.lease_seconds / BEATS_PER_LEASE)
                    )
            child.end()
        return self._judge(child, memory)

    def _require_same_version(self) -> None:
        own, theirs = read_version(), self._order.terms["version"]
        if own != theirs:
            raise OtherCapture(
                f"It runs Potstill {own}, and the worker that leads the capture {theirs}.",
                "Install the same version on all workers.",
            )

    def _require_same_place(self, config: JobConfig) -> None:
        own = describe_place(self._settings, config)
        theirs = self._order.terms
        if own["place"] != theirs["place"]:
            raise OtherCapture(
                f"Its caches are in {own['place']}, and the caches of the worker that leads the "
                f"capture are in {theirs['place']}.",
                "Give all workers one bucket (KD_STORE), or the same KD_HOME on a shared disk.",
            )

    def _start(self, broker: RangeBroker) -> Child:
        order = self._order
        job = StageJob(order.member.id, CAPTURE.name, order.owner, order.config, helps=True)
        child_order, environment = prepare_child(
            self._store, self._settings, self._device, job, self._run_dir
        )
        return start_child(self._settings, child_order, environment, broker, order.terms)

    def _govern(self, child: Child, broker: RangeBroker) -> None:
        if self._stopping.is_set() or broker.reply != "go":
            child.stop(self._settings.stop_grace_seconds)
        if child.kill_at is not None and time.monotonic() > child.kill_at:
            child.kill("grace")
        if child.silence_timer.is_silent(self._settings.silence_seconds):
            child.kill("silence")

    def _judge(self, child: Child, memory: MemoryLimit) -> str:
        code = child.process.returncode
        log_file = self._run_dir / "log.txt"
        if code in (0, EXIT_STOPPED, EXIT_PASSING) or (
            child.kill_at is not None and child.error is None
        ):
            return ""
        if memory.is_exceeded():
            failure = describe_memory_limit(WHERE, memory.limit_bytes, None)
        elif child.error is not None:
            failure = child.error
        elif child.kill_reason == "silence":
            seconds = child.silence_timer.patience(self._settings.silence_seconds)
            failure = describe_hang(WHERE, seconds, log_file)
        elif code < 0:
            failure = describe_kill(-code, WHERE, "", log_file)
        else:
            failure = describe_crash(code, WHERE, log_file, child.hide)
        return self._describe_failure(failure)

    def _describe_failure(self, failure: Failure) -> str:
        what = f"{failure['detail']} {failure.get('remedy', '')}".strip()
        return f"Worker {self._worker} no longer helps with this capture: {what}"


def count_workers(config: JobConfig) -> int | None:
    """Return the number of workers that may capture for a job; None for any number."""
    wanted: Any = config.resources.workers
    return None if wanted == "auto" else int(wanted)
