"""The links and the anchors of a Markdown document, as GitHub makes them."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from markdown_it import MarkdownIt
from markdown_it.token import Token

_PARSER = MarkdownIt("commonmark").enable("table")
_TARGETS = {"link_open": "href", "image": "src"}
_HTML_TARGET = re.compile(r"<(?:a|img)\b[^>]*?\b(?:href|src)=[\"']([^\"']+)")
_HTML_ANCHOR = re.compile(r"<\w+\b[^>]*?\b(?:id|name)=[\"']([^\"']+)")


@functools.cache
def _parse(document: Path) -> list[Token]:
    return _PARSER.parse(document.read_text(encoding="utf-8"))


def _list_parts(document: Path) -> Iterator[Token]:
    for token in _parse(document):
        yield token
        yield from token.children or ()


def list_targets(document: Path) -> list[str]:
    """The targets of the document's links and images, without those in code."""
    found = []
    for token in _list_parts(document):
        if token.type in _TARGETS:
            found.append(str(token.attrs[_TARGETS[token.type]]))
        elif token.type in {"html_inline", "html_block"}:
            found += _HTML_TARGET.findall(token.content)
    return found


@functools.cache
def list_anchors(document: Path) -> frozenset[str]:
    """The anchors of the document: those of its headings, and those written as HTML.

    GitHub writes a heading in lower case, drops all but letters, digits, ``_``, ``-`` and spaces,
    and turns spaces to ``-``. The second heading of a name gets ``-1``, the third ``-2``.
    """
    found: dict[str, None] = {}
    tokens = _parse(document)
    for opening, inline in itertools.pairwise(tokens):
        if opening.type != "heading_open":
            continue
        words = "".join(
            child.content
            for child in inline.children or ()
            if child.type in {"text", "code_inline"}
        )
        name = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        anchor, number = name, 0
        while anchor in found:
            number += 1
            anchor = f"{name}-{number}"
        found[anchor] = None
    for token in _list_parts(document):
        if token.type in {"html_inline", "html_block"}:
            found |= dict.fromkeys(_HTML_ANCHOR.findall(token.content))
    return frozenset(found)


def find_fault(document: Path, target: str) -> str | None:
    """What is wrong with a link of the document; None if nothing is.

    The form of an address is checked, and not whether anyone answers there.
    """
    parts = urlsplit(target)
    if parts.scheme or parts.netloc:
        good = parts.scheme in {"http", "https"} and re.fullmatch(r"[\w.:-]+", parts.netloc)
        return None if good else "not an http address"
    path = document if not parts.path else document.parent / parts.path
    if parts.path.startswith("/") or not path.exists():
        return "no such file"
    if not parts.fragment:
        return None
    if path.suffix != ".md":
        return "an anchor in a file that is not Markdown"
    return None if parts.fragment in list_anchors(path) else "no such heading"
