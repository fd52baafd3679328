"""How long tests wait for what a page shows: the library's five seconds judge the machine."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from bench.support.harness import PATIENCE_SECONDS


@pytest.fixture(scope="session", autouse=True)
def _patience() -> None:
    expect.set_options(timeout=PATIENCE_SECONDS * 1000)
