"""Fixtures for the tests of the store."""

from __future__ import annotations

import pytest

from bench.support.harness import Parts
from services.store.jobs.store import JobStore


@pytest.fixture
def jobs(parts: Parts) -> JobStore:
    """Job records on an empty server."""
    return parts.jobs
