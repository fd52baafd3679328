"""The documents of the repository: their blocks of code, the commands in them, and their links."""

from __future__ import annotations

import functools
import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from markdown_it import MarkdownIt
from markdown_it.token import Token

from bench.support.paths import ROOT

README = ROOT / "README.md"
DOCUMENTS = [README, *sorted((ROOT / "docs").rglob("*.md"))]
#: The documents whose links are checked: these, and the Markdown files beside them.
LINKED = [
    *DOCUMENTS,
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "examples").rglob("*.md")),
]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One block of code in a document; ``number`` counts the document's blocks of all languages.

    ``line`` is the line of the document before the block's first line of code, counted from 1.
    """

    document: Path
    number: int
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        """The document and the number of the block."""
        return f"{self.document.relative_to(ROOT)} block {self.number}"


def read_document(document: Path) -> str:
    return document.read_text(encoding="utf-8")


def list_all_blocks(document: Path) -> list[Block]:
    """The document's blocks of all languages, in their order."""
    text = read_document(document)
    return [
        Block(document, number, text.count("\n", 0, match.start()) + 1, match[1], match[2])
        for number, match in enumerate(_FENCE.finditer(text), 1)
    ]


def list_blocks(document: Path, language: str) -> list[Block]:
    """The document's blocks of one language, in their order."""
    return [block for block in list_all_blocks(document) if block.language == language]


def join_blocks(blocks: list[Block]) -> str:
    """One program of the blocks of a document, in which each line has its number in the document.

    So a traceback names the line of the document.
    """
    program = ""
    for block in blocks:
        program += "\n" * (block.line - program.count("\n")) + block.text
    return program


def drop_blocks(text: str) -> str:
    """The text of a document without its blocks of code."""
    return _FENCE.sub("", text)


def list_command_lines(block: Block) -> list[str]:
    """The commands of a ``bash`` block as printed: lines that a quote or a backslash joins are one.

    Lines that hold only a comment are left out.
    """
    found: list[str] = []
    open_lines = ""
    for line in block.text.splitlines():
        open_lines += line
        if not _is_open(open_lines):
            found.append(open_lines)
            open_lines = ""
        else:
            open_lines += "\n"
    assert not open_lines, f"{block.name}: a quote is open: {open_lines}"
    return [line for line in found if split_words(line)]


def _is_open(line: str) -> bool:
    if line.endswith("\\"):
        return True
    try:
        split_words(line)
    except ValueError:  # a quote is open
        return True
    return False


def split_words(line: str) -> list[str]:
    """The words of a command line without its comment."""
    return shlex.split(line.replace("\\\n", " "), comments=True)


def split_commands(line: str) -> list[list[str]]:
    """The words of each simple command of a line, without the variables that are set for it.

    Pipes and lists are split into their commands.
    """
    lexer = shlex.shlex(line.replace("\\\n", " "), posix=True, punctuation_chars=";|&")
    lexer.whitespace_split = True
    groups = itertools.groupby(lexer, lambda word: set(word) <= set(";|&"))
    commands = [list(group) for separator, group in groups if not separator]
    return [
        list(itertools.dropwhile(lambda word: re.match(r"\w+=", word), words)) for words in commands
    ]


def list_inline_commands(program: str, documents: list[Path]) -> Iterator[tuple[Path, list[str]]]:
    """Yield the words after ``program`` of each command in backticks, in the prose of documents."""
    for document in documents:
        for line in re.findall(rf"`{program} ([^`]+)`", drop_blocks(read_document(document))):
            yield document, split_words(" ".join(line.split()))


# ---------------------------------------------------------------------- links

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
