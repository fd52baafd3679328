"""docs/README.md, the index: it names every page."""

from __future__ import annotations

from bench.support.paths import ROOT
from tests.support.documents import DOCUMENTS, list_targets

DOCS = ROOT / "docs"
INDEX = DOCS / "README.md"


def test_the_index_lists_every_page() -> None:
    listed = {(DOCS / target.partition("#")[0]).resolve() for target in list_targets(INDEX)}
    pages = {page for page in DOCUMENTS if page.is_relative_to(DOCS)} | {*DOCS.rglob("*.ipynb")}
    missing = sorted(str(page.relative_to(DOCS)) for page in pages - {INDEX} - listed)
    assert missing == [], "add a line for each of these pages to docs/README.md"


def test_the_readme_leads_to_the_index_and_to_the_tutorial() -> None:
    assert {"docs/README.md", "docs/tutorial.md"} <= set(list_targets(ROOT / "README.md"))
