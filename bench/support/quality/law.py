"""The share of the gap by the noise of the records: a law for docs/benchmarks/quality.md.

    python -m bench.support.quality.law

It reads the rows of version 0.2.0 in the page's section of 330 steps and prints the line through
them in log-log, by least squares, and what a share of 97 % takes by that line: with those records,
and with records in units of 256 clusters, whose noise and bytes are those of
docs/benchmarks/coding.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from bench.support.paths import ROOT

PAGE = ROOT / "docs/benchmarks/quality.md"
SECTION = "## 330 steps, and what more bytes buy"
#: The share that the law is asked for.
WANTED = 0.97
#: Noise and bytes of records in units, and the bytes that tokens take beside them.
UNIT_NOISE = (0.00563, 0.01408)
UNIT_BYTES = (20.95, 12.98)
TOKEN_BYTES = 1.35


@dataclass(frozen=True)
class Row:
    """A student of a threshold: entries and bytes a token, noise, nats behind all of p, share."""

    threshold: float
    entries: float
    bytes: float
    noise: float
    behind: float
    share: float


@dataclass(frozen=True)
class Law:
    """behind = factor noise^power, and what ``WANTED`` takes by it."""

    factor: float
    power: float
    noise: float
    threshold: float
    entries: float
    bytes: float

    @classmethod
    def fit(cls, rows: list[Row], gap: float) -> Law:
        """Fit the rows by least squares; ``gap``: nats from plain training to all of p."""
        logs = {
            name: np.log([getattr(row, name) for row in rows])
            for name in ("threshold", "entries", "bytes", "noise", "behind")
        }
        power, factor = np.polyfit(logs["noise"], logs["behind"], 1)
        noise = (np.log((1 - WANTED) * gap) - factor) / power
        order = np.argsort(logs["noise"])

        def look_up(name: str) -> float:
            return float(np.exp(np.interp(noise, logs["noise"][order], logs[name][order])))

        return cls(
            factor=float(np.exp(factor)),
            power=float(power),
            noise=float(np.exp(noise)),
            threshold=look_up("threshold"),
            entries=look_up("entries"),
            bytes=look_up("bytes"),
        )


def read_rows() -> tuple[list[Row], float]:
    """Read the rows of the thresholds, and the nats from plain training to all of p."""
    section = PAGE.read_text(encoding="utf-8").partition(SECTION)[2].partition("\n## ")[0]
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.partition("\nSo **")[0].splitlines()
        if line.startswith("| ")
    ]
    rows = [
        Row(
            threshold=float(name.split()[1]),
            entries=float(entries),
            bytes=float(size),
            noise=float(noise),
            behind=float(behind),
            share=float(re.sub("%.*", "", share)) / 100,
        )
        for name, entries, size, noise, _, behind, share, *_ in cells
        if name.endswith(" of 0.2.0")
    ]
    (gap,) = (float(each[5]) for each in cells if each[0] == "cross-entropy only")
    return rows, gap


def describe_law() -> str:
    """Describe the law in the numbers that the page states."""
    rows, gap = read_rows()
    law = Law.fit(rows, gap)
    slope, start = np.polyfit(np.log(UNIT_NOISE), np.log(UNIT_BYTES), 1)
    units = float(np.exp(start + slope * np.log(law.noise)))
    return (
        f"behind all of p = {law.factor:.2f} noise^{law.power:.2f} nats\n"
        f"{WANTED:.0%}: {(1 - WANTED) * gap:.4f} behind, a noise of {law.noise:.4f}\n"
        f"records of 0.2.0: a threshold of {law.threshold:.3f}, {law.entries:.0f} entries, "
        f"{law.bytes:.0f} bytes\n"
        f"in units, with 256 clusters and the tokens: {units + TOKEN_BYTES:.0f} bytes"
    )


if __name__ == "__main__":
    print(describe_law())
