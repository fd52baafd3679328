"""Half of the time a path names a job or a cache that there is: made-up ids would all end in 404."""

from __future__ import annotations

import os
import zlib
from typing import Any

import schemathesis

KNOWN = {"job_id": "KD_TEST_JOBS", "fingerprint": "KD_TEST_CACHES", "name": "KD_TEST_ARTIFACTS"}


@schemathesis.hook
def map_path_parameters(context: Any, path_parameters: dict[str, Any] | None) -> dict[str, Any] | None:
    """Put a known name in the place of every other one, chosen by what was made up."""
    return path_parameters and {name: _known(name, value) for name, value in path_parameters.items()}


def _known(name: str, value: Any) -> Any:
    names = os.environ.get(KNOWN.get(name, ""), "").split()
    dice = zlib.crc32(repr(value).encode())
    return names[dice // 2 % len(names)] if names and dice % 2 else value
