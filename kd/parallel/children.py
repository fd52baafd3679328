"""A child process of a run: the path of its imports, its events, and the wish that it stops."""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Callable
from pathlib import Path

from kd.progress import Event

#: Seconds between two looks at whether the run should stop.
POLL_SECONDS = 0.2


def build_path() -> str:
    """Build the PYTHONPATH with which a child imports the packages of this process."""
    own = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join([own, *filter(None, [os.environ.get("PYTHONPATH")])])


def relay_events(
    process: subprocess.Popen[bytes],
    listen: Callable[[Event], None],
    should_stop: Callable[[], bool],
) -> None:
    """Pass on the events that ``process`` writes to its stdout, until that ends.

    Its stdin is closed once it should stop.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    text = b""
    stdout = process.stdout.fileno()
    while True:
        if not process.stdin.closed and should_stop():
            process.stdin.close()
        if not select.select([stdout], [], [], POLL_SECONDS)[0]:
            continue
        part = os.read(stdout, 1 << 16)
        if not part:
            return
        *lines, text = (text + part).split(b"\n")
        for line in lines:
            listen(Event(**json.loads(line)))


def has_stdin_ended() -> bool:
    """Whether stdin has ended. Nothing is ever written to it, so readable means the end."""
    return bool(select.select([0], [], [], 0)[0])
