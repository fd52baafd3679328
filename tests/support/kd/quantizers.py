"""Tests that need torchao, which is no part of the extra dev.

Where torchao is installed, transformers imports it in every process, which takes seconds and writes
to standard error. So these tests run where somebody has installed it: CONTRIBUTING.md says how.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

needs_torchao = pytest.mark.skipif(
    find_spec("torchao") is None, reason="needs torchao (pip install 'potstill[quantization]')"
)
