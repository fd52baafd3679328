"""Plots as SVG inside a page, in the colours of the page: one drawing for light and dark.

matplotlib draws them. The page's colours are CSS variables, which matplotlib does not know: each
has a stand-in colour here, and is put in its place in the finished SVG.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from io import BytesIO
from typing import Any

#: The stand-ins of the page's colours.
INK, QUIET, LINE, PAPER = "#010101", "#020202", "#030303", "#050505"
#: Lines beside each other. The eighth and later ones are dashed.
SERIES = tuple(f"#04040{number}" for number in range(1, 8))
#: The name of the page's colour for each stand-in.
_NAMES = {INK: "ink", QUIET: "quiet", LINE: "line", PAPER: "paper"}
_NAMES |= {color: f"series-{number}" for number, color in enumerate(SERIES, start=1)}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: it has the page's font and can be searched
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": QUIET,
    "axes.titlecolor": INK,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": QUIET,
    "ytick.labelcolor": QUIET,
    "axes.prop_cycle": f"cycler('color', {list(SERIES)})",
    "lines.linewidth": 1.4,
    "legend.facecolor": PAPER,
    "legend.edgecolor": PAPER,
    "legend.framealpha": 0.75,
    "legend.fontsize": 8,
}


def draw_svg(
    draw: Callable[[Any], None], title: str, width: float = 4.6, height: float = 3.1
) -> str:
    """Return the figure that ``draw`` fills as an ``<svg>`` element.

    ``title`` is for readers who do not see it; width and height are in inches.
    """
    # Imported here because most commands draw nothing.
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": title}):
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure)
        image = BytesIO()
        figure.savefig(image, format="svg", transparent=True, metadata={"Date": None})
    text = image.getvalue().decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # Elements are found by the hashed names alone, and a page has several drawings.
    text = re.sub(r' id="[a-zA-Z]+\d*_\d+"', "", text)
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 system-ui, sans-serif", text)
    for color, name in _NAMES.items():
        text = text.replace(color, f"var(--{name})")
    label = html.escape(title, quote=True)
    return text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def style_line(number: int) -> dict[str, str]:
    """Return the colour and dashes of line ``number``, from 0."""
    dashes = ("-", "--", ":")[number // len(SERIES) % 3]
    return {"color": SERIES[number % len(SERIES)], "linestyle": dashes}
