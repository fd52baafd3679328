"""The names of processes in the job store."""

from __future__ import annotations

import os
import secrets
import socket


def name_process() -> str:
    """Return a name that no other process has: host, process id and a random number.

    Containers of one host name may have the same process ids.
    """
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"
