"""A job whose cache several workers capture: the page shows them, and the progress of all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
from playwright.sync_api import Page, expect

from bench.support.harness import Parts, make_config
from kd.progress import SharedCapture
from services.store.jobs.leases import ANY_CAPACITY, Claim
from services.store.ranges import RangeTable, ReportedProgress, SharedTerms, TakenRange
from services.worker.together.range_server import compute_progress
from tests.support.services.api import tell
from tests.support.services.pages import require_fit, take_picture

OpenTab = Callable[..., AbstractContextManager[Page]]
SHARED = SharedTerms("1.0", "here", SharedCapture("f" * 8))


@pytest.fixture(scope="module")
def captured(api: Parts) -> Claim:
    """A job of 40 ranges, which two workers capture."""
    config = make_config("together", "precompute", resources={"workers": "auto"})
    claim = api.jobs.claim(api.jobs.create(config).id, "precompute", "host-a:17", 600)
    assert claim is not None
    table = RangeTable(api.jobs.redis)
    owner = table.open(claim, "host-a:17", 600, SHARED, 40, None)
    order = table.help("host-b:23", 600, ANY_CAPACITY, ["precompute"])
    assert owner is not None and order is not None
    for member, rate in ((owner, 10_300.0), (order.member, 9_800.0)):
        taken = table.take(member)
        assert isinstance(taken, TakenRange)
        table.finish(member, taken.number, 256)
        assert isinstance(table.take(member), TakenRange)
        table.beat(member, 600, ReportedProgress(300, 20.0, 153_000, rate), [])
    view = table.view(claim.id)
    assert view is not None
    progress = compute_progress(view, 10_240)
    tell(api, claim, ("stage", {"stage": "precompute", "phase": "capturing with other workers"}))
    tell(api, claim, (progress.type, progress.data))
    return claim


@pytest.mark.parametrize("width", [360, 1440])
def test_the_job_shows_its_workers(
    api: Parts, captured: Claim, new_tab: OpenTab, width: int
) -> None:
    with new_tab(viewport={"width": width, "height": 900}) as tab:
        tab.goto(f"{api.settings.server}/jobs/{captured.id}")
        section = tab.locator("section.capture")
        expect(section).to_contain_text("2 of 40 ranges of shards are done, 36 wait for a worker.")
        rows = section.locator("tbody tr")
        expect(rows).to_have_count(2)
        expect(rows.nth(0)).to_contain_text("host-a:17")
        expect(rows.nth(1)).to_contain_text("host-b:23")
        expect(rows.nth(1)).to_contain_text("9,800")
        # 600 sequences are done, at 40 a second.
        expect(tab.locator("main")).to_contain_text("600 of 10,240 sequences")
        require_fit(tab)
        take_picture(tab, f"capture-{width}")
