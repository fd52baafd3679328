"""The webhooks that are due."""

from __future__ import annotations

from dataclasses import dataclass

from services.store.jobs.script import ScriptedStore, to_ms


@dataclass(frozen=True)
class Delivery:
    """A webhook that is due: event ``event_id`` of a job, after ``tries`` failed tries."""

    job_id: str
    event_id: str
    url: str
    tries: int


class Deliveries(ScriptedStore):
    """Hands out webhooks, and records how their delivery went."""

    def lease_webhooks(self, lease_seconds: float, limit: int) -> list[Delivery]:
        """Up to ``limit`` webhooks to send now. No other caller gets them for ``lease_seconds``."""
        flat: list[str] = self._transition("webhooks", to_ms(lease_seconds), limit)
        rows = zip(*[iter(flat)] * 4, strict=True)
        return [
            Delivery(job_id, event_id, url, int(tries)) for job_id, event_id, url, tries in rows
        ]

    def finish_webhook(self, delivery: Delivery, warning: str = "") -> None:
        """Forget a webhook that has arrived.

        A ``warning`` says that it is given up instead, and goes to the job's events.
        """
        self._transition("webhook", delivery.job_id, delivery.event_id, "", warning)

    def retry_webhook(self, delivery: Delivery, delay_seconds: float) -> None:
        """Count a failed try, and try again after ``delay_seconds``."""
        self._transition("webhook", delivery.job_id, delivery.event_id, to_ms(delay_seconds), "")
