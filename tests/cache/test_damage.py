"""Every flipped bit and missing file is found, and nothing damaged is ever read."""

import os
import random
import shutil
import tempfile
from pathlib import Path

import pytest
import zarrs  # noqa: F401  # registers its codec pipeline

from bench.support.small.caches import make_cache, make_codec, make_identity
from cache.checking.verify import find_extras, verify_cache
from cache.disk import list_file_sizes
from cache.errors import CacheCorrupt, CacheIncomplete, CacheMismatch, StorageError
from cache.operations import find_garbage
from cache.profiles.table import PROFILES
from cache.store import open_cache
from cache.writing.writer import open_writer
from tests.support.caches import IDENTITY, captured, content, equal, flip, identity_of, tiny
from tests.support.manifests import edits
from tests.support.users import not_as_root

#: Caches of two shards of 4 and 1 sequences: tests that damage each file in turn verify all others
#: each time, so their time grows with the square of the files.
IDENTITIES = {profile: identity_of(profile, 300, 16, 3, 2) for profile in PROFILES}
SEQUENCES = range(5)


@pytest.fixture(scope="module")
def all_of_two_shards(tmp_path_factory):
    root = tmp_path_factory.mktemp("two-shards")
    return {
        profile: make_cache(root / profile, identity) for profile, identity in IDENTITIES.items()
    }


@pytest.fixture
def store(all_of_two_shards, profile, tmp_path):
    """A copy of a cache of two shards that a test may damage."""
    folder = all_of_two_shards[profile]
    return shutil.copytree(folder, tmp_path / folder.name)


@pytest.mark.slow
def test_every_single_flipped_byte_of_every_file_is_found(tmp_path, profile):
    """Byte n of every sealed file is changed at the same time, and every file must be named."""
    store = make_cache(tmp_path, tiny(profile))
    dice = random.Random(0)
    whole = content(store)
    assert verify_cache(store) == []
    for place, byte in enumerate(whole["manifest.json"]):
        data = bytearray(whole["manifest.json"])
        data[place] = byte ^ dice.randrange(1, 256)
        (store / "manifest.json").write_bytes(data)
        assert any("manifest.json" in line for line in verify_cache(store)), (
            f"manifest, byte {place}"
        )
    (store / "manifest.json").write_bytes(whole["manifest.json"])
    seals = sorted(name for name in whole if name.startswith("seals/"))
    for place in range(max(len(whole[name]) for name in seals)):
        tried = [name for name in seals if place < len(whole[name])]
        for name in tried:
            data = bytearray(whole[name])
            data[place] ^= dice.randrange(1, 256)
            (store / name).write_bytes(data)
        lines = verify_cache(store)
        assert all(any(name in line for line in lines) for name in tried), f"seals, byte {place}"
        for name in tried:
            (store / name).write_bytes(whole[name])
    signed = {"manifest.json", *seals}
    handles = {name: os.open(store / name, os.O_RDWR) for name in whole if name not in signed}
    for place in range(max(len(whole[name]) for name in handles)):
        tried = [name for name in handles if place < len(whole[name])]
        for name in tried:
            os.pwrite(handles[name], bytes([whole[name][place] ^ dice.randrange(1, 256)]), place)
        named = sorted(line.split(": ")[0] for line in verify_cache(store))
        assert named == sorted(tried), f"byte {place}"
        for name in tried:
            os.pwrite(handles[name], whole[name][place : place + 1], place)
    for handle in handles.values():
        os.close(handle)
    assert verify_cache(store) == []


def test_every_edited_field_of_the_manifest_is_found_on_opening_and_by_verify(tmp_path, profile):
    store = make_cache(tmp_path, tiny(profile))
    for where, data in edits((store / "manifest.json").read_bytes()):
        (store / "manifest.json").write_bytes(data)
        assert verify_cache(store), where
        with pytest.raises((CacheCorrupt, CacheMismatch)):
            open_cache(store)


@pytest.mark.long
def test_a_flipped_bit_of_one_file_is_found_and_named(store):
    rng = random.Random(0)
    for name, size in list_file_sizes(store).items():
        bit = rng.randrange(8 * size)
        flip(store / name, bit)
        problems = verify_cache(store)
        assert problems, f"{name}, bit {bit}"
        assert any(name in line for line in problems), f"{name} is not named in {problems}"
        flip(store / name, bit)
    assert verify_cache(store) == []


@pytest.mark.long
def test_a_flipped_bit_is_never_read_back_silently(store, profile):
    """Without verify, a read returns what was captured, or raises an error that names the array."""
    rng = random.Random(1)
    draws = range(IDENTITIES[profile].codec.draws)
    for name, size in list_file_sizes(store).items():
        # Seals and manifest have tests above, and the group of all shards one below.
        if not name.startswith(("shards/000001/", "head/", "token_map/", "dither/")):
            continue
        flip(store / name, bit := rng.randrange(8 * size))
        with pytest.raises(CacheCorrupt, match=name.split("/")[-2]) as refusal:  # noqa: PT012
            opened = open_cache(store)
            for draw in draws:
                opened.read(SEQUENCES, draw)
            opened.token_map()
            opened.teacher_head()
        assert name.split("/")[-2] in refusal.value.detail
        assert refusal.value.remedy
        flip(store / name, bit)
    assert equal(open_cache(store).read(SEQUENCES), captured(IDENTITIES[profile]))


