"""Tests that need torchao: skipped where it is missing, and failed in the check of a commit."""

from __future__ import annotations

import importlib.util
import os

import pytest

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None and not os.environ.get("CI"),
    reason="torchao is not installed",
)
