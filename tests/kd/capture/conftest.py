"""The caches that tests of a comparison with the teacher share."""

from __future__ import annotations

from pathlib import Path

import pytest

from cache.store import Cache, open_cache
from tests.support.kd.captures import PROFILES, capture


@pytest.fixture(scope="module")
def stores(
    tiny_teacher: Path, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Cache]:
    """One cache of each profile, by name."""
    home = tmp_path_factory.mktemp("home")
    return {
        name: open_cache(capture(tiny_teacher, tiny_text, home, **options))
        for name, options in PROFILES.items()
    }
