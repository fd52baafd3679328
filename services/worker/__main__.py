"""``python -m services.worker [queue ...]``, as ``kd up`` starts it: it ends when ``kd up`` does."""

from __future__ import annotations

import signal
import sys

from services import logs
from services.lifeline import die_with_parent
from services.settings import STAGES, Settings
from services.worker import consumer


def run(settings: Settings, queues: list[str]) -> None:
    """Work until SIGTERM."""
    logs.configure(settings)
    consumer.run(settings, queues)


if __name__ == "__main__":
    die_with_parent(signal.SIGTERM)
    run(Settings(), sys.argv[1:] or list(STAGES))
