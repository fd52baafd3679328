"""Run a job in this process, as ``kd run`` does: a locked folder, bars, and Ctrl-C that saves."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from cache.disk import locked, storage_errors
from kd.buckets.inputs import begin_downloads
from kd.config.job import JobConfig
from kd.errors import Interrupted
from kd.face.bars import ProgressBars, library_bars_hidden
from kd.files import LOCK
from kd.progress import Monitor

#: Packages of the extra ``worker`` without which no model runs.
_OF_WORKER = {"accelerate", "datasets", "matplotlib", "peft", "pyarrow", "torch", "transformers"}
_T = TypeVar("_T")


@dataclass(frozen=True)
class RunOptions:
    """The data folder with the caches, the folder of the run, and whether it shows its progress."""

    home: Path
    run_dir: Path
    progress: bool = True


def run_stages_here(
    config: JobConfig, options: RunOptions
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Run every stage of the job; return the pipeline's result and the run's warnings."""

    def run(monitor: Monitor) -> dict[str, Any]:
        from kd.pipeline import run_stages
        from kd.preflight.problems import Folders, Machine, require_no_problems

        begin_downloads(options.home)
        require_no_problems(config, Folders(Path(), options.home, opened=True), Machine())
        return run_stages(config, options.home, options.run_dir, monitor)

    return run_here(run, options)


def run_here(run: Callable[[Monitor], _T], options: RunOptions) -> tuple[_T, tuple[str, ...]]:
    """Call ``run`` with a monitor that shows bars; return its result and the run's warnings.

    The first Ctrl-C lets the run save its state and then raises ``KeyboardInterrupt``; the same
    call continues from there. The second stops without saving.
    """
    with (
        ProgressBars(options.progress) as bars,
        _named_packages(),
        _alone_in(options.run_dir, bars.tell),
        stop_on_interrupt(bars.tell) as stop,
        library_bars_hidden(),
    ):
        try:
            result = run(Monitor(bars.listen, stop.is_set))
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
        raise ModuleNotFoundError(
            f"{error.name} is not installed. {remedy}", name=error.name
        ) from None


@contextmanager
def _alone_in(run_dir: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Lock the run folder; while another process holds it, say so once and wait."""
    told = threading.Event()

    def announce() -> None:
        if not told.is_set():
            told.set()
            tell(f"Another run uses {run_dir}; this one waits. out=... names another folder.")

    with storage_errors(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
    with locked(run_dir / LOCK, announce):
        yield


@contextmanager
def stop_on_interrupt(tell: Callable[[str], None]) -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C sets; the second raises ``KeyboardInterrupt``.

    Only the main thread can do so; in any other the event is never set.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def request_stop(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        tell("saving; interrupt again to stop without saving")

    before = signal.signal(signal.SIGINT, request_stop)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
