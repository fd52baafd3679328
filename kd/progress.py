"""How a run tells the world what it does, and how the world tells it to stop.

A run emits ``Event``s: small JSON-able facts. Who listens (a progress bar, a child's pipe to its
supervisor, nobody) is not the run's business.

    type         data
    stage        {phase, and stage where it is known}               what is being done now
    progress     {done, total, unit, fraction, eta_seconds, tokens, tokens_per_second}
    metrics      {step, loss, kd_loss, ce_loss, perplexity, temperature, alpha, learning_rate, grad_norm}
    temperature  {step, temperature, temperature_gradient, temperature_margin}, where it is learned
    layers       {step, grad_norms by group of layers}
    check        {step, check, ok, message, remedy, facts}
    profile      {phases, tokens_per_second, mfu, peak_memory_bytes}
    evaluation   {step, validation_loss, validation_perplexity, validation_kl, validation_agreement}
    plan         {fingerprint}, of the cache that is wanted: it may be whole, half captured, or not begun
    cache        {fingerprint, bytes_per_token, entries_per_token, tokens, reused}
    trial        {number, state, values, loss, why}, of a search
    checkpoint   {step, path}
    artifact     {name, path}
    warning      {message}

and two that are for the supervisor alone, and reach no record:

    alive        {stepping}          a loop turns, and says so with each turn; or else something long is being done
    shard        {bytes, seconds}    one more part of a cache is on the disk
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kd.errors import Interrupted

ALIVE_SECONDS = 5.0
WAITING_SECONDS = 30.0


@dataclass(frozen=True)
class Event:
    """One fact about a run; ``data`` holds JSON values only, and numbers in it are finite or None."""

    type: str
    data: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The line form in which an event crosses a process boundary."""
        return {"type": self.type, "data": finite(self.data)}


def finite(value: Any) -> Any:
    """``value`` with every NaN and infinity replaced by None: JSON has neither."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def _ignore(event: Event) -> None:
    """Nobody listens."""


def _never() -> bool:
    return False


class Elsewhere(Interrupted):
    """Another process does this very work: to be tried again once nobody holds the lock at ``lock``."""

    type = "elsewhere"

    def __init__(self, what: str, lock: Path) -> None:
        super().__init__(f"It waits for {what}.", "It is tried again as soon as that has ended.")
        self.lock = lock


@dataclass
class Pulse:
    """When a run last said that it is alive, that it waits, and whether a loop turned then."""

    alive_at: float = -math.inf
    waits_at: float = -math.inf
    stepping: bool = False


@dataclass(frozen=True)
class Monitor:
    """Where a run's events go, and whether it should stop at the next safe point.

    ``patient``: whether it waits for work that another process does; otherwise it raises ``Elsewhere``.
    """

    listen: Callable[[Event], None] = _ignore
    should_stop: Callable[[], bool] = _never
    patient: bool = True
    _pulse: Pulse = field(default_factory=Pulse, repr=False, compare=False)

    def emit(self, type: str, **data: Any) -> None:
        """Send one event."""
        self.listen(Event(type, data))

    def check(self, what: str) -> None:
        """Raise ``Interrupted`` if a stop was asked for. Call it only where everything is saved."""
        if self.should_stop():
            raise Interrupted(f"Stopped on request {what}.", "Run the same job again to go on from here.")
        if self._pulse.stepping:
            self.alive()

    def alive(self, stepping: bool = True) -> None:
        """Say, every few seconds, that a loop turns: from now on its silence means within minutes that it hangs.

        ``stepping`` False: something follows that may take long and says nothing, as an evaluation or a checkpoint.
        """
        pulse, now = self._pulse, time.monotonic()
        if stepping == pulse.stepping and now - pulse.alive_at < ALIVE_SECONDS:
            return
        pulse.alive_at, pulse.stepping = now, stepping
        self.emit("alive", stepping=stepping)

    def wait_for(self, what: str, lock: Path, stage: str) -> None:
        """Called while another process that holds ``lock`` does ``what``; says so now and then.

        Raises ``Elsewhere`` where there is no patience for it, ``Interrupted`` if a stop was asked for.
        """
        pulse, now = self._pulse, time.monotonic()
        if now - pulse.waits_at > WAITING_SECONDS:
            pulse.waits_at = now
            self.emit("stage", stage=stage, phase=f"waiting for {what}")
        if not self.patient:
            raise Elsewhere(what, lock)
        if self.should_stop():
            raise Interrupted(f"Stopped on request while waiting for {what}.", "Run the same job again.")


SILENT = Monitor()


@dataclass
class Meter:
    """Turns counts into rates: done of total, seconds left, tokens per second of this process."""

    total: int
    unit: str
    done: int = 0
    tokens: int = 0
    _began: float = field(default_factory=time.monotonic)
    _first: int = 0

    def __post_init__(self) -> None:
        self._first = self.done

    def advance(self, done: int, tokens: int) -> dict[str, Any]:
        """Count ``done`` more units and ``tokens`` more tokens; returns a progress event's data."""
        self.done += done
        self.tokens += tokens
        seconds = max(time.monotonic() - self._began, 1e-9)
        pace = (self.done - self._first) / seconds
        return {
            "done": self.done,
            "total": self.total,
            "unit": self.unit,
            "fraction": round(self.done / self.total, 6) if self.total else 1.0,
            "eta_seconds": round((self.total - self.done) / pace, 1) if pace > 0 else None,
            "tokens": self.tokens,
            "tokens_per_second": round(self.tokens / seconds, 1),
        }
