"""The page ``docs/settings.md``, from the descriptions, bounds and defaults of ``services.settings``.

``make docs`` writes the file; a test compares it with what this module renders.
"""

from __future__ import annotations

import sys

from kd.reference import table
from services.settings import Settings

INTRODUCTION = """\
# Settings

<!-- Written by `make docs` from services/settings.py: edit the descriptions there. -->

What the operator decides, as environment variables of the API, the workers and the command line; lists are separated by
commas. With Docker they are lines of `.env` (see `.env.example`), and paths are those inside the containers. What a job
decides is in [configuration.md](configuration.md).
"""
_OF_TESTS = "child_module"


def render() -> str:
    """The whole page, as markdown."""
    schema = Settings.model_json_schema()
    fields = {f"KD_{name.upper()}": field for name, field in schema["properties"].items() if name != _OF_TESTS}
    said = {"description": "Times are in seconds, sizes in bytes; 1 and 0 are true and false."}
    return "\n".join([INTRODUCTION, table("The variables", {"properties": fields, **said}, {})])


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    sys.stdout.write(render())
