"""The folders of the repository, of its example and of the tests' data."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
AUSTEN = ROOT / "examples" / "austen"
DATA = ROOT / "tests" / "data"
#: What students of the example learn from, and what is held out.
NOVELS = tuple(
    AUSTEN / "text" / f"{name}.txt"
    for name in ("emma", "mansfieldpark", "northangerabbey", "prideprejudice", "sensesensibility")
)
HELD_OUT = AUSTEN / "text" / "persuasion.txt"
