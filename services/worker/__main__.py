"""``python -m services.worker [queue ...]``. ``kd up`` starts it, and it ends with ``kd up``."""

from __future__ import annotations

import signal
import sys

from kd.config.kinds import list_stage_names
from kd.parallel.parent_death import die_with_parent
from services.process import logs
from services.settings import Settings
from services.worker import consumer


def run_worker(settings: Settings, queues: list[str]) -> None:
    """Work until SIGTERM."""
    logs.configure(settings)
    consumer.run(settings, queues)


if __name__ == "__main__":
    die_with_parent(signal.SIGTERM)
    run_worker(Settings(), sys.argv[1:] or list_stage_names("worker"))
