"""The frame of a page: one HTML file that needs nothing else, for light and dark."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

_CSS = """
:root {
  color-scheme: light dark;
  --paper: #fff; --ink: #1c1917; --quiet: #57534e; --line: #d6d3d1; --shade: #f5f5f4;
  --good: #15803d; --bad: #b91c1c;
  --series-1: #c2410c; --series-2: #1d4ed8; --series-3: #15803d; --series-4: #7e22ce;
  --series-5: #a16207; --series-6: #0e7490; --series-7: #be185d;
  font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #171412; --ink: #f5f5f4; --quiet: #a8a29e; --line: #44403c; --shade: #231f1c;
    --good: #4ade80; --bad: #f87171;
    --series-1: #fb923c; --series-2: #93c5fd; --series-3: #4ade80; --series-4: #d8b4fe;
    --series-5: #facc15; --series-6: #67e8f9; --series-7: #f9a8d4;
  }
}
body { margin: 0 auto; max-width: 84rem; padding: 0 1.25rem 4rem; }
h1 { font-size: 1.45rem; margin: 1.2rem 0 .4rem; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .4rem; border-top: 1px solid var(--line);
     padding-top: 1.2rem; }
p { margin: .4rem 0; max-width: 70ch; }
.quiet { color: var(--quiet); }
.bad { color: var(--bad); }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(22rem, 100%), 1fr));
         gap: 1rem; margin: .8rem 0; }
.plots figure { margin: 0; min-width: 0; max-width: 46rem; }
svg { width: 100%; height: auto; display: block; overflow: visible; }
.scroll { overflow-x: auto; background:
  linear-gradient(to right, var(--paper) 30%, transparent) left / 2.5rem 100% no-repeat local,
  linear-gradient(to left, var(--paper) 30%, transparent) right / 2.5rem 100% no-repeat local,
  linear-gradient(to right, var(--quiet), transparent) left / .6rem 100% no-repeat,
  linear-gradient(to left, var(--quiet), transparent) right / .6rem 100% no-repeat; }
table { border-collapse: collapse; margin: .6rem 0; }
th, td { text-align: right; padding: .3rem 1.1rem .3rem 0; border-bottom: 1px solid var(--line);
         white-space: nowrap; font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; }
td.wide { text-align: left; white-space: normal; min-width: 24rem; }
th { color: var(--quiet); font-weight: 500; }
tr.best td { font-weight: 600; }
.key { display: inline-block; width: .8rem; height: .8rem; border-radius: .15rem;
       margin-right: .5rem; vertical-align: -.08rem; }
pre { font: 13px/1.5 ui-monospace, monospace; background: var(--shade); padding: .8rem;
      overflow-x: auto; }
blockquote { margin: .8rem 0; padding: .1rem 1rem; border-left: .25rem solid var(--bad); }
@media print {
  body { max-width: none; padding: 0; font-size: 11px; }
  h2 { margin-top: 1.2rem; padding-top: .6rem; }
  figure, tr, pre { break-inside: avoid; }
  pre { white-space: pre-wrap; }
  details:not([open]) { display: none; }
}
""".strip()


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
