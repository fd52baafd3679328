"""The account of a team as the API shows it, and what it means for a job."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime, timedelta

from kd.client.wire.accounts import DiskUse, QuotaUse, TeamAccount
from kd.files import format_bytes
from services.store.jobs.teams import Account


def describe_account(account: Account) -> TeamAccount:
    """Describe an account, whose day ends at midnight in UTC."""
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    midnight = today + timedelta(days=1)
    measured = account.measured_ms
    return TeamAccount(
        team=account.team,
        devices=account.devices,
        queued_jobs=account.queued,
        recent_device_seconds=account.recent,
        device_seconds=QuotaUse(
            limit=account.quota.device_seconds,
            used=account.today,
            left=_compute_rest(account.quota.device_seconds, account.today),
            frees_up="at 00:00 UTC",
            resets_at=midnight,
        ),
        bytes=QuotaUse(
            limit=account.quota.bytes,
            used=account.bytes,
            left=_compute_rest(account.quota.bytes, account.bytes),
            frees_up="when caches, jobs with their files, or uploaded files are deleted",
            measured_at=None if measured is None else datetime.fromtimestamp(measured / 1000, UTC),
        ),
        disk=DiskUse(**asdict(account.disk)),
        reason=account.reason,
    )


def _compute_rest(limit: float | None, used: float) -> float | None:
    return None if limit is None else max(limit - used, 0.0)


def find_quota_warnings(account: TeamAccount, new_bytes: int) -> Iterator[str]:
    """Say what the quotas mean for a new job, whose cache takes ``new_bytes``."""
    if account.reason is not None:
        yield account.reason
    left = account.bytes.left
    if left is not None and new_bytes > left:
        yield (
            f"The cache needs about {format_bytes(new_bytes)}, and team {account.team} has"
            f" {format_bytes(left)} left of its quota: the job will be refused."
        )
