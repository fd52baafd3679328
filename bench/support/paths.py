"""The folders of the repository, of its example and of the tests' data."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
AUSTEN = ROOT / "examples" / "austen"
DATA = ROOT / "tests" / "data"
