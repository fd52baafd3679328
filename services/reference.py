"""The page ``docs/settings.md``, made from the fields of ``services.settings``.

``make docs`` writes the file. A test compares it with the page that this module renders.
"""

from __future__ import annotations

import sys

from kd.config.reference import make_table
from services.settings import Settings

INTRODUCTION = """\
# Settings

<!-- Written by `make docs` from services/settings.py: edit the descriptions there. -->

The operator's settings are environment variables of the API, the workers and the command line.
Lists are separated by commas. With Docker, the settings are lines of `.env` (see `.env.example`),
and paths are those inside the containers. The fields of a job are in
[configuration.md](configuration.md).
"""
#: A setting for tests only, which the page leaves out.
_TEST_FIELD = "child_module"


def render_settings_page() -> str:
    """Render the page as Markdown."""
    schema = Settings.model_json_schema()
    fields = {
        f"KD_{name.upper()}": field
        for name, field in schema["properties"].items()
        if name != _TEST_FIELD
    }
    units = {"description": "Times are in seconds, sizes in bytes; 1 and 0 are true and false."}
    return "\n".join(
        [INTRODUCTION, make_table("The variables", {"properties": fields, **units}, {})]
    )


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    sys.stdout.write(render_settings_page())
