"""Build the documents as a site into build/site, which git ignores: ``make site``.

The Markdown files stay where they are in the repository, so that every link holds there. The site
is made from a copy of them in the same folders, with the files that they link to. Its menu is the
index, docs/README.md: a heading there is a section, and each link below it is a page.
"""

from __future__ import annotations

import logging
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from mkdocs.commands.build import build
from mkdocs.config import load_config
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parents[1]
INDEX = ROOT / "docs" / "README.md"
SOURCE = ROOT / "build" / "site-source"
#: What a link leads to, without its anchor, where that is a file of ours.
_LINK = re.compile(r"\]\((?!\w+:)([^)\s#]+)")
_MENU_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s#]+\.md)\)")


def list_pages() -> list[Path]:
    """The Markdown files of the site."""
    named = (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))
    folders = (ROOT / "docs", ROOT / "examples")
    return [*named, *(page for folder in folders for page in sorted(folder.rglob("*.md")))]


def list_linked_files(page: Path) -> Iterator[Path]:
    """The files that a page links to, and shows as pictures."""
    for target in _LINK.findall(page.read_text(encoding="utf-8")):
        path = (page.parent / target).resolve()
        if path.is_file() and path.is_relative_to(ROOT):
            yield path


def copy_source() -> None:
    """Copy the pages, and the files that they link to, into ``SOURCE``."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    pages = list_pages()
    for path in {*pages, *(file for page in pages for file in list_linked_files(page))}:
        copy = SOURCE / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)


def make_menu() -> list[dict[str, object]]:
    """The menu: the README, the index, then the sections of the index with their pages."""
    menu: list[dict[str, object]] = [{"Potstill": "README.md"}, {"Documents": "docs/README.md"}]
    for section in INDEX.read_text(encoding="utf-8").split("\n## ")[1:]:
        heading, _, text = section.partition("\n")
        pages = [
            {title: str((INDEX.parent / target).resolve().relative_to(ROOT))}
            for title, target in _MENU_LINK.findall(text)
        ]
        if pages:
            menu.append({heading: pages})
    return menu


def main() -> None:
    """Build the site; a link that leads nowhere is an error."""
    logging.basicConfig(format="%(levelname)s %(message)s")
    copy_source()
    config = load_config(str(ROOT / ".mkdocs.yml"), strict=True, nav=make_menu())
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")  # anchors as GitHub makes them
    build(config)
    sys.stderr.write(f"the site is in {config.site_dir}: open index.html\n")


if __name__ == "__main__":
    main()
