"""The version of Potstill. ``pyproject.toml`` is the one place that holds it."""

from __future__ import annotations

import functools
import tomllib
from contextlib import suppress
from importlib import metadata
from pathlib import Path

NAME = "potstill"


@functools.cache
def read_version() -> str:
    """Return the version of this code, for example 0.2.0.

    Beside a checkout's code lies its pyproject.toml. The metadata of an editable installation are
    of the day on which it was made, and may be older than the code.
    """
    with suppress(OSError, ValueError, KeyError):  # an installed wheel has no such file
        text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
        project = tomllib.loads(text)["project"]
        if project["name"] == NAME:
            return str(project["version"])
    return metadata.version(NAME)
