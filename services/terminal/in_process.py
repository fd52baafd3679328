"""What the commands share that run a job, or a part of one, in this process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from kd.errors import Interrupted
from kd.progress import Event, Monitor
from services.settings import Settings
from services.terminal.console import err, notes
from services.terminal.display import Display


def enter_root(settings: Settings) -> None:
    """Go to the folder from which a job's paths start, and set what libraries read at import."""
    os.chdir(settings.root)
    os.environ.update(settings.environment())
    os.environ.setdefault("TQDM_DISABLE", "1")  # the libraries' bars would overwrite ours


def interrupt_on_signals() -> None:
    """Make SIGINT, SIGTERM and the end of the terminal (SIGHUP) raise KeyboardInterrupt.

    SIGINT is set too, because a shell starts background jobs with SIGINT ignored. An ignored
    SIGHUP stays so: `nohup` asks for it. A terminal may send SIGHUP twice, and the second one is
    no second Ctrl-C, which would stop at once.
    """

    def hang_up(*_: object) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, hang_up)


def tell(text: str) -> None:
    """Print a line of progress of any length."""
    notes.print(text, markup=False, soft_wrap=True)


def make_phase_monitor() -> Monitor:
    """Return a monitor that prints each phase that begins."""

    def show(event: Event) -> None:
        if event.data.get("phase"):
            notes.print(event.data["phase"], markup=False)

    return Monitor(show)


@contextmanager
def showing_events() -> Iterator[Monitor]:
    """Yield a monitor that shows its events on the terminal."""
    with Display(notes) as display:
        yield Monitor(display.show)


@contextmanager
def stopping_on_signals() -> Iterator[Monitor]:
    """Yield a monitor that shows its events, and asks to stop at Ctrl-C, SIGTERM or SIGHUP.

    What has stopped raises ``KeyboardInterrupt``. A second signal stops without saving.
    """
    from kd.python.running import lossy, stop_on_signals

    try:
        with Display(notes) as display, stop_on_signals(tell) as stop:
            yield Monitor(lossy(display.show), stop.is_set)
    except Interrupted as error:
        err.print(str(error))
        raise KeyboardInterrupt from None
