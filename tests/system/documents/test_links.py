"""Every link of the documents leads to something: a file, a heading, or an address."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.support.paths import ROOT
from tests.support.documents import LINKED, find_fault, list_anchors, list_targets


@pytest.mark.parametrize("document", LINKED, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_resolves(document: Path) -> None:
    faults = {
        target: fault
        for target in list_targets(document)
        if (fault := find_fault(document, target)) is not None
    }
    assert faults == {}


def test_anchors_are_those_of_github(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# The `kd run` command, *today*\n\n## A - B\n\n## Same\n\n## Same\n\n"
        'A [link](#same-1), `[code](x.md)`, ![picture](p.svg) and <a id="here"></a>.\n\n'
        "```text\n# No heading\n[no](link.md)\n```\n"
    )
    assert list_anchors(page) == {"the-kd-run-command-today", "a---b", "same", "same-1", "here"}
    assert list_targets(page) == ["#same-1", "p.svg"]


@pytest.mark.parametrize(
    ("target", "fault"),
    [
        ("page.md", None),
        ("page.md#a", None),
        ("#a", None),
        ("https://example.org/x#y", None),
        ("#b", "no such heading"),
        ("page.md#b", "no such heading"),
        ("other.md", "no such file"),
        ("/page.md", "no such file"),
        ("text.txt#a", "an anchor in a file that is not Markdown"),
        ("ftp://example.org", "not an http address"),
        ("https:///x", "not an http address"),
    ],
)
def test_a_link_that_leads_nowhere_is_found(tmp_path: Path, target: str, fault: str | None) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A\n")
    (tmp_path / "text.txt").touch()
    assert find_fault(page, target) == fault
