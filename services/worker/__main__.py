"""``python -m services.worker [queue ...]``, as ``kd up`` starts it: it ends when ``kd up`` does."""

from __future__ import annotations

import logging
import signal
import sys

from services.lifeline import die_with_parent
from services.settings import STAGES, Settings
from services.worker.consumer import run


def main() -> None:
    """Work until SIGTERM."""
    die_with_parent(signal.SIGTERM)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    run(Settings(), sys.argv[1:] or list(STAGES))


if __name__ == "__main__":
    main()
