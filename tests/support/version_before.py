"""The version before this one, out of the history, beside the version of this checkout."""

from __future__ import annotations

import functools
import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from bench.support.paths import ROOT

#: The commit of the version before, in full. A release sets it to the commit of the release before.
BEFORE = "8cefb8806101d937cb4055baf3301cd5a8cd4600"


@functools.cache
def find_version_before() -> bytes | None:
    """The packages of the version before as a tar file; None where the history lacks its commit."""
    done = subprocess.run(
        ["git", "archive", "--format=tar", BEFORE, "cache", "kd", "services", "pyproject.toml"],
        cwd=ROOT,
        capture_output=True,
    )
    return done.stdout if done.returncode == 0 else None


def unpack_version_before(folder: Path) -> Path:
    """Unpack the version before into ``folder``, or skip the test."""
    packed = find_version_before()
    if packed is None:
        pytest.skip(f"this clone has no commit {BEFORE[:12]}: fetch its whole history")
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return folder
