"""Small caches of every profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.support.small.caches import make_cache, make_codec, make_identity
from tests.support.kd.own_loops import EARLIER, HELD_OUT, LENGTH, PROFILES, TRAIN, VOCABULARY


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A cache of each profile, and one of version 0.2.0; one data folder holds them all."""
    root = tmp_path_factory.mktemp("home") / "caches"
    options: dict[str, dict[str, Any]] = {
        "threshold": {"always_keep": (5,)},
        "tempered": {"always_keep": (5,), "draws": 3},
        EARLIER: {"always_keep": (5,), "draws": 3, "clusters": 0, "fitted": 0},
    }
    shape = (VOCABULARY, LENGTH, TRAIN, HELD_OUT)
    profiles = {profile: profile for profile in PROFILES} | {EARLIER: "threshold"}
    return {
        name: make_cache(root, make_identity(*shape, make_codec(profile, **options.get(name, {}))))
        for name, profile in profiles.items()
    }
