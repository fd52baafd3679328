"""Small caches of every profile."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.support.small.caches import make_cache, make_codec, make_identity
from tests.support.kd.own_loops import HELD_OUT, LENGTH, PROFILES, TRAIN, VOCABULARY


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A cache of each profile; a data folder of its own holds them all."""
    root = tmp_path_factory.mktemp("home") / "caches"
    sampled = {"draws": 3, "always_keep": (5,)}
    return {
        profile: make_cache(
            root,
            make_identity(
                VOCABULARY,
                LENGTH,
                TRAIN,
                HELD_OUT,
                make_codec(profile, **sampled if profile in ("threshold", "tempered") else {}),
            ),
        )
        for profile in PROFILES
    }
