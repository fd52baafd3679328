"""A process that must not outlive the one that started it says so here."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(signum: int) -> None:
    """Have the kernel send ``signum`` to this process when its parent ends; does nothing off Linux."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:  # it ended in between
        os.kill(os.getpid(), signum)


def die_with_stdin() -> None:
    """Kill this process group when stdin reaches its end, which it does when the writer ends however it ends."""
    threading.Thread(target=_watch_stdin, name="stdin-watch", daemon=True).start()


def _watch_stdin() -> None:
    # os.read: a daemon thread inside sys.stdin.buffer.read() aborts the interpreter at a normal exit.
    while os.read(0, 4096):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)
