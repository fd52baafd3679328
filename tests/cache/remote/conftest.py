"""Fixtures of buckets for the tests of this folder."""

from pathlib import Path

import pytest
import zarrs  # noqa: F401  # registers its codec pipeline

from tests.support.buckets.fixtures import address, objects, reach  # noqa: F401


@pytest.fixture
def home(tmp_path) -> Path:
    """A data folder of the test."""
    return tmp_path / "home"
