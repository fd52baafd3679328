"""Who names what: the names in the records of jobs, in held runs, and in cards of students."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

#: Ids of jobs and of uploaded files, fingerprints of caches, digests of saved models and data.
NAME = re.compile(r"job_[0-9a-z]{26}|file-[0-9a-z]{26}|(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])")
#: The files of a run that say what it was made from, and those in the folder of its student.
DESCRIPTIONS = ("config.json", "cache.json", "report.json")
CARDS = ("README.md", "distillation.json")
#: The student of a run, and those of a search's trials.
STUDENTS = ("student", "*/*/student")


def read_students(runs: Path) -> dict[str, str]:
    """Map each name in the cards of the students below ``runs`` to the name of the student."""
    found: dict[str, str] = {}
    for folder in sorted(runs.glob("[!.]*/")):
        students = [path for pattern in STUDENTS for path in folder.glob(pattern)]
        cards = [student / name for student in students for name in CARDS]
        for path in (*cards, *(folder / name for name in DESCRIPTIONS if students)):
            add_file(found, path, f"the student of {folder.name}", folder.name)
    return found


def add_names(found: dict[str, str], text: str, holder: str, own: str) -> None:
    """Map the names in ``text`` to their holder, unless they have one; it may name itself."""
    for name in set(NAME.findall(text)) - {own}:
        found.setdefault(name, holder)


def add_file(found: dict[str, str], path: Path, holder: str, own: str) -> None:
    """Add the names in a file, if it can be read."""
    with suppress(OSError):
        add_names(found, path.read_text(encoding="utf-8", errors="replace"), holder, own)
