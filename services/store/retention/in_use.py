"""The names that must stay: those in the records of jobs, and in the cards of kept students."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from services.store.jobs.caches import NamingJob
from services.store.run_folder import is_held

#: Ids of jobs and of uploaded files, fingerprints of caches, digests of saved models and data.
NAME = re.compile(r"job_[0-9a-z]{26}|file-[0-9a-z]{26}|(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])")
#: The files of a run that say what it was made from, and those in the folder of its student.
DESCRIPTIONS = ("config.json", "cache.json", "report.json")
CARDS = ("README.md", "distillation.json")
#: The student of a run, and those of a search's trials.
STUDENTS = ("student", "*/*/student")


class InUse(NamedTuple):
    """Names, and who names them: open jobs and runs, kept students, and jobs that have ended.

    A holder is a text such as "the student of job_...". A run that names itself does not count.
    """

    open: dict[str, str]
    students: dict[str, str]
    ended: dict[str, str]
    ended_jobs: list[NamingJob]

    def find_holder(self, name: str, ended: bool = False) -> str | None:
        """Say who names ``name``; with ``ended`` also an ended job, which may be retried."""
        found = self.open.get(name) or self.students.get(name)
        return found or (self.ended.get(name) if ended else None)


def read_in_use(jobs: Iterable[NamingJob], runs: Path) -> InUse:
    """Read all ``jobs``, every run that a process holds, and every student below ``runs``."""
    found = InUse({}, read_students(runs), {}, [])
    for job in jobs:
        if job.open:
            found.open.setdefault(job.id, f"the job {job.id} has not ended")
            _add(found.open, job.text, f"the job {job.id}, which has not ended", job.id)
        else:
            _add(found.ended, job.text, f"the job {job.id}", job.id)
            if job.ended:
                found.ended_jobs.append(job)
    for folder in _list_runs(runs):
        if is_held(folder):
            _add(found.open, _read(folder / "config.json"), f"the run {folder.name}", folder.name)
    return found


def read_students(runs: Path) -> dict[str, str]:
    """Map each name in the cards of the students below ``runs`` to the name of the student."""
    found: dict[str, str] = {}
    for folder in _list_runs(runs):
        students = [path for pattern in STUDENTS for path in folder.glob(pattern)]
        cards = [student / name for student in students for name in CARDS]
        for path in (*cards, *(folder / name for name in DESCRIPTIONS if students)):
            _add(found, _read(path), f"the student of {folder.name}", folder.name)
    return found


def _list_runs(runs: Path) -> list[Path]:
    return sorted(path for path in runs.glob("[!.]*") if path.is_dir())


def _add(found: dict[str, str], text: str, holder: str, own: str) -> None:
    for name in set(NAME.findall(text)) - {own}:
        found.setdefault(name, holder)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
