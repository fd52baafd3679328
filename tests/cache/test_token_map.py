"""The map of ids in a cache: sealed, verified, and absent in the format before."""

import numpy as np

from bench.support.small.caches import make_cache, make_token_map
from cache.checking.verify import find_extras, verify_cache
from cache.manifest import Manifest, sign_json, verify_json
from cache.store import open_cache


def same(ours, theirs) -> bool:
    return ours.keys() == theirs.keys() and all(
        np.array_equal(ours[name], theirs[name]) for name in ours
    )


def test_a_cache_keeps_the_map_and_verifies_it(tmp_path):
    folder = make_cache(tmp_path)
    opened = open_cache(folder)
    assert same(opened.token_map(), make_token_map(300))
    assert opened.manifest.token_map.bytes == sum(
        path.stat().st_size
        for path in [*(folder / "token_map").rglob("*"), folder / "seals" / "token_map.json"]
        if path.is_file()
    )
    (folder / "token_map" / "stray").write_bytes(b"x")
    assert find_extras(folder) == ["token_map/stray"] and verify_cache(folder) == []


def make_older(folder):
    """Turn a cache into one of format 2, which has no token map."""
    path = folder / "manifest.json"
    document = verify_json(path.read_bytes(), "")
    del document["token_map"]
    path.write_bytes(sign_json({**document, "version": 2}))
    for file in (*(folder / "token_map").rglob("*.*"), folder / "seals" / "token_map.json"):
        if file.is_file():
            file.unlink()


def test_a_cache_of_the_format_before_is_read_and_has_no_map(tmp_path):
    folder = make_cache(tmp_path)
    make_older(folder)
    opened = open_cache(folder)
    assert opened.token_map() is None
    assert len(opened.read(range(10))[0]) == 10 and verify_cache(folder) == []
    # Written again, for instance with new figures of fidelity, it has the present format.
    again = Manifest.from_bytes(opened.manifest.to_bytes(), "")
    assert again == opened.manifest
