"""One attempt at one stage: a claim, a child process, and the beat that carries news out and orders in.

    child --events--> Outbox --beat, about once a second--> record in Redis
    child <--signals-- Attempt <--go | cancel | fenced-- the beat's reply

While Redis is away the child works on, and its events wait in the outbox.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from redis.exceptions import RedisError

from cache.disk import storage_errors
from cache.errors import StorageError
from services.jobs import Claim, JobStore
from services.settings import SEARCH, Settings
from services.worker.child import STOPPED, describe
from services.worker.process import Child, Outbox, start_child

BEAT_SECONDS = 1.0
LOG_TAIL_BYTES = 2000
OUT_OF_MEMORY = (
    "Signal 9 usually means that the machine ran out of memory: "
    "lower train.batch_size, teacher.batch_size or data.sequence_length. "
)

log = logging.getLogger("potstill.worker")


class Attempt:
    """Supervises the child of one claim until it ends, and says in the record what came of it."""

    def __init__(
        self, store: JobStore, settings: Settings, claim: Claim, stage: str, stopping: threading.Event
    ) -> None:
        self._store, self._settings, self._claim, self._stage, self._stopping = store, settings, claim, stage, stopping
        self._run_dir = settings.run_dir(claim.id)
        self._reply = "go"

    def run(self) -> str:
        """Returns the job's status afterwards, or "fenced" where the job is no longer ours."""
        try:
            with storage_errors(self._run_dir):
                child = start_child(self._settings, self._stage, self._claim.config, self._run_dir)
        except (StorageError, OSError) as error:
            failure = describe(error)
            return self._until_answered(lambda: self._store.finish(self._claim, "failed", failure))
        with child:
            while child.process.poll() is None and self._reply != "fenced":
                self._beat(child.outbox)
                self._govern(child)
                self._wait(child)
            child.end()
            self._deliver(child)
        return "fenced" if self._reply == "fenced" else self._until_answered(lambda: self._conclude(child))

    def _beat(self, outbox: Outbox) -> bool:
        try:
            self._reply = self._store.beat(self._claim, self._settings.lease_seconds, outbox.batch())
        except RedisError as error:
            log.warning("%s: Redis does not answer (%s); the run goes on", self._claim.id, type(error).__name__)
            return False
        outbox.delivered()
        return True

    def _govern(self, child: Child) -> None:
        """Pass on what was asked for, and kill what does not obey or says nothing."""
        now = time.monotonic()
        if self._reply == "fenced":
            child.kill("fenced")
        elif self._reply == "cancel" or self._stopping.is_set():
            child.stop(self._settings.stop_grace_seconds)
        if child.kill_at is not None and now > child.kill_at:
            child.kill("grace")
        if now - child.heard > self._settings.silence_seconds:
            child.kill("silence")

    def _wait(self, child: Child) -> None:
        interval = min(BEAT_SECONDS, self._settings.lease_seconds / 5)
        with suppress(subprocess.TimeoutExpired):
            child.process.wait(0.2 if self._stopping.is_set() else interval)

    def _deliver(self, child: Child) -> None:
        """Send what is left, however long Redis is away."""
        while self._reply != "fenced" and not child.outbox.empty:
            if not self._beat(child.outbox):
                time.sleep(BEAT_SECONDS)

    def _until_answered(self, conclude: Callable[[], str]) -> str:
        """Write the outcome; repeated until Redis answers, which is safe: the second time is fenced."""
        while True:
            try:
                return conclude()
            except RedisError:
                time.sleep(BEAT_SECONDS)

    def _conclude(self, child: Child) -> str:
        store, claim, code = self._store, self._claim, child.process.returncode
        if code == 0 and child.result is not None:
            following = next_stage(claim.config["kind"], self._stage)
            return store.advance(claim, following) if following else store.finish(claim, "succeeded")
        if self._reply == "cancel":
            return store.finish(claim, "cancelled")
        if code == STOPPED or (child.kill_at is not None and child.error is None):
            return store.release(claim)
        if code < 0:
            return store.fail_attempt(claim, self._lost(child), self._settings.max_attempts)
        return store.finish(claim, "failed", child.error or self._crash(code))

    def _lost(self, child: Child) -> dict[str, str]:
        where, log_file = f"stage {self._stage}, attempt {self._claim.attempt}", self._run_dir / "log.txt"
        if child.kill_reason == "silence":
            detail = f"The process of {where} reported nothing for {self._settings.silence_seconds:g} s and was killed."
            return _error(
                "worker_lost", detail, f"{log_file} shows where it hung; KD_SILENCE_SECONDS allows more time."
            )
        number = -child.process.returncode
        name = signal.Signals(number).name if number in set(signal.Signals) else "unknown"
        detail = f"The process of {where} was killed by signal {number} ({name})."
        return _error("worker_lost", detail, (OUT_OF_MEMORY if number == signal.SIGKILL else "") + f"See {log_file}.")

    def _crash(self, code: int) -> dict[str, str]:
        log_file = self._run_dir / "log.txt"
        tail = log_file.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip() or "its log is empty"
        return _error(
            "internal", f"The process of stage {self._stage} ended with exit code {code}: {tail}", f"See {log_file}."
        )


def next_stage(kind: str, stage: str) -> str | None:
    """The stage after ``stage`` in a job of ``kind``."""
    return {("distill", "precompute"): "train", ("search", "precompute"): SEARCH}.get((kind, stage))


def _error(kind: str, detail: str, remedy: str) -> dict[str, str]:
    return {"type": kind, "detail": detail, "remedy": remedy}
