"""The share of the gap by the noise of the records: a law for docs/benchmarks/quality.md.

    python -m bench.support.quality.law

It reads the rows of the page's section of 330 steps and prints the line through them in log-log,
by least squares, and what a share of 97 % takes by that line and between the measured rows. The
bytes of an id are the floor of the ids' frequencies in docs/benchmarks/coding.md.
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
#: Bytes of the ids of a record of threshold 0.04 at the floor, and the number of the ids.
FLOOR_BYTES = 2.43 + 11.16
FLOOR_IDS = 2.85 + 9.74


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
            threshold=float(name.removeprefix("threshold ")),
            entries=float(entries),
            bytes=float(size),
            noise=float(noise),
            behind=float(behind),
            share=float(re.sub("%.*", "", share)) / 100,
        )
        for name, entries, size, noise, _, behind, share, *_ in cells
        if name.startswith("threshold ")
    ]
    (gap,) = (float(each[5]) for each in cells if each[0] == "cross-entropy only")
    return rows, gap


def describe_law() -> str:
    """Describe the law in the numbers that the page states."""
    rows, gap = read_rows()
    law = Law.fit(rows, gap)
    shares = sorted((row.share, row.bytes) for row in rows)
    line = float(np.interp(WANTED, *zip(*shares, strict=True)))
    id_bytes = FLOOR_BYTES / FLOOR_IDS
    return (
        f"behind all of p = {law.factor:.2f} noise^{law.power:.2f} nats\n"
        f"{WANTED:.0%}: {(1 - WANTED) * gap:.4f} behind, a noise of {law.noise:.4f}, a threshold "
        f"of {law.threshold:.3f}, {law.entries:.0f} entries, {law.bytes:.0f} bytes\n"
        f"between the measured rows: {line:.0f} bytes\n"
        f"an id: {id_bytes:.2f} bytes; {law.entries:.0f} ids: {law.entries * id_bytes:.0f} bytes; "
        f"24 bytes: {24 / id_bytes:.0f} ids"
    )


if __name__ == "__main__":
    print(describe_law())
