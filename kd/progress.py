"""Report what a run does, and ask it to stop.

A run emits ``Event``s: small facts that JSON can hold. It does not know who listens: a progress
bar, the pipe from a worker's process to its supervisor, or nobody.

    type         data
    stage        {phase, and stage if it is known}: what the run does now
    progress     {done, total, unit, fraction, eta_seconds, per_second, tokens, tokens_per_second}
    metrics      {step, loss, kd_loss, ce_loss, train_perplexity, temperature, alpha,
                 learning_rate, grad_norm}
    temperature  {step, temperature, temperature_gradient, temperature_margin}, if it is learned
    scalars      {step, and names such as throughput/tokens_per_second (kd.tracking.scalars)}
    check        {step, check, ok, message, remedy, facts}
    profile      {phases, tokens_per_second, mfu, peak_memory_bytes}
    evaluation   {step, validation_loss, validation_perplexity, validation_kl, validation_agreement,
                 validation_tokens; validation_perplexity_low and _high below 2,000 tokens; with
                 several teachers some of them for each domain, as validation_kl/math; with another
                 tokenizer validation_bits_per_byte}
    report       {student_perplexity, student_bits_per_byte, teacher_perplexity,
                 teacher_bits_per_byte, held_out_tokens, held_out_bytes} of the finished student
    samples      {step, texts}: a {prompt, text} of each prompt that the student continued
    plan         {fingerprint} of the cache that the run needs, sealed, partial or missing; and
                 fingerprints, those of all caches of a run with several teachers
    cache        {fingerprint, bytes_per_token, entries_per_token, tokens, reused;
                 teacher_quantization, where the teacher's weights were quantised; overruled, where
                 the records differ from the teacher and the job accepted that}
    trial        {number, state, values, loss, why}, in a search
    checkpoint   {step, path}
    artifact     {name, path}
    warning      {message}; {message, error} of the service: the type of what ended an attempt

and two that only the supervisor uses; they are not stored:

    alive        {stepping}: true = a loop runs and reports each step; false = a long task begins
    shard        {bytes, seconds}: one more shard of a cache is on the disk

``ShardRanges`` is the one thing that a run asks for: the shards that it captures, where several
workers capture one cache.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from cache.json_object import Json
from kd.errors import Interrupted
from kd.files import read_json, write_json

#: Least seconds between two ``alive`` events.
ALIVE_SECONDS = 5.0
#: Least seconds between two reports that a run waits for another process.
WAITING_SECONDS = 30.0
#: File in a run folder with what the run found in its inputs.
NOTICES = "notices.json"


@dataclass(frozen=True)
class Event:
    """One fact about a run; ``data`` holds only values that JSON has."""

    type: str
    data: Json

    def to_json(self) -> Json:
        """Return the event as JSON for another process; NaN and infinity become None."""
        return {"type": self.type, "data": replace_nonfinite(self.data)}


@dataclass(frozen=True)
class StageResult:
    """What a stage made: a cache, or a student; all is empty where it only helped another process.

    ``cache`` is the summary of the cache, ``artifacts`` the places of the student's files by their
    names, and ``report`` the content of its report.json.
    """

    cache: Json = field(default_factory=dict)
    artifacts: dict[str, str] = field(default_factory=dict)
    report: Json = field(default_factory=dict)

    def to_json(self) -> Json:
        """Return what the stage made, for another process and for a user."""
        return {name: value for name, value in vars(self).items() if value}


@dataclass(frozen=True)
class Notice:
    """Something that a run found in its inputs and left out, changed or did not understand.

    ``what`` is a plural that says what happened to it, such as "rows without text, left out".
    ``example`` names the first one, with its place.
    """

    what: str
    count: int
    example: str
    remedy: str = ""

    def __str__(self) -> str:
        first = self.what[:1].upper() + self.what[1:]
        return f"{first}: {self.count:,}, for example {self.example}. {self.remedy}".strip()

    def to_json(self) -> dict[str, str | int]:
        """Return the entry in the file of a run's notices, and in the answer of a validation."""
        return asdict(self)


def ignore_notice(notice: Notice) -> None:
    """Drop the notice: nobody asked for it."""


