"""The entries of ``docs/troubleshooting.md``, one for each code of an error, for ``kd explain``."""

from __future__ import annotations

import re
from pathlib import Path

from cache.errors import HELP_PAGE, locate_help

#: The folder of the source code, and that of the package in a wheel.
_ROOTS = (Path(__file__).resolve().parents[2], Path(__file__).resolve().parents[1])
_HEADING = re.compile(r"^### `(\w+)`$", re.MULTILINE)


def list_codes() -> list[str]:
    """Return the codes that have an entry, in the order of the page."""
    return _HEADING.findall(_read_page())


def find_entry(code: str) -> str | None:
    """Return the entry of ``code``, which may have dashes; None if there is no such code."""
    wanted = locate_help(code).rpartition("#")[2]
    page = _read_page()
    headings = list(_HEADING.finditer(page))
    ends = [each.start() for each in headings[1:]] + [len(page)]
    for heading, end in zip(headings, ends, strict=True):
        if heading[1] == wanted:
            # The heading of the next chapter is no part of the entry.
            return page[heading.start() : end].partition("\n## ")[0].strip()
    return None


def _read_page() -> str:
    found = next(path for root in _ROOTS if (path := root / HELP_PAGE).is_file())
    return found.read_text(encoding="utf-8")