@pytest.mark.long
def test_every_flipped_byte_of_every_groups_metadata_is_refused_by_readers(tmp_path):
    """The metadata of a group only repeats what the program knows, but other readers go by it."""
    folder = make_cache(tmp_path, tiny("hidden"))
    dice = random.Random(2)
    for name in ("shards", "shards/000000", "head", "token_map"):
        path = folder / name / "zarr.json"
        whole = path.read_bytes()
        for place in range(len(whole)):
            data = bytearray(whole)
            data[place] ^= dice.randrange(1, 256)
            path.write_bytes(data)
            with pytest.raises(CacheCorrupt, match=r"zarr\.json"):  # noqa: PT012 (whoever reads it)
                opened = open_cache(folder)
                opened.read([0])
                opened.teacher_head()
                opened.token_map()
        path.write_bytes(whole)
    open_cache(folder).read([0])


@pytest.mark.long
def test_every_missing_file_is_found_and_never_read_as_zeros(store):
    for name in list_file_sizes(store):
        data = (store / name).read_bytes()
        (store / name).unlink()
        assert any(name in line for line in verify_cache(store))
        with pytest.raises((CacheCorrupt, CacheIncomplete)):
            open_cache(store)
        (store / name).write_bytes(data)
    assert verify_cache(store) == []


@pytest.mark.long
def test_every_missing_folder_is_found(store):
    for folder in sorted({path.parent for path in store.rglob("*") if path.is_file()} - {store}):
        shutil.move(folder, store.parent / "aside")
        assert verify_cache(store)
        with pytest.raises((CacheCorrupt, CacheIncomplete)):
            open_cache(store)
        shutil.move(store.parent / "aside", folder)
    assert verify_cache(store) == []


@pytest.mark.parametrize(
    "name", ["shards/000001/tokens/c.1.0", "shards/stray", "seals/000003.json", "notes.txt"]
)
def test_an_extra_file_is_found(plain_copy, name):
    (plain_copy / name).write_bytes(b"x")
    assert find_extras(plain_copy) == [name] and verify_cache(plain_copy) == []


def test_a_chunk_lost_after_opening_is_an_error_and_not_zeros(plain_copy):
    opened = open_cache(plain_copy)
    opened.read([0])
    (plain_copy / "shards/000001/gap_symbols/c.0").unlink()
    with pytest.raises(CacheCorrupt, match=r"000001: array gap_symbols, chunk c.0"):
        opened.read([0, 5])


@pytest.mark.parametrize("bit", [0, 8 * 16 + 5, -1])
def test_a_chunk_is_checked_each_time_that_it_is_read(plain_copy, bit):
    """The file passed its sha256 before the damage, which the crc32c of the chunk shows."""
    opened = open_cache(plain_copy, memory_bytes=0)
    opened.read([0])
    path = plain_copy / "shards/000000/gap_symbols/c.0"
    flip(path, bit % (8 * path.stat().st_size))
    with pytest.raises(CacheCorrupt, match=r"gap_symbols, chunk c.0 cannot be read: its crc32c"):
        opened.read([0])


def test_a_chunk_cut_short_is_found_on_opening(plain_copy):
    path = plain_copy / "shards/000002/entropy/c.0"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CacheCorrupt, match=r"entropy/c.0: expected \d+ bytes"):
        open_cache(plain_copy)


@pytest.mark.parametrize(
    "name,clusters",
    [
        ("offsets/c.0.0", 0),  # with other records these chunks differ in size
        ("tokens/c.0.0", 2),
        ("document_start/c.0.0", 2),
        ("target_mask/c.0.0", 2),
    ],
)
def test_a_sound_chunk_in_the_place_of_anothers_is_never_read(tmp_path, name, clusters):
    """After a bad restore a chunk can be whole and of the right size, but of another shard."""
    codec = make_codec(clusters=clusters, fitted=clusters)
    folder = make_cache(tmp_path, make_identity(codec=codec))
    paths = [folder / "shards" / shard / name for shard in ("000000", "000001")]
    chunks = [path.read_bytes() for path in paths]
    assert len(chunks[0]) == len(chunks[1])
    assert chunks[0] != chunks[1]
    for path, chunk in zip(paths, reversed(chunks), strict=True):
        path.write_bytes(chunk)
    for number in (0, 4):
        with pytest.raises(
            CacheCorrupt, match=rf"{number // 4:06d}: array .*{name} differs from its sha256"
        ):
            open_cache(folder).read([number])


def test_a_shard_of_another_cache_is_not_taken(plain_copy, tmp_path):
    other = make_cache(tmp_path / "other", make_identity(codec=make_codec(seed=1)))
    for name in ("shards/000001", "seals/000001.json"):
        (shutil.rmtree if name.startswith("shards") else os.unlink)(plain_copy / name)
        (shutil.copytree if name.startswith("shards") else shutil.copy)(
            other / name, plain_copy / name
        )
    with pytest.raises(CacheCorrupt, match=r"seals/000001.json is not the seal"):
        open_cache(plain_copy)
    assert any("seals/000001.json" in line for line in verify_cache(plain_copy))


@pytest.mark.parametrize("part", ["shards/000000", "shards/000000/entropy", "seals/000000.json"])
def test_what_may_not_be_read_is_not_damaged_and_stays(plain_copy, part):
    """A job of another user must not renounce the cache, nor say that its files are missing."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        folder = Path(shutil.copytree(plain_copy, Path(name) / plain_copy.name))
        for each in (folder, *folder.rglob("*")):
            each.chmod(0o777)
        files = list_file_sizes(folder)
        (folder / part).chmod(0)
        with not_as_root():
            for use in (open_cache, verify_cache):
                with pytest.raises(StorageError, match="Permission denied"):
                    use(folder)
            refused = pytest.raises(StorageError, match="Permission denied")
            with open_writer(folder.parent, IDENTITY) as writer, refused:
                writer.find_missing_shards()
            assert not list(find_garbage(folder.parent, older_than=0.0))
        (folder / part).chmod(0o777)
        assert set(files) <= set(list_file_sizes(folder)) and not verify_cache(folder)
