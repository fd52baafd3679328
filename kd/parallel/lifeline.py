"""The end of a process whose parent has gone."""

from __future__ import annotations

import os
import sys

#: Number of the option in linux/prctl.h.
PR_SET_PDEATHSIG = 1


def die_with_parent(signum: int) -> None:
    """Have the kernel send ``signum`` to this process when its parent ends. Linux only."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:  # the parent ended before the call
        os.kill(os.getpid(), signum)
