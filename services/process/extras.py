"""The packages of Potstill's extras, and which of them are not installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

#: The extra of a process that runs jobs.
WORKER = "worker"


def find_missing_packages(extra: str) -> list[str]:
    """Return the packages of ``extra`` that are not installed, in the order of pyproject.toml."""
    missing = []
    for each in map(Requirement, requires("potstill") or []):
        # The marker of such a package holds on this machine for the extra, and not without it.
        marker = each.marker
        if marker and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""}):
            try:
                version(each.name)
            except PackageNotFoundError:
                missing.append(each.name)
    return missing
