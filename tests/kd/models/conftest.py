"""Fixtures for the tests of models."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def copied_teacher(tiny_teacher, tmp_path) -> Path:
    """A copy of the tiny teacher's folder that a test may change."""
    return Path(shutil.copytree(tiny_teacher, tmp_path / "copied"))
