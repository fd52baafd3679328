"""A real API, a browser, and how long tests wait for what a page shows."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from bench.support.harness import Parts
from bench.support.waiting import PATIENCE_SECONDS
from tests.support.services.api import serving

QUIET = [
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
]


@pytest.fixture(scope="session", autouse=True)
def _patience() -> None:
    expect.set_options(timeout=PATIENCE_SECONDS * 1000)


@pytest.fixture(scope="module")
def api(_server_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    with serving(tmp_path_factory.mktemp("api")) as parts:
        yield parts


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = next(filter(None, map(shutil.which, names)), None)
    if chromium is None:
        pytest.skip("no Chromium on PATH")
    with sync_playwright() as driver:
        sandbox = [] if os.geteuid() else ["--no-sandbox"]
        started = driver.chromium.launch(executable_path=chromium, args=[*sandbox, *QUIET])
        yield started
        started.close()


@pytest.fixture
def new_tab(browser: Browser) -> Callable[..., AbstractContextManager[Page]]:
    """Open a tab in a context with these options; it fails where the page logged an error."""

    @contextmanager
    def open_tab(**options: Any) -> Iterator[Page]:
        context = browser.new_context(**options)
        context.set_default_timeout(PATIENCE_SECONDS * 1000)
        tab = context.new_page()
        wrong: list[str] = []
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on(
            "console",
            lambda line: wrong.append(line.text) if line.type in ("error", "warning") else None,
        )
        yield tab
        context.close()
        # The browser logs a 404 as "Failed to load resource"; some tests provoke one.
        assert [line for line in wrong if "Failed to load resource" not in line] == []

    return open_tab
