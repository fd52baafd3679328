"""Pages of the dashboard in a browser: what axe finds, whether they fit, and pictures of them.

``KD_SCREENSHOTS`` names a folder for the pictures; without it none are taken.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from axe_playwright_python.base import AXE_SCRIPT
from playwright.sync_api import Page

#: The rules of WCAG that are of level A or AA.
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
WIDTHS = (1440, 360)
SCHEMES = ("light", "dark")

#: The first box of a table holds an empty one of this width, and is scrolled so far.
_EMPTY = """() => {
  const box = document.querySelector(".scroll");
  box.innerHTML = "";
  box.appendChild(document.createElement("div")).style.height = "60px";
  box.scrollIntoView();
}"""
_SCROLL = """([width, place]) => {
  const box = document.querySelector(".scroll");
  box.firstChild.style.width = width;
  box.scrollLeft = place;
}"""


def find_violations(page: Page) -> list[dict[str, Any]]:
    """Run axe on the page; return what it finds, and where."""
    page.evaluate(AXE_SCRIPT)
    options = json.dumps({"runOnly": {"type": "tag", "values": RULES}})
    found = page.evaluate(f"axe.run(document, {options})")
    return [
        {"rule": each["id"], "where": [node["target"] for node in each["nodes"]]}
        for each in found["violations"]
    ]


def require_fit(page: Page) -> None:
    """Fail where the page scrolls sideways."""
    wide = page.evaluate(
        "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )
    assert wide <= 0, f"the page is {wide} pixels wider than its window"


def find_marked_edges(page: Page) -> list[list[bool]]:
    """Return whether the left and the right edge of the first table's box have a shadow.

    A pair for each: a table that fits, a wide one at its beginning, and at its end.
    """
    page.evaluate(_EMPTY)
    place = page.locator(".scroll").first.bounding_box()
    assert place is not None
    left, top, right = int(place["x"]) + 1, place["y"] + 10, int(place["x"] + place["width"]) - 2
    found = []
    for width, beginning in (("0", 0), ("3000px", 0), ("3000px", 3000)):
        page.evaluate(_SCROLL, [width, beginning])
        clips = ({"x": x, "y": top, "width": 1, "height": 20} for x in (left, right))
        found.append([page.screenshot(clip=each) for each in clips])  # type: ignore[arg-type]
    plain = found[0][0]
    return [[edge != plain for edge in pair] for pair in found]


def take_picture(page: Page, name: str) -> None:
    """Keep a picture of the whole page, where the developer wants one."""
    if folder := os.environ.get("KD_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


def check_page(page: Page, name: str) -> None:
    """Check the page with axe and for its width, at both widths and in both schemes."""
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        require_fit(page)
        for scheme in SCHEMES:
            page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            assert find_violations(page) == []
            take_picture(page, f"{name}-{width}-{scheme}")
    page.set_viewport_size({"width": WIDTHS[0], "height": 900})
