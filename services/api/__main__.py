"""``python -m services.api``, as ``kd up`` starts it: it ends when ``kd up`` does."""

from __future__ import annotations

import logging
import signal

from services.api.app import serve
from services.lifeline import die_with_parent
from services.settings import Settings


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    die_with_parent(signal.SIGTERM)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    serve(Settings())


if __name__ == "__main__":
    main()
