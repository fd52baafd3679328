"""The list of jobs in a browser: trials below their search, curves and times in each row."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
from playwright.sync_api import Page, expect

from bench.support.harness import Parts, make_config
from kd.client.wire.service import WorkerState
from services.store.jobs.leases import Claim
from tests.support.services.api import running, tell


@pytest.fixture
def page(new_tab: Callable[..., AbstractContextManager[Page]]) -> Iterator[Page]:
    with new_tab() as tab:
        yield tab


def start_search(api: Parts, name: str) -> Claim:
    """Create a search and claim it; if the API's reconciler was faster, try another one."""
    space = {"train.learning_rate": {"choices": [0.1, 0.2]}}
    data = {"train": "text.txt", "validation_fraction": 0.1}
    while True:
        config = make_config(name, "search", search={"space": space, "trials": 4}, data=data)
        job_id = api.jobs.create(config).id
        capture = api.jobs.claim(job_id, "precompute", "test", 600)
        assert capture is not None
        api.jobs.advance(capture, "search")
        claim = api.jobs.claim(job_id, "search", "test", 600)
        if claim is not None:
            return claim


def test_trials_are_folded_below_their_search(page: Page, api: Parts) -> None:
    search = start_search(api, "study")
    for number in range(2):
        api.jobs.create_trial(search, number, make_config(f"study-{number}"))
    done = {"done": 1, "total": 4, "unit": "trials", "fraction": 0.25, "eta_seconds": 90.0}
    best = {"best_trial": 0, "validation_loss": 3.25}
    tell(api, search, ("progress", done), ("metrics", best))
    page.goto(f"{api.settings.server}/jobs")
    # The first is the newest: one before it may have been lost to the reconciler.
    links = page.get_by_role("link", name="study", exact=True)
    row = page.get_by_role("row").filter(has=links).first
    expect(row).to_contain_text("1 of 4 trials ended, best 0 with loss 3.25")
    expect(row).to_contain_text("1 min 30 s")
    expect(page.get_by_role("link", name="study-0")).to_have_count(0)
    fold = row.get_by_role("button", name="Trials of study")
    expect(fold).to_have_attribute("aria-expanded", "false")
    fold.focus()
    page.keyboard.press("Enter")
    rows = page.get_by_role("row")
    expect(rows.nth(1)).to_contain_text("study")
    expect(rows.nth(2)).to_contain_text("study-1")
    expect(rows.nth(3)).to_contain_text("study-0")
    expect(fold).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("link", name="study-0")).to_have_count(0)
    page.get_by_label("trials", exact=True).check()
    expect(page.get_by_role("link", name="study-0")).to_have_count(1)
    expect(page.get_by_role("button", name="Trials of study")).to_have_count(0)


def test_the_table_fits_a_wide_window(page: Page, api: Parts) -> None:
    claim = running(api, labels={"team": "fiction"})
    held = {"validation_perplexity": 2053.0, "validation_tokens": 38_250,
            "validation_perplexity_low": 2015.0, "validation_perplexity_high": 2092.0}  # fmt: skip
    tell(api, claim, ("stage", {"stage": "train", "phase": "scoring single tokens"}))
    tell(api, claim, ("evaluation", held))
    tell(api, claim, *(("metrics", {"step": step, "loss": 4.708}) for step in range(1, 4)))
    done = {"done": 1, "total": 4, "unit": "steps", "fraction": 0.25, "eta_seconds": 5000.0}
    tell(api, claim, ("progress", done))
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto(f"{api.settings.server}/jobs")
    expect(page.get_by_role("row").nth(1)).to_contain_text("2,015 to 2,092")
    table = page.locator(".scroll")
    assert table.evaluate("each => each.scrollWidth - each.clientWidth") <= 0


def test_a_row_has_the_curve_of_its_loss(page: Page, api: Parts) -> None:
    claim = running(api)
    tell(api, claim, *(("metrics", {"step": step, "loss": 5.0 - step / 250}) for step in
                       range(1, 1001)))  # fmt: skip
    found = api.http.get("/curves", params={"jobs": f"{claim.id},job_{'0' * 26},nothing"}).json()
    (curve,) = found["data"]
    assert curve["job"] == claim.id
    assert (curve["steps"][0], curve["steps"][-1], len(curve["steps"])) == (1, 1000, 24)
    assert curve["values"][-1] == pytest.approx(1.0)
    page.goto(f"{api.settings.server}/jobs")
    row = page.get_by_role("row").filter(has=page.locator(f'a[href$="{claim.id}"]'))
    picture = row.get_by_role("img")
    expect(picture).to_have_accessible_name(re.compile("Loss from 5 to 1$"))


def test_a_queued_job_says_when_it_may_begin(page: Page, api: Parts) -> None:
    api.jobs.show_worker(WorkerState(id="w:1", stages=["train"]), 600)
    # A job takes 1,000 hours, so that the estimate does not depend on what other tests did.
    api.jobs.count("kd_job_worker_seconds_sum", 3.6e6, kind="train")
    api.jobs.count("kd_job_worker_seconds_count", 1, kind="train")
    api.jobs.create(make_config("patient"))
    page.goto(f"{api.settings.server}/jobs")
    row = page.get_by_role("row").filter(has_text="patient")
    expect(row).to_contain_text(re.compile(r"starts (in \d+|next) (days|month)"))
