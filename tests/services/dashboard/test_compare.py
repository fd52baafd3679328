"""The comparison of jobs in a browser: quality against cost, and the trials of a search."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
from playwright.sync_api import Page, expect

from bench.support.harness import Parts, make_config
from kd.files import write_json
from tests.support.services.api import running, tell


@pytest.fixture
def page(new_tab: Callable[..., AbstractContextManager[Page]]) -> Iterator[Page]:
    with new_tab() as tab:
        yield tab


def make_jobs(api: Parts, *values: tuple[float, float, float, float]) -> list[str]:
    """Create a job for each learning rate, perplexity, agreement and bytes per token."""
    made = []
    for at, (rate, perplexity, agreement, size) in enumerate(values):
        config = make_config(f"trial-{at}", train={"max_steps": 5, "learning_rate": rate})
        claim = api.jobs.claim(api.jobs.create(config).id, "train", "test", 600)
        assert claim is not None
        found = {"step": 5, "validation_perplexity": perplexity, "validation_agreement": agreement}
        progress = {"done": 5, "total": 5, "unit": "steps", "tokens_per_second": 100.0 * (at + 1)}
        tell(api, claim, ("evaluation", found), ("progress", progress))
        tell(api, claim, ("cache", {"fingerprint": "0" * 32, "bytes_per_token": size}))
        api.jobs.finish(claim, "succeeded")
        made.append(claim.id)
    return made


VALUES = ((0.1, 50.0, 0.5, 20.0), (0.2, 40.0, 0.4, 30.0), (0.3, 60.0, 0.7, 10.0))


def test_quality_stands_against_a_cost_that_is_chosen(page: Page, api: Parts) -> None:
    ids = make_jobs(api, *VALUES)
    page.goto(f"{api.settings.server}/compare?jobs={','.join(ids)}")
    picture = page.get_by_role("img", name="Held-out perplexity against Bytes per token")
    expect(picture).to_have_accessible_name(re.compile("trial-1 40 at 30"))
    rows = page.get_by_role("table", name="Held-out perplexity against Bytes per token")
    expect(rows.get_by_role("row")).to_have_text(
        [re.compile("Job"), "trial-14030", "trial-05020", "trial-26010"]
    )
    page.get_by_label("Horizontal axis").select_option(label="Training, tokens per second")
    page.get_by_label("Vertical axis").select_option(label="Agreement with the teacher")
    table = page.get_by_role("table", name="Agreement with the teacher against Training")
    expect(table.get_by_role("row").nth(1)).to_have_text("trial-20.7300")
    expect(page).to_have_url(re.compile("x=speed&y=agreement"))
    page.reload()
    expect(table.get_by_role("row").nth(1)).to_have_text("trial-20.7300")


def test_perplexities_of_different_texts_are_not_compared(page: Page, api: Parts) -> None:
    note = page.get_by_text("The perplexities are not comparable")
    axis = page.get_by_label("Vertical axis").locator("option")
    for tokens, quality in (((640, 640), "Held-out perplexity"), ((640, 900), "Bits per byte")):
        ids = [running(api), running(api)]
        for at, (claim, count) in enumerate(zip(ids, tokens, strict=True)):
            report = {"student_bits_per_byte": 1.5 + at, "held_out_tokens": count}
            tell(api, claim, ("evaluation", {"step": 5, "validation_perplexity": 40.0 + at}))
            tell(api, claim, ("report", report), ("cache", {"bytes_per_token": 20.0}))
            api.jobs.finish(claim, "succeeded")
        page.goto(f"{api.settings.server}/compare?jobs={','.join(claim.id for claim in ids)}")
        row = page.get_by_role("table", name="Results").get_by_role("row", name="Bits per byte")
        expect(row.first).to_have_text("Bits per byte1.52.5")
        expect(axis.first).to_have_text(re.compile(f"^{quality}"))
        expect(note).to_be_visible(visible=quality == "Bits per byte")


def test_settings_and_quality_are_parallel_coordinates(page: Page, api: Parts) -> None:
    ids = make_jobs(api, *VALUES)
    page.goto(f"{api.settings.server}/compare?jobs={','.join(ids)}")
    table = page.get_by_role("table", name="Settings and quality")
    expect(table.get_by_role("row")).to_have_text(
        [re.compile("Job.*learning_rate.*perplexity"), "trial-10.240", "trial-00.150",
         "trial-20.360"]
    )  # fmt: skip
    lines = page.locator(".parallel polyline")
    expect(lines).to_have_count(3)
    expect(lines.last).to_have_class("best")
    expect(lines.last).to_have_attribute("data-job", ids[1])
    table.get_by_role("link", name="trial-2").focus()
    expect(page.locator(".parallel .chosen")).to_have_attribute("data-job", ids[2])
    # Two jobs are no study.
    page.goto(f"{api.settings.server}/compare?jobs={','.join(ids[:2])}")
    expect(page.get_by_role("table", name="Settings that differ")).to_be_visible()
    expect(table).to_have_count(0)


def test_without_jobs_the_page_lists_what_every_run_has_measured(page: Page, api: Parts) -> None:
    (job_id,) = make_jobs(api, VALUES[0])
    write_json(api.settings.run_dir(job_id) / "report.json", {"student_bits_per_byte": 1.25})
    page.goto(f"{api.settings.server}/jobs")
    page.get_by_role("link", name="Runs", exact=True).click()
    row = page.get_by_role("table", name="Runs").get_by_role("row", name=job_id)
    expect(row).to_contain_text("finished1.25")
    row.get_by_role("link").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("trial-0")


@pytest.mark.long
def test_a_study_compares_its_trials(page: Page, api: Parts) -> None:
    space = {"train.learning_rate": {"choices": [0.1, 0.2]}}
    data = {"train": "text.txt", "validation_fraction": 0.1}
    search = api.jobs.create(make_config("sought", "search", search={"space": space}, data=data)).id
    page.goto(f"{api.settings.server}/compare?study={search}")
    expect(page.get_by_text("The search has no trials yet.")).to_be_visible()
    for job_id in make_jobs(api, *VALUES):
        api.jobs.redis.hset(f"kd:job:{job_id}", "parent", search)
    rows = page.get_by_role("table", name="Settings and quality").get_by_role("row")
    expect(rows).to_have_count(4)
    page.get_by_role("link", name="sought").click()
    page.get_by_role("link", name="Compare the trials").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Trials of sought")