def keep_notices(file: Path, monitor: Monitor) -> list[Notice]:
    """Add the notices of this process to those in ``file``; return all of them.

    A notice that comes again, as in a resumed run, replaces the one before it. Two of the same kind
    in different texts have other examples.
    """
    known = [Notice(**each) for each in read_json(file) or ()]
    found = {(each.what, each.example): each for each in (*known, *monitor.notices)}
    if found:
        write_json(file, [each.to_json() for each in found.values()])
    return list(found.values())


def replace_nonfinite(value: Any) -> Any:
    """Return ``value`` with None in place of every NaN and infinity, which JSON lacks."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_nonfinite(item) for item in value]
    return value


class EventPipe:
    """The pipe to the process that started this one: the first stdout, only for events.

    From now on stdout is stderr: what this process prints goes to its log.
    """

    def __init__(self) -> None:
        self._pipe = os.dup(1)  # not inherited by programs that the run starts
        self._lock = threading.Lock()
        os.dup2(2, 1)

    def send(self, event: Event) -> None:
        """Write one event as one line."""
        line = json.dumps(event.to_json(), allow_nan=False).encode() + b"\n"
        with self._lock:
            while line:
                line = line[os.write(self._pipe, line) :]


def make_interruption(what: str) -> Interrupted:
    """Make the error of a run that stops where everything is saved; ``what`` says where."""
    return Interrupted(
        f"Stopped on request {what}.", "Run the same job again to continue from here."
    )


def _ignore(event: Event) -> None:
    """Drop the event: nobody listens."""


def _never_stop() -> bool:
    return False


class WorkHeldByAnother(Interrupted):
    """Another process does the same work. Try again when the lock at ``lock`` is free."""

    type = "elsewhere"

    def __init__(self, what: str, lock: Path) -> None:
        super().__init__(f"It waits for {what}.", "It is tried again as soon as that has ended.")
        self.lock = lock


@dataclass(frozen=True)
class SharedCapture:
    """The choices that all workers of one capture share, so that their shards fit together.

    ``knots`` is the number of knots of profile tempered; None for the other profiles.
    """

    fingerprint: str
    knots: int | None = None


@dataclass(frozen=True)
class HostPlace:
    """The place of this host among ``count`` that work on one stage; ``number`` 0 leads.

    The ranks of all hosts meet at ``endpoint``, an address and a port of the leader, with a ``key``
    that no other job knows. ``address`` is that of this host, and ``run_dir`` the folder of the
    run, which all hosts see; it is empty if they share a bucket and no folder.
    """

    number: int
    count: int
    endpoint: str
    key: str
    address: str
    run_dir: str


class ShardRanges(Protocol):
    """Hands the shards of one capture to its workers, a range at a time.

    One worker leads: it opens the ranges, and seals the manifest when all are finished. The others
    help. ``shared`` is that of the capture to help with; None for the worker that leads.
    """

    shared: SharedCapture | None

    def open(self, shared: SharedCapture, shards: int, check_stop: Callable[[], None]) -> None:
        """Let workers take the ``shards`` of a capture, from now on; waits as ``take`` does."""

    def take(self, check_stop: Callable[[], None]) -> range | None:
        """Return the shards to capture next; an empty range where there are none now.

        None: nothing is left for this worker to do. ``check_stop`` is called while there is no
        answer, and may raise to give up. Raises ``Interrupted`` if the capture must stop.
        """

    def finish(self, shards: range, sequences: int) -> None:
        """Tell that all ``shards`` of a range are sealed, which hold ``sequences``."""

    def is_finished(self, shards: range) -> bool:
        """Return whether another worker was faster with a range that this one has."""


@dataclass
class Liveness:
    """The times of a run's last ``alive`` event and waiting report, and its last ``stepping``.

    ``warned`` holds the warnings that are sent once, ``notices`` what was found in the inputs.
    """

    alive_at: float = -math.inf
    waits_at: float = -math.inf
    stepping: bool = False
    warned: set[str] = field(default_factory=set)
    notices: list[Notice] = field(default_factory=list)


@dataclass(frozen=True)
class Monitor:
    """Receives a run's events, and decides whether it stops at the next safe point.

    ``patient``: whether the run waits while another process does the same work; otherwise it raises
    ``WorkHeldByAnother``. ``ranges`` hands out the shards of a capture by several workers; None for
    a capture by only this process. ``host`` is for a stage that several hosts share.
    """

    listen: Callable[[Event], None] = _ignore
    should_stop: Callable[[], bool] = _never_stop
    patient: bool = True
    ranges: ShardRanges | None = None
    host: HostPlace | None = None
    _pulse: Liveness = field(default_factory=Liveness, repr=False, compare=False)

    def emit(self, type: str, **data: Any) -> None:
        """Send one event."""
        self.listen(Event(type, data))

    def pass_on(self, types: Collection[str]) -> Monitor:
        """Return a monitor that passes on events of ``types`` alone, and stops as this one does."""

        def listen(event: Event) -> None:
            if event.type in types:
                self.listen(event)

        return Monitor(listen, self.should_stop)

    def warn_once(self, message: str) -> None:
        """Send a warning, unless this run has sent the same one."""
        if message not in self._pulse.warned:
            self._pulse.warned.add(message)
            self.emit("warning", message=message)

    def note(self, notice: Notice) -> None:
        """Send a notice as a warning, once; ``keep_notices`` puts it into the run's report."""
        if notice not in self._pulse.notices:
            self._pulse.notices.append(notice)
        self.warn_once(str(notice))

    @property
    def notices(self) -> tuple[Notice, ...]:
        """The notices so far, in the order in which they came."""
        return tuple(self._pulse.notices)

    def check(self, what: str) -> None:
        """Raise ``Interrupted`` if the run should stop. Call it only where everything is saved."""
        if self.should_stop():
            raise make_interruption(what)
        if self._pulse.stepping:
            self.report_alive()

    def report_alive(self, stepping: bool = True) -> None:
        """Report at most every few seconds that a loop runs; if it then stays silent, it hangs.

        ``stepping`` False: a long task without reports follows, such as an evaluation or a
        checkpoint.
        """
        pulse = self._pulse
        now = time.monotonic()
        # A change of ``stepping`` is reported at once: it changes how long silence is allowed.
        if stepping == pulse.stepping and now - pulse.alive_at < ALIVE_SECONDS:
            return
        pulse.alive_at = now
        pulse.stepping = stepping
        self.emit("alive", stepping=stepping)

    def wait_for(self, what: str, lock: Path, stage: str) -> None:
        """Report now and then that the run waits for ``what``, which the holder of ``lock`` does.

        Call it repeatedly while waiting. Raises ``WorkHeldByAnother`` if the run is not patient,
        and ``Interrupted`` if it should stop.
        """
        pulse = self._pulse
        now = time.monotonic()
        if now - pulse.waits_at > WAITING_SECONDS:
            pulse.waits_at = now
            self.emit("stage", stage=stage, phase=f"waiting for {what}")
        if not self.patient:
            raise WorkHeldByAnother(what, lock)
        if self.should_stop():
            detail = f"Stopped on request while waiting for {what}."
            raise Interrupted(detail, "Run the same job again.")


