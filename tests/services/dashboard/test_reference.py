"""The page of the API at /docs, in a browser: read, and tried with a key, with no other host."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from bench.support.harness import Parts, make_config
from bench.support.waiting import PATIENCE_SECONDS
from services.store.callers import Caller
from tests.support.services.api import serving, with_keys

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH")


@pytest.fixture(scope="module")
def guarded(
    _server_binary: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Parts, str]]:
    """An API with keys, and the key of alice."""
    file, keys = with_keys(tmp_path_factory.mktemp("keys"), alice="write")
    with serving(tmp_path_factory.mktemp("api"), api_keys_file=file) as parts:
        yield parts, keys["alice"]


@contextmanager
def watched_page(browser: Browser, server: str) -> Iterator[Page]:
    """The page; the test fails if it asked another host for anything, or logged an error."""
    tab = browser.new_context().new_page()
    tab.set_default_timeout(PATIENCE_SECONDS * 1000)
    wrong: list[str] = []
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on("console", lambda line: wrong.append(line.text) if line.type == "error" else None)
    tab.on("request", lambda each: None if each.url.startswith(server) else wrong.append(each.url))
    tab.goto(f"{server}/docs")
    yield tab
    tab.context.close()
    # The browser logs a 401 as "Failed to load resource".
    assert [line for line in wrong if "Failed to load resource" not in line] == []


@pytest.fixture
def page(browser: Browser, guarded: tuple[Parts, str]) -> Iterator[Page]:
    with watched_page(browser, guarded[0].settings.server) as page:
        yield page


def open_operation(page: Page, name: str) -> Locator:
    operation = page.locator("details.operation", has=page.get_by_text(name, exact=True))
    operation.locator("summary").click()
    return operation


def test_every_operation_and_every_type_can_be_read(page: Page, guarded: tuple[Parts, str]) -> None:
    document = guarded[0].http.get("/openapi.json").json()
    named = [f"{m.upper()} {path}" for path, each in document["paths"].items() for m in each]
    expect(page.locator("details.operation")).to_have_count(len(named))
    shown = page.locator("details.operation > summary > code").all_inner_texts()
    assert sorted(shown) == sorted(named)
    types = page.locator("details[id]:not(.operation) > summary").all_inner_texts()
    assert types == list(document["components"]["schemas"])
    operation = open_operation(page, "POST /jobs")
    expect(operation).to_contain_text("For a day, the same Idempotency-Key")
    assert json.loads(operation.locator("textarea").input_value())["name"] == "tiny"
    operation.get_by_role("link", name="JobConfig").first.click()
    expect(page.locator("#JobConfig table")).to_contain_text("depends_on")


def test_an_operation_is_tried_with_a_key(page: Page, guarded: tuple[Parts, str]) -> None:
    parts, key = guarded
    job_id = parts.jobs.create(make_config("quick"), Caller("alice")).id
    operation = open_operation(page, "GET /jobs/{job_id}")
    operation.locator("input[name=job_id]").fill(job_id)
    operation.get_by_role("button", name="Send").click()
    expect(operation.locator(".answer")).to_contain_text("401")
    page.locator("input[name=key]").fill(key)
    page.get_by_role("button", name="Use this key").click()
    operation.get_by_role("button", name="Send").click()
    expect(operation.locator(".answer .good")).to_contain_text("200")
    expect(operation.locator(".answer pre")).to_contain_text(f'"id": "{job_id}"')
    stream = open_operation(page, "GET /jobs/{job_id}/events/stream")
    stream.locator("input[name=job_id]").fill(job_id)
    stream.get_by_role("button", name="Send").click()
    expect(stream.locator(".answer pre")).to_contain_text("event: status")
    stream.get_by_role("button", name="Stop").click()
    expect(stream.get_by_role("button", name="Stop")).to_have_count(0)


@pytest.mark.usefixtures("_server_binary")
def test_without_keys_the_page_is_the_same_and_asks_no_other_host(
    browser: Browser, guarded: tuple[Parts, str], tmp_path: Path
) -> None:
    with serving(tmp_path) as parts, watched_page(browser, parts.settings.server) as page:
        expect(page.locator("details.operation").first).to_be_visible()
        operation = open_operation(page, "GET /jobs")
        operation.get_by_role("button", name="Send").click()
        expect(operation.locator(".answer .good")).to_contain_text("200")
        answers = [each.http.get("/docs") for each in (parts, guarded[0])]
        assert answers[0].content == answers[1].content
        policies = [each.headers["content-security-policy"] for each in answers]
        assert policies[0] == policies[1] and "default-src 'none'" in policies[0]
