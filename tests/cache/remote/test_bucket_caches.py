"""What is true of a cache in a folder is true of one in a bucket."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zarr
from obstore.store import S3Store
from zarr.storage import ObjectStore

from bench.support.small.caches import (
    PROVENANCE,
    fill_cache,
    make_cache,
    make_identity,
    make_shard,
    make_tables,
    make_token_map,
    write_folders,
)
from cache.checking.listing import list_caches, summarise_cache
from cache.checking.verify import find_extras, find_missing, verify_cache
from cache.disk import list_file_sizes
from cache.errors import CacheCorrupt, CacheIncomplete, CacheMismatch, CacheNotFound
from cache.inspection import compare_caches, compute_cache_stats
from cache.operations import find_cache
from cache.remote.address import StoreAddress, bind_caches
from cache.remote.bucket import Bucket
from cache.remote.mirror import name_data
from cache.store import has_manifest, open_cache, replace_fidelity
from cache.writing.writer import open_writer
from tests.support.caches import IDENTITIES, IDENTITY, captured, child, content, equal

#: A writer in a process of its own, which says when it begins a shard.
WRITER = """
import sys
from pathlib import Path
from cache.writing.writer import open_writer
from bench.support.small.caches import (
    PROVENANCE, make_identity, make_shard, make_token_map, write_folders
)
identity = make_identity(train_sequences=int(sys.argv[2]))
with open_writer(Path(sys.argv[1]), identity) as writer:
    write_folders(writer)
    writer.write_token_map(make_token_map(identity.tokenizer.vocabulary_size))
    for index in writer.find_missing_shards():
        print(index, flush=True)
        writer.write_shard(index, *make_shard(identity, index))
    writer.finish(PROVENANCE)
