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
    return list(_read_entries())


def find_entry(code: str) -> str | None:
    """Return the entry of ``code``, which may have dashes; None if there is no such code."""
    return _read_entries().get(locate_help(code).rpartition("#")[2])


def _read_entries() -> dict[str, str]:
    page = next(path for root in _ROOTS if (path := root / HELP_PAGE).is_file())
    _, *parts = _HEADING.split(page.read_text(encoding="utf-8"))
    # The heading of the next chapter is no part of an entry.
    texts = (text.partition("\n## ")[0] for text in parts[1::2])
    entries = zip(parts[::2], texts, strict=True)
    return {code: f"### `{code}`{text}".strip() for code, text in entries}
