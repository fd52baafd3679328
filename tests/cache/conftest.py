"""The caches of the tests in this folder: shared ones, and copies that a test may damage."""

import shutil
from pathlib import Path

import pytest
import zarrs  # noqa: F401  # registers its codec pipeline

from bench.support.small.caches import make_cache
from cache.profiles.table import PROFILES
from tests.support.caches import IDENTITIES, IDENTITY


@pytest.fixture(scope="module")
def all_pristine(tmp_path_factory) -> dict[str, Path]:
    """A complete small cache of each profile; no test changes them."""
    root = tmp_path_factory.mktemp("caches")
    return {
        profile: make_cache(root / profile, identity) for profile, identity in IDENTITIES.items()
    }


@pytest.fixture(params=PROFILES)
def profile(request) -> str:
    return request.param


@pytest.fixture
def pristine(all_pristine, profile) -> Path:
    """A complete small cache of the profile under test; no test changes it."""
    return all_pristine[profile]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """A complete cache of the default profile, for tests that do not depend on the profile."""
    return make_cache(tmp_path_factory.mktemp("plain"), IDENTITY)


@pytest.fixture
def plain_copy(plain, tmp_path) -> Path:
    """A copy of ``plain`` that a test may damage."""
    return Path(shutil.copytree(plain, tmp_path / plain.name))


@pytest.fixture
def store(pristine, tmp_path) -> Path:
    """A copy of ``pristine`` that a test may damage."""
    return Path(shutil.copytree(pristine, tmp_path / pristine.name))
