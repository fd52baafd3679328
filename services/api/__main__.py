"""``python -m services.api``: the API process that ``kd up`` starts, and that ends with it."""

from __future__ import annotations

import signal

from kd.parallel.parent_death import die_with_parent
from services.api.app import serve_api
from services.process import logs
from services.settings import Settings


def run_api(settings: Settings) -> None:
    """Set up the log, and serve requests until SIGTERM or SIGINT."""
    logs.configure(settings)
    serve_api(settings)


if __name__ == "__main__":
    die_with_parent(signal.SIGTERM)
    run_api(Settings())
