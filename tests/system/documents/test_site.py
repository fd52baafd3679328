"""The documents as a site: it builds without a warning, and loads nothing from other hosts."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.support.paths import ROOT
from bench.support.waiting import PATIENCE_SECONDS
from tests.support.documents import LINKED, list_targets

#: What the builder reads, besides the files that the pages link to.
PARTS = (".mkdocs.yml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "examples")
#: A part of a page that a browser loads from another host on its own.
LOADED = re.compile(r"<(?:script|img|link|iframe)\b[^>]*?\b(?:src|href)=[\"']?(?:https?:)?//")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the documents, in which a site can be built."""
    if importlib.util.find_spec("material") is None:
        if os.environ.get("CI"):
            pytest.fail("mkdocs-material is not installed")
        pytest.skip("mkdocs-material is not installed")
    folder = tmp_path_factory.mktemp("site")
    for name in PARTS:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    for page in LINKED:
        for target in list_targets(page):
            copy_file(page.parent / target.partition("#")[0], folder)
    return folder


def copy_file(path: Path, folder: Path) -> None:
    """Copy a file of the repository to its place in ``folder``; anything else is left out."""
    if path.is_file():
        copy = folder / path.resolve().relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)


def build(repository: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "docs/site.py"]
    return subprocess.run(
        command, cwd=repository, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )


@pytest.mark.long
def test_the_site_builds_with_every_page_and_nothing_of_other_hosts(repository: Path) -> None:
    done = build(repository)
    assert done.returncode == 0, done.stderr
    site = repository / "build" / "site"
    pages = [page.relative_to(ROOT) for page in (ROOT / "docs").rglob("*.md")]
    built = {
        page.with_name("index.html") if page.name == "README.md" else page.with_suffix(".html")
        for page in pages
    }
    assert [str(page) for page in built if not (site / page).is_file()] == []
    for page in site.rglob("*.html"):
        assert LOADED.findall(page.read_text(encoding="utf-8")) == [], page


@pytest.mark.long
def test_a_broken_link_fails_the_site(repository: Path) -> None:
    page = repository / "docs" / "concepts" / "temperature.md"
    before = page.read_text(encoding="utf-8")
    page.write_text(f"{before}\n[nowhere](nowhere.md)\n", encoding="utf-8")
    done = build(repository)
    page.write_text(before, encoding="utf-8")
    assert done.returncode != 0
    assert "nowhere.md" in done.stderr
