"""One attempt at one stage: a claim, a child process, and the wire that carries news out and orders in.

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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from redis.exceptions import RedisError

from cache.disk import storage_errors
from cache.errors import PotstillError
from kd.jobfile import parse_config
from services.jobs import Claim, JobStore
from services.settings import SEARCH, Settings
from services.telemetry import trace_environment
from services.tenancy import confinement_of
from services.worker.child import ELSEWHERE, STOPPED
from services.worker.devices import Device
from services.worker.failures import crashed, describe, hung, killed
from services.worker.memory import Kills
from services.worker.process import Child, Order, named_secret, order_of, start_child
from services.worker.wire import BEAT_SECONDS, PARTS_OF_LEASE, Wire

TURN_SECONDS = 0.25

log = logging.getLogger("potstill.worker")


@dataclass(frozen=True)
class Ended:
    """How an attempt ended: the job's status, or fenced, or lost where nobody could be told.

    ``elsewhere``: the lock of another process that does this very work. The claim is still held then.
    """

    status: str
    elsewhere: Path | None = None


class Attempt:
    """Supervises the child of one claim until it ends, and says in the record what came of it."""

    def __init__(
        self, store: JobStore, settings: Settings, claim: Claim, stage: str, device: Device, stopping: threading.Event
    ) -> None:
        self._store, self._settings, self._claim, self._stage = store, settings, claim, stage
        self._device, self._stopping = device, stopping
        self._run_dir = settings.run_dir(claim.id)
        self._where = f"stage {stage}, attempt {claim.attempt}"

    def run(self) -> Ended:
        """Run it to its end."""
        kills = Kills.count()
        try:
            child = self._start()
        except (PotstillError, OSError, RedisError) as error:
            return self._not_started(error)
        with child, Wire(self._store, self._claim, self._settings.lease_seconds, child.outbox, child.tally) as wire:
            while child.process.poll() is None and wire.reply != "fenced":
                child.show_life()
                self._govern(child, wire)
                self._wait(child)
            if wire.reply == "fenced":
                child.kill("fenced")
            child.end()
        wire.deliver(self._stopping)
        if wire.reply == "fenced":
            return Ended("fenced")
        if child.process.returncode == ELSEWHERE and child.elsewhere is not None:
            return Ended("running", child.elsewhere)
        return Ended(until_answered(lambda: self._conclude(child, kills), self._stopping))

    def _start(self) -> Child:
        config, settings = parse_config(self._claim.config), self._settings
        environment = self._device.environment(config.resources.gpus) | trace_environment(settings.otlp_endpoint)
        with storage_errors(self._run_dir):
            return start_child(settings, self._order(), environment | named_secret(config))

    def _order(self) -> Order:
        claim, settings = self._claim, self._settings
        limits = confinement_of(settings, self._store, claim.owner)
        granted = limits.order(parse_config(claim.config), settings.root)
        return order_of(settings, self._stage, claim.config, self._run_dir, granted)

    def _not_started(self, error: Exception) -> Ended:
        """Redis may have gone since the claim: that is no fault of the job, which goes back to the queue."""
        if isinstance(error, RedisError):
            return Ended(until_answered(lambda: self._store.release(self._claim), self._stopping))
        failure = describe(error)
        return Ended(until_answered(lambda: self._store.finish(self._claim, "failed", failure), self._stopping))

    def _govern(self, child: Child, wire: Wire) -> None:
        """Pass on what was asked for, and kill what does not obey or says nothing."""
        if self._is_to_stop(wire):
            child.stop(self._settings.stop_grace_seconds)
        if child.kill_at is not None and time.monotonic() > child.kill_at:
            child.kill("grace")
        if child.hearing.silent(self._settings.silence_seconds):
            child.kill("silence")

    def _is_to_stop(self, wire: Wire) -> bool:
        """A run that nobody hears of for an hour saves its state: whoever waits for it thinks that it is lost."""
        asked = wire.reply in ("cancel", "pause") or self._stopping.is_set()
        return asked or wire.outage_seconds > self._settings.outage_seconds

    def _wait(self, child: Child) -> None:
        with suppress(subprocess.TimeoutExpired):
            child.process.wait(min(TURN_SECONDS, self._settings.lease_seconds / PARTS_OF_LEASE))

    def _conclude(self, child: Child, kills: Kills) -> str:
        store, claim, code = self._store, self._claim, child.process.returncode
        if code == 0 and child.result is not None:
            following = next_stage(claim.config["kind"], self._stage)
            return store.advance(claim, following) if following else store.finish(claim, "succeeded")
        if code == STOPPED or (child.kill_at is not None and child.error is None):
            return store.release(claim)
        log_file = self._run_dir / "log.txt"
        if code < 0 and child.kill_reason == "silence":
            seconds = child.hearing.patience(self._settings.silence_seconds)
            return store.fail_attempt(claim, hung(self._where, seconds, log_file))
        if code < 0:
            return store.fail_attempt(claim, killed(-code, self._where, Kills.count().since(kills), log_file))
        return store.finish(claim, "failed", child.error or crashed(code, self._where, log_file))


def until_answered(conclude: Callable[[], str], give_up: threading.Event) -> str:
    """Write the outcome; repeated until Redis answers, which is safe: the second time is fenced.

    A worker that is to end tries once more and leaves it at "lost": the lease runs out, and the job is taken back.
    """
    while True:
        last = give_up.is_set()
        try:
            return conclude()
        except RedisError:
            if last:
                log.warning("Redis could not be told how the run has ended")
                return "lost"
            give_up.wait(BEAT_SECONDS)


def next_stage(kind: str, stage: str) -> str | None:
    """The stage after ``stage`` in a job of ``kind``."""
    return {("distill", "precompute"): "train", ("search", "precompute"): SEARCH}.get((kind, stage))
