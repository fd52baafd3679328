"""Run a job in this process, as ``kd run`` does: a locked folder, bars, and Ctrl-C that saves."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TypeVar

from cache.disk import locked, require_locks, storage_errors
from kd.errors import Interrupted
from kd.files import LOCK
from kd.progress import Event, Monitor
from kd.python.bars import ProgressBars, library_bars_hidden

#: Packages of the extra ``worker`` without which no model runs.
_OF_WORKER = {"accelerate", "datasets", "matplotlib", "peft", "pyarrow", "torch", "transformers"}
_T = TypeVar("_T")


def run_in_process(
    run: Callable[[Monitor], _T], run_dir: Path, progress: bool = True
) -> tuple[_T, tuple[str, ...]]:
    """Call ``run`` with a monitor that shows bars; return its result and the run's warnings.

    The first Ctrl-C, SIGTERM or SIGHUP lets the run save its state and then raises
    ``KeyboardInterrupt``; the same call continues from there. The second stops without saving.
    """
    with (
        ProgressBars(progress) as bars,
        _named_packages(),
        alone_in(run_dir, bars.tell, "out=..."),
        stop_on_signals(bars.tell) as stop,
        library_bars_hidden(),
    ):
        try:
            result = run(Monitor(lossy(bars.listen), stop.is_set))
        except Interrupted as error:
            raise KeyboardInterrupt(str(error)) from None
        return result, tuple(bars.warnings)


@contextmanager
def _named_packages() -> Iterator[None]:
    """Say how to install what a run needs, where only the base of the package is installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in _OF_WORKER:
            raise
        remedy = "Install what a run needs: pip install 'potstill[worker]'."
        detail = f"{error.name} is not installed. {remedy}"
        raise ModuleNotFoundError(detail, name=error.name) from None


@contextmanager
def alone_in(run_dir: Path, tell: Callable[[str], None], option: str) -> Iterator[None]:
    """Lock the run folder, as a worker does; while another process holds it, say so and wait.

    ``option`` names another folder. Raises ``StorageError`` where locks do nothing.
    """
    told = threading.Event()

    def announce() -> None:
        if not told.is_set():
            told.set()
            waits = "this one waits until it has ended"
            tell(f"Another run uses {run_dir}; {waits}. {option} names another folder.")

    with storage_errors(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
    require_locks(run_dir)
    with locked(run_dir / LOCK, announce):
        yield


def lossy(listen: Callable[[Event], None]) -> Callable[[Event], None]:
    """Let the terminal of ``listen`` go: it may close before the run hears of it by SIGHUP."""

    def try_to_show(event: Event) -> None:
        with suppress(OSError):
            listen(event)

    return try_to_show


@contextmanager
def stop_on_signals(tell: Callable[[str], None]) -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C, SIGTERM or SIGHUP sets, so that a run saves and stops.

    A second Ctrl-C or SIGTERM raises ``KeyboardInterrupt``. A closing terminal may send SIGHUP more
    than once, and a system that shuts down sends SIGTERM after it: neither is a second wish. An
    ignored SIGHUP stays so, because `nohup` asks for it. Only the main thread can do so; in any
    other the event is never set.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    terminals = [number for number in (0, 1, 2) if os.isatty(number)]
    seen: set[int] = set()

    def request_stop(number: int, frame: FrameType | None) -> None:
        if number in seen and number != signal.SIGHUP:
            raise KeyboardInterrupt
        seen.add(number)
        if number == signal.SIGHUP:
            _leave_closed(terminals)
        if not stop.is_set():
            stop.set()
            tell("saving; press Ctrl-C again to stop without saving")

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, request_stop) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def _leave_closed(terminals: list[int]) -> None:
    """Let what is written to a terminal that has closed go nowhere: it would be an error."""
    with Path(os.devnull).open("r+b") as nowhere:
        for number in terminals:
            if not os.isatty(number):
                os.dup2(nowhere.fileno(), number)
