"""``python -m services.api``, as ``kd up`` starts it: it ends when ``kd up`` does."""

from __future__ import annotations

import signal

from services import logs, telemetry
from services.api.app import serve
from services.lifeline import die_with_parent
from services.settings import Settings


def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT."""
    logs.configure(settings)
    telemetry.configure(settings.otlp_endpoint, "api")
    try:
        serve(settings)
    finally:
        telemetry.shutdown()


if __name__ == "__main__":
    die_with_parent(signal.SIGTERM)
    run(Settings())