#: A monitor without a listener, which never stops a run.
SILENT = Monitor()


@dataclass
class ProgressMeter:
    """Computes the share that is done, the ETA and the tokens per second of this process."""

    total: int
    unit: str
    done: int = 0
    tokens: int = 0
    _began: float = field(default_factory=time.monotonic)
    _first: int = 0

    def __post_init__(self) -> None:
        self._first = self.done

    def skip(self, done: int) -> None:
        """Count units that were done before, in no time."""
        self.done += done
        self._first += done

    def advance(self, done: int, tokens: int) -> dict[str, float | str | None]:
        """Add ``done`` units and ``tokens`` tokens; return the data of a progress event."""
        self.done += done
        self.tokens += tokens
        seconds = max(time.monotonic() - self._began, 1e-9)  # a clock may not have moved yet
        # Units that were done before this process began say nothing about its pace.
        pace = (self.done - self._first) / seconds
        return {
            "done": self.done,
            "total": self.total,
            "unit": self.unit,
            "fraction": round(self.done / self.total, 6) if self.total else 1.0,
            "eta_seconds": round((self.total - self.done) / pace, 1) if pace > 0 else None,
            "per_second": round(pace, 3),
            "tokens": self.tokens,
            "tokens_per_second": round(self.tokens / seconds, 1),
        }
