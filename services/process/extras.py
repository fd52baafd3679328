"""The packages of Potstill's extras, and which of them are not installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires, version

from packaging.markers import Marker
from packaging.requirements import Requirement

#: The extra of a process that runs jobs.
WORKER = "worker"


def find_missing_packages(extra: str) -> list[str]:
    """Return the packages of ``extra`` that are not installed, in the order of pyproject.toml."""
    return [name for name in _list_packages(extra) if not _is_installed(name)]


def _list_packages(extra: str) -> list[str]:
    found = map(Requirement, requires("potstill") or [])
    return [each.name for each in found if each.marker and _is_for(each.marker, extra)]


def _is_for(marker: Marker, extra: str) -> bool:
    """Whether a marker holds on this machine for ``extra``, and not without it."""
    return marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})


def _is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True
