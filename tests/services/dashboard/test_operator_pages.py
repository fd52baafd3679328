"""The pages of the operator in a browser: health, storage and keys."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from bench.support.harness import Parts
from bench.support.small.caches import make_cache, make_identity
from tests.support.services.api import serving, with_keys


@pytest.fixture
def page(new_tab: Callable[..., AbstractContextManager[Page]]) -> Iterator[Page]:
    with new_tab() as tab:
        yield tab


def test_health_storage_and_keys_are_one_click_apart(page: Page, api: Parts) -> None:
    page.goto(f"{api.settings.server}/jobs")
    page.get_by_role("link", name="Service").click()
    expect(page).to_have_title("Health · Potstill")
    expect(page.get_by_role("table", name="Queues").get_by_role("row").nth(1)).to_contain_text(
        "precompute"
    )
    pages = page.get_by_role("navigation", name="Service")
    pages.get_by_role("link", name="Storage").click()
    expect(page).to_have_title("Storage · Potstill")
    expect(page.get_by_role("table", name="Kinds").get_by_role("row")).to_have_count(7)
    expect(page.get_by_role("table", name="Teams").get_by_role("row").nth(1)).to_contain_text(
        "local"
    )
    pages.get_by_role("link", name="Keys").click()
    expect(page.get_by_text("Requests need no key")).to_be_visible()
    expect(pages.get_by_role("link", name="Keys")).to_have_attribute("aria-current", "page")


@pytest.mark.usefixtures("_server_binary")
@pytest.mark.long
def test_an_operator_sees_keys_and_what_would_be_removed(page: Page, tmp_path: Path) -> None:
    file, keys = with_keys(tmp_path, ann="write", root="admin")
    with serving(tmp_path / "home", api_keys_file=file, retain_caches_unused_days=2.0) as parts:
        folder = make_cache(parts.settings.caches, make_identity(train_sequences=12))
        then = time.time() - 3 * 86_400
        os.utime(folder / "manifest.json", (then, then))
        page.goto(f"{parts.settings.server}/keys")
        question = page.get_by_role("dialog")
        question.locator("input").fill(keys["ann"])
        question.get_by_role("button").click()
        expect(page.get_by_role("status")).to_contain_text("the key of ann has no scope admin")
        page.evaluate("sessionStorage.clear()")
        page.reload()
        question.locator("input").fill(keys["root"])
        question.get_by_role("button").click()
        rows = page.get_by_role("table", name="Keys").get_by_role("row")
        expect(rows.filter(has_text="ann")).to_contain_text("write")
        expect(rows.filter(has_text="root")).to_contain_text("just now")
        page.get_by_role("navigation", name="Service").get_by_role("link", name="Storage").click()
        removable = page.get_by_role("table", name="What kd gc would remove").get_by_role("row")
        expect(removable.nth(1)).to_contain_text("not used for 3 days")
        page.locator("summary", has_text="The largest caches").click()
        expect(page.get_by_role("table", name="The largest caches")).to_be_visible()
        removable.get_by_role("link").click()
        expect(page).to_have_title(f"Cache {folder.name[:12]} · Potstill")
