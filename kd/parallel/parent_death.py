"""The end of a process whose parent has gone."""

from __future__ import annotations

import os
import sys

#: Number of the option in linux/prctl.h.
PR_SET_PDEATHSIG = 1
#: Tells a rank the process id of its parent.
PARENT_VARIABLE = "KD_RANK_PARENT"


def die_with_parent(signum: int, parent: int | None = None) -> None:
    """Have the kernel send ``signum`` to this process when its parent ends. Linux only.

    ``parent`` is the process id that the parent has told. Without it a parent that ended before
    this call is not noticed.
    """
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    parent = os.getppid() if parent is None else parent
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:  # the parent ended before the call
        os.kill(os.getpid(), signum)
