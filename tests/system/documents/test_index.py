"""docs/README.md, the index: it names every page."""

from __future__ import annotations

import re

from bench.support.paths import ROOT
from kd.evaluation.words import WORDS
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


#: Pages that programs write, or whose tables do.
WRITTEN = {"api.md", "cli.md", "settings.md", "python.md", "configuration.md", "glossary.md"}
WORD = re.compile(r"\b(?:nats|kept mass|gold|parity|bits per byte|seals?|held[ -]out|tail)\b")


def test_a_page_that_uses_a_word_of_the_glossary_links_to_it() -> None:
    pages = [
        page for page in DOCUMENTS if page.name not in WRITTEN and page.parent.name != "benchmarks"
    ]
    missing = [
        str(page.relative_to(ROOT))
        for page in pages
        if "glossary.md" not in (text := page.read_text(encoding="utf-8"))
        and WORD.search("".join(line for line in text.splitlines(True) if line[0] not in "|#"))
    ]
    assert missing == [], "link the word where it first stands"


def test_the_dashboard_explains_words_as_the_glossary_does() -> None:
    script = (ROOT / "services/dashboard/words.js").read_text(encoding="utf-8")
    said = re.findall(r'^  "?([\w ]+)"?: "(.+)",$', script, re.MULTILINE)
    rows = (DOCS / "glossary.md").read_text(encoding="utf-8").splitlines()
    assert len(said) == 13
    for word, sentence in said:
        assert any(row.startswith(f"| {word} |") and sentence in row for row in rows), word


def test_a_report_explains_words_as_the_glossary_does() -> None:
    rows = (DOCS / "glossary.md").read_text(encoding="utf-8").splitlines()
    for row, sentence in WORDS.values():
        assert any(each.startswith(f"| {row} |") and sentence in each for each in rows), row
