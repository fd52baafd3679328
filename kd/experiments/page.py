"""The frame of a page: one HTML file that needs nothing else, for light and dark."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path

_CSS = Path(__file__).with_suffix(".css").read_text(encoding="utf-8").strip()


def render_page(title: str, parts: Iterable[str]) -> str:
    """Return a whole HTML page of ``parts``, which are HTML already."""
    name = html.escape(title)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{name}</title>\n<style>\n{_CSS}\n</style>\n</head>\n<body>\n"
        f"<h1>{name}</h1>\n" + "\n".join(parts) + "\n</body>\n</html>\n"
    )


def make_element(tag: str, text: str, kind: str = "") -> str:
    """Return an element with ``text``, which is not HTML, and perhaps a class."""
    name = f' class="{kind}"' if kind else ""
    return f"<{tag}{name}>{html.escape(text)}</{tag}>"


def make_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], marks: Sequence[str] = ()
) -> str:
    """Return a table whose cells are HTML already; ``marks`` are the classes of its rows."""
    head = "".join(make_element("th", column) for column in columns)
    body = []
    for number, row in enumerate(rows):
        kind = f' class="{marks[number]}"' if number < len(marks) and marks[number] else ""
        cells = (cell if cell.startswith("<td") else f"<td>{cell}</td>" for cell in row)
        body.append(f"<tr{kind}>{''.join(cells)}</tr>")
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def make_plots(drawings: Iterable[str]) -> str:
    """Return plots beside each other, as many in a row as there is room."""
    return f'<div class="plots">{"".join(f"<figure>{each}</figure>" for each in drawings)}</div>'
