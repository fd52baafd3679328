"""The end of a process whose parent has gone.

``python stdin_guard.py PID SECONDS`` guards a process and its group: it reads heartbeats from stdin
and kills both when they stop. It imports little, because one guard runs beside every child.
"""

from __future__ import annotations

import os
import select
import signal
import sys


def offer_to_oom_killer() -> None:
    """Be the first process that the kernel kills when memory runs out. Linux only.

    What this process starts from now on inherits it.
    """
    if not sys.platform.startswith("linux"):
        return
    file = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
    os.write(file, b"1000")
    os.close(file)


def die_with_stdin(patience: float) -> None:
    """Have this process and its group killed when stdin ends or is silent for ``patience`` seconds.

    The writer has then ended or was stopped. A separate process reads stdin from now on, so that it
    can act even if this one hangs or was stopped. It also kills what this process has started.
    """
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), f"{patience:g}"]
    silence = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_WRONLY, 0) for number in (1, 2)]
    os.posix_spawn(sys.executable, command, os.environ, file_actions=silence)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def main() -> None:
    """Guard the process that the command line names, which started this one."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # A signal to the whole group must not end the guard before its ward.
        signal.signal(signum, signal.SIG_IGN)
    ward, patience = int(sys.argv[1]), float(sys.argv[2])
    while select.select([0], [], [], patience)[0] and os.read(0, 4096):
        pass  # the parent is alive
    if os.getpgrp() == ward:
        # No other group can have this number while this process is in the group.
        os.killpg(ward, signal.SIGKILL)
    elif os.getppid() == ward:
        # The ward leads no group, so that killing its group would kill other processes.
        os.kill(ward, signal.SIGKILL)


if __name__ == "__main__":
    main()
