"""A process that must not outlive the one that started it says so here.

``python lifeline.py PID SECONDS`` is the guard of a process and its group: it reads signs of life from stdin, and kills
both when they stop. It imports little, for one runs beside every child.
"""

from __future__ import annotations

import os
import select
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(signum: int) -> None:
    """Have the kernel send ``signum`` to this process when its parent ends; does nothing off Linux."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:  # it ended in between
        os.kill(os.getpid(), signum)


def die_with_stdin(patience: float) -> None:
    """Have this process and its group killed when stdin ends, or brings nothing for ``patience`` seconds.

    That is, when who writes there has ended, or was stopped. A process of its own sees to it: it acts even where this
    one hangs or was itself stopped, and ends what this one has started, too. It takes stdin with it.
    """
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), f"{patience:g}"]
    silence = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_WRONLY, 0) for number in (1, 2)]
    os.posix_spawn(sys.executable, command, os.environ, file_actions=silence)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _watch_stdin(patience: float) -> None:
    """Return once stdin has ended, or has brought nothing for ``patience`` seconds."""
    while select.select([0], [], [], patience)[0] and os.read(0, 4096):
        pass


def main() -> None:
    """Guard the process that the command line names, which started this one."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # whoever ends the group politely leaves the guard to its duty
    ward = int(sys.argv[1])
    _watch_stdin(float(sys.argv[2]))
    if os.getpgrp() == ward:  # a number that no stranger can have while this process is in the group
        os.killpg(ward, signal.SIGKILL)
    elif os.getppid() == ward:  # it has no group of its own: to kill the group would be to kill strangers
        os.kill(ward, signal.SIGKILL)


if __name__ == "__main__":
    main()
