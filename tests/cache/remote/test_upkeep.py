"""Removal from a bucket: garbage by age, and never something in use."""

import pytest

from bench.support.small.caches import make_cache, make_identity, make_shard, write_folders
from cache.checking.verify import verify_cache
from cache.errors import CacheError, CacheNotFound
from cache.operations import find_garbage, remove_cache, remove_garbage
from cache.reading.usage import hold_for
from cache.remote import bucket as bucket_module
from cache.remote.address import StoreAddress, bind_caches
from cache.remote.bucket import Bucket, is_stored
from cache.store import open_cache
from cache.writing.writer import open_writer

DAY = 86400.0


@pytest.fixture
def root(home, address):
    return bind_caches(home, address)


@pytest.fixture
def elsewhere(tmp_path, address):
    return bind_caches(tmp_path / "elsewhere", address)


@pytest.fixture
def stored(address) -> Bucket:
    return Bucket(StoreAddress.parse(address))


def find_stored(root, age: float):
    return [each for each in find_garbage(root, age) if each.objects]


def test_an_unfinished_capture_goes_when_it_is_old(root, elsewhere, objects) -> None:
    identity = make_identity()
    with open_writer(root, identity) as writer:
        write_folders(writer)
        writer.write_shard(0, *make_shard(identity, 0))
        assert find_stored(elsewhere, -1.0) == []  # it is in use
    assert find_stored(elsewhere, DAY) == []
    [found] = find_stored(elsewhere, 0.0)
    assert "its capture has not finished" in found.why
    assert remove_garbage(found, 0.0)
    assert objects() == set()


def test_files_that_no_seal_names_go_and_all_others_stay(root, elsewhere, stored) -> None:
    folder = make_cache(root)
    lost = f"{folder.name}/shards/000001.{'0' * 32}/tokens/c.0.0"
    stored.put(lost, b"an attempt that lost")
    stored.put(f"{folder.name}/shards/000077.{'1' * 32}/zarr.json", b"an attempt without a seal")
    assert find_stored(elsewhere, DAY) == []
    [found] = find_stored(elsewhere, 0.0)
    assert set(found.objects) == {
        lost,
        f"{folder.name}/shards/000077.{'1' * 32}/zarr.json",
    }
    remove_garbage(found, 0.0)
    assert find_stored(elsewhere, 0.0) == []
    assert verify_cache(folder) == []


def test_a_cache_that_another_machine_reads_is_not_removed(root, elsewhere, objects) -> None:
    folder = make_cache(root)
    reader = open_cache(elsewhere / folder.name)
    hold_for(reader, elsewhere / folder.name)
    with pytest.raises(CacheError, match="is in use"):
        remove_cache(folder)
    assert verify_cache(folder) == []
    del reader
    remove_cache(folder)
    assert objects() == set()
    assert not is_stored(folder)
    with pytest.raises(CacheNotFound):
        open_cache(elsewhere / folder.name)


def test_a_cache_that_goes_while_it_is_read_is_named(root, elsewhere, stored) -> None:
    folder = make_cache(root)
    opened = open_cache(elsewhere / folder.name)
    stored.delete(each.name for each in stored.walk(""))
    with pytest.raises(CacheNotFound):
        opened.read([0])


def test_listings_are_read_page_by_page(stored, monkeypatch) -> None:
    monkeypatch.setattr(bucket_module, "_PAGE", 3)
    names = {f"a/{number:03d}" for number in range(10)}
    for name in names:
        stored.put(name, b"x")
    stored.put("ab/0", b"not below the folder")
    assert {each.name for each in stored.walk("a")} == names
    assert len(list(stored.walk(""))) == 11