"""


@pytest.fixture
def root(home, address) -> Path:
    return bind_caches(home, address)


@pytest.fixture
def elsewhere(tmp_path, address) -> Path:
    """The same bucket as another machine sees it."""
    return bind_caches(tmp_path / "elsewhere", address)


@pytest.mark.long
def test_a_bucket_gives_the_bytes_of_a_folder(tmp_path, root, elsewhere, profile) -> None:
    identity = IDENTITIES[profile]
    stored = make_cache(root, identity)
    plain = make_cache(tmp_path / "plain", identity)
    assert (stored / "manifest.json").read_bytes() == (plain / "manifest.json").read_bytes()
    seen = open_cache(elsewhere / identity.fingerprint, identity)
    known = open_cache(plain)
    for draw in range(2):
        assert equal(seen.read([7, 0, 3, 9], draw), known.read([7, 0, 3, 9], draw))
    assert equal(seen.read(range(10)), known.read(range(10)))
    assert {name: list(array) for name, array in seen.token_map().items()} == {
        name: list(array) for name, array in known.token_map().items()
    }
    if profile == "hidden":
        assert np.array_equal(seen.teacher_head()["weight"], known.teacher_head()["weight"])
    assert seen.bytes_per_token == known.bytes_per_token
    found = content(elsewhere / identity.fingerprint)
    here = content(plain)
    assert all(found[name] == here[name] for name in found)
    assert compute_cache_stats(seen) == compute_cache_stats(known)
    assert compare_caches(seen, known).equal


def test_shards_lie_in_the_bucket_as_zarr_groups_that_any_reader_opens(root, address) -> None:
    folder = make_cache(root)
    opened = open_cache(folder)
    name = name_data("shards/000001", opened.entries[1].digest)
    place = StoreAddress.parse(address)
    inside = S3Store(
        place.bucket,
        prefix=f"{place.prefix}/{folder.name}/{name}",
        endpoint=Bucket(place)._store.config["endpoint"],
        client_options={"allow_http": True},
    )
    group = zarr.open_group(ObjectStore(inside, read_only=True), mode="r")
    assert np.array_equal(group["tokens"][:], opened.read(range(4, 8))[0].tokens)


def test_opening_checks_the_identity_and_finds_what_is_missing(root, elsewhere, address) -> None:
    identity = make_identity()
    with pytest.raises(CacheNotFound):
        open_cache(root / identity.fingerprint)
    assert not has_manifest(root / identity.fingerprint)
    with open_writer(root, identity) as writer:
        write_folders(writer)
        writer.write_shard(0, *make_shard(identity, 0))
        with pytest.raises(CacheIncomplete, match="2 of 3 shards are not sealed, the first is 1"):
            writer.finish(PROVENANCE)
    with pytest.raises(CacheIncomplete, match="its capture has not finished"):
        open_cache(elsewhere / identity.fingerprint)
    assert summarise_cache(elsewhere / identity.fingerprint).shards == 1
    folder = make_cache(elsewhere)
    with pytest.raises(CacheMismatch, match="sequence_length: expected 32, got 16"):
        open_cache(folder, make_identity(sequence_length=32))
    bucket = Bucket(StoreAddress.parse(address))
    bucket.delete([f"{folder.name}/seals/000002.json"])
    with pytest.raises(CacheIncomplete, match=r"seals/000002\.json is missing"):
        open_cache(root / identity.fingerprint)


def find_objects(address: str, part: str) -> tuple[Bucket, list[str]]:
    bucket = Bucket(StoreAddress.parse(address))
    return bucket, sorted(each.name for each in bucket.walk("") if part in each.name)


def test_damage_in_the_bucket_is_found_and_captured_again(root, elsewhere, address) -> None:
    folder = make_cache(root)
    manifest = (folder / "manifest.json").read_bytes()
    bucket, names = find_objects(address, "shards/000001")
    [damaged] = [name for name in names if name.endswith("tokens/c.0.0")]
    data = bytearray(bucket.get(damaged))
    data[7] ^= 1
    bucket.put(damaged, bytes(data))
    far = elsewhere / folder.name
    assert verify_cache(far) == ["shards/000001/tokens/c.0.0: content differs from its sha256"]
    with pytest.raises(CacheCorrupt, match=r"tokens/c\.0\.0 differs from its sha256"):
        open_cache(far).read([5])
    bucket.delete([damaged])
    assert verify_cache(far) == ["shards/000001/tokens/c.0.0: missing"]
    assert find_missing(open_cache(far)) == ["shards/000001: a file is missing"]
    assert open_cache(far).read([0])[0].tokens.shape == (1, 16)
    with open_writer(elsewhere, IDENTITY) as writer:
        assert list(writer.find_missing_shards()) == [1]
        fill_cache(writer)
    assert verify_cache(far) == []
    assert (far / "manifest.json").read_bytes() == manifest


@pytest.mark.parametrize("pieces", [False, True])
def test_foreign_objects_are_named_and_cost_no_shard(
    root, elsewhere, address, monkeypatch, pieces
) -> None:
    if pieces:
        monkeypatch.setattr("cache.shards.entries.PIECE_SHARDS", 2)
    identity = IDENTITIES["hidden"]
    # A writer of other bytes that lost, one whose seal never came, and a reader leave objects.
    with open_writer(root, identity) as first, open_writer(elsewhere, identity) as second:
        fill_cache(first)
        other = replace(identity, codec=replace(identity.codec, seed=5))
        second.write_shard(1, *make_shard(other, 1))
        first.finish(PROVENANCE)
    folder = elsewhere / identity.fingerprint
    bucket, _ = find_objects(address, "")
    bucket.put(f"{folder.name}/uses/host-1", b"{}")
    shard = name_data("shards/000001", open_cache(folder).entries[1].digest)
    rooms = (shard, f"{shard}/tokens/@eaDir", "seals", "shards", "shards/000001", ".")
    names = sorted(f"{room}/.DS_Store".removeprefix("./") for room in rooms)
    for name in (*names, "shards/000001/zarr.json"):
        bucket.put(f"{folder.name}/{name}", b"x")
    assert verify_cache(folder) == find_missing(open_cache(folder)) == []
    assert find_extras(folder) == sorted([*names, "shards/000001/zarr.json"])
    with open_writer(elsewhere, identity) as writer:
        assert list(writer.find_missing_shards()) == []


def test_a_file_that_is_damaged_on_this_disk_comes_again_from_the_bucket(root) -> None:
    folder = make_cache(root)
    expected = open_cache(folder).read(range(10))
    for name in list_file_sizes(folder / "shards"):
        path = folder / "shards" / name
        path.write_bytes(b"x" * path.stat().st_size)
    assert equal(open_cache(folder).read(range(10)), expected)


@pytest.mark.long
@pytest.mark.parametrize("shards", [1, 2])
def test_a_capture_that_was_killed_goes_on_and_gives_the_same_cache(
    tmp_path, root, elsewhere, shards
) -> None:
    count = 21
    with child(WRITER, root, count) as process:
        while int(process.stdout.readline()) < shards:
            pass
        process.kill()
    identity = make_identity(train_sequences=count)
    # Another machine goes on.
    with open_writer(elsewhere, identity) as writer:
        missing = list(writer.find_missing_shards())
        assert missing[0] in (shards, shards + 1)
        fill_cache(writer)
    assert verify_cache(root / identity.fingerprint) == []
    plain = make_cache(tmp_path / "plain", identity)
    manifest = elsewhere / identity.fingerprint / "manifest.json"
    assert manifest.read_bytes() == (plain / "manifest.json").read_bytes()


@pytest.mark.long
def test_writers_on_several_machines_make_one_cache(tmp_path, address) -> None:
    roots = [bind_caches(tmp_path / str(number), address) for number in range(3)]
    for process in [child(WRITER, root, 21) for root in roots]:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    identity = make_identity(train_sequences=21)
    plain = open_cache(make_cache(tmp_path / "plain", identity))
    for root in roots:
        folder = root / identity.fingerprint
        assert verify_cache(folder) == []
        assert equal(open_cache(folder).read(range(24)), plain.read(range(24)))


def test_of_two_writers_with_different_bytes_the_first_wins_and_both_end_right(
    root, elsewhere
) -> None:
    """As on two kinds of GPU, whose last bits differ."""
    identity = make_identity()
    with open_writer(root, identity) as first, open_writer(elsewhere, identity) as second:
        for writer in (first, second):
            write_folders(writer)
            writer.write_token_map(make_token_map(300))
        assert list(second.find_missing_shards()) == [0, 1, 2]
        for index in range(3):
            mine = make_shard(identity, index)
            theirs = make_shard(make_identity(codec=make_other_codec()), index)
            order = [(first, mine), (second, theirs)]
            for writer, shard in order if index != 1 else reversed(order):
                writer.write_shard(index, *shard)
        manifests = [first.finish(PROVENANCE), second.finish(PROVENANCE)]
    assert manifests[0] == manifests[1]
    left, right = (open_cache(each / identity.fingerprint) for each in (root, elsewhere))
    assert equal(left.read(range(10)), right.read(range(10)))
    assert verify_cache(root / identity.fingerprint) == []


def test_of_two_writers_with_different_tables_the_first_wins(root, elsewhere) -> None:
    identity = make_identity()
    tables = make_tables(300, 2)
    others = replace(tables, classes_V=tables.classes_V[::-1].copy())
    with open_writer(root, identity) as first, open_writer(elsewhere, identity) as second:
        assert first.read_tables() is second.read_tables() is None
        sealed = [first.write_tables(tables), second.write_tables(others), second.read_tables()]
        for each in sealed:
            for name, array in each.to_arrays().items():
                assert np.array_equal(array, tables.to_arrays()[name]), name
        # So each reads what the other wrote.
        first.write_shard(0, *make_shard(identity, 0))
        for writer in (second, first):
            fill_cache(writer)
    whole = open_cache(elsewhere / identity.fingerprint).read(range(10))
    assert equal(whole, captured(identity))
    assert verify_cache(root / identity.fingerprint) == []


def make_other_codec():
    return replace(make_identity().codec, seed=5)


def test_many_threads_that_seal_one_shard_agree_on_one(tmp_path, address) -> None:
    identity = make_identity()
    roots = [bind_caches(tmp_path / str(number), address) for number in range(6)]

    def write(place: tuple[int, Path]) -> str:
        number, root = place
        codec = replace(identity.codec, seed=number)
        with open_writer(root, identity) as writer:
            write_folders(writer)
            writer.write_shard(0, *make_shard(replace(identity, codec=codec), 0))
            seal = writer._read_shard_seal(0)
            assert seal is not None
            return seal.digest

    with ThreadPoolExecutor(6) as pool:
        assert len(set(pool.map(write, enumerate(roots)))) == 1


@pytest.mark.long
def test_the_disk_keeps_no_more_than_its_bound_and_reads_the_same(tmp_path, root, address) -> None:
    identity = make_identity(train_sequences=45)
    folder = make_cache(root, identity)
    whole = sum(list_file_sizes(folder / "shards").values())
    small = bind_caches(tmp_path / "small", address, whole // 3)
    opened = open_cache(small / folder.name, memory_bytes=0)
    order = np.random.default_rng(0).permutation(48).tolist()
    for start in range(0, 48, 6):
        numbers = order[start : start + 6]
        assert equal(opened.read(numbers), open_cache(folder).read(numbers))
        kept = sum(list_file_sizes(small / folder.name / "shards").values())
        assert kept <= whole // 3 + whole // 12 + 1
    assert kept > 0


def test_a_warm_disk_reads_nothing_from_the_bucket(root, reach) -> None:
    folder = make_cache(root)
    opened = open_cache(folder)
    opened.read(range(10))
    again = open_cache(folder)
    reach(1)  # nobody listens there
    assert equal(again.read(range(10)), opened.read(range(10)))


def test_statistics_fetch_only_the_arrays_that_they_need(root, elsewhere) -> None:
    folder = make_cache(root)
    compute_cache_stats(open_cache(elsewhere / folder.name))
    fetched = {path.parent.name for path in (elsewhere / folder.name / "shards").rglob("c.*")}
    counted = {"head_count", "head_units"}
    assert fetched == {"entropy", "known", "offsets", "tokens", "target_mask", *counted}


def test_the_list_and_the_search_see_what_is_in_the_bucket(root, elsewhere) -> None:
    first = make_cache(root)
    second = make_cache(root, make_identity(train_sequences=11))
    found = list_caches(elsewhere)
    assert {each.fingerprint for each in found} == {first.name, second.name}
    assert all(each.complete and each.bytes > 0 and each.created for each in found)
    assert find_cache(elsewhere, first.name[:8]).name == first.name


def test_fidelity_is_measured_again_in_the_bucket(root, elsewhere) -> None:
    folder = make_cache(root)
    assert replace_fidelity(elsewhere / folder.name, ()).fidelity == ()
    assert verify_cache(folder) == []


def test_manifests_in_pieces_are_published_too(root, elsewhere, monkeypatch) -> None:
    monkeypatch.setattr("cache.shards.entries.PIECE_SHARDS", 2)
    folder = make_cache(root)
    opened = open_cache(elsewhere / folder.name)
    assert opened.manifest.pieces is not None
    assert opened.read(range(10))[0].tokens.shape == (10, 16)
    assert verify_cache(elsewhere / folder.name) == []


def test_seals_and_manifest_have_the_bytes_of_a_folder(tmp_path, root, address) -> None:
    folder = make_cache(root)
    plain = make_cache(tmp_path / "plain")
    bucket, names = find_objects(address, ".json")
    seals = [name for name in names if "/seals/" in name or name.endswith("/manifest.json")]
    assert len(seals) == 6
    for name in seals:
        assert bucket.get(name) == (plain / name.removeprefix(f"{folder.name}/")).read_bytes()
    digest = hashlib.sha256((plain / "seals/000000.json").read_bytes()).hexdigest()
    assert any(f"shards/000000.{digest[:32]}/" in name for name in names)
