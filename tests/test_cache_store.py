"""The folder of a cache: any damage is found, any crash is survived, any order reads the same."""

import errno
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import zarr
import zarrs  # noqa: F401  # registers its codec pipeline

from cache.disk import files_below, storage_errors
from cache.errors import CacheCorrupt, CacheIncomplete, CacheMismatch, CacheNotFound, StorageError
from cache.manifest import CacheIdentity, signed_json
from cache.profiles import PROFILES
from cache.records import Records, Sequences
from cache.shard import CHUNK_BYTES
from cache.store import bytes_on_disk, capture, list_caches, open_cache, read_manifest, verify
from cache.testing import PROVENANCE, fill, make_cache, make_codec, make_head, make_identity, make_records, make_shard
from tests.test_cache_manifest import edits

V = 300


def identity_of(profile: str, *shape: int, **options: Any) -> CacheIdentity:
    """A small cache of a profile; the sampled ones with several draws and two tokens that are always kept."""
    sampled = {"draws": 3, "always_keep": (5, 7)} if PROFILES[profile].sampled else {}
    return make_identity(*shape, codec=make_codec(profile, **sampled | options))


IDENTITIES = {profile: identity_of(profile) for profile in PROFILES}
IDENTITY = make_identity()
ROOT = Path(__file__).parent.parent

# A capture in a process of its own.
CHILD = """
import json, sys, time
from pathlib import Path
from cache.store import capture
from cache.testing import PROVENANCE, make_identity, make_shard

waits = []
with capture(Path(sys.argv[1]), make_identity(), waiting=lambda: waits.append(1)) as writer:
    began, missing = time.monotonic(), writer.missing_shards()
    for index in missing:
        writer.write_shard(index, *make_shard(writer.identity, index))
        time.sleep(0.4)
    writer.finish(PROVENANCE)
    print(json.dumps({"began": began, "ended": time.monotonic(), "missing": missing, "waits": len(waits)}))
"""

# Captures that kill themselves before the n-th change they make to the disk, for many n, each in a fork that has never
# used Zarr; then one that goes on from what is left. Prints the digests of all files after each, and whether it died.
KILLED = """
import hashlib, json, os, signal, sys
from pathlib import Path
import zarr
from cache.disk import files_below
from cache.manifest import CacheIdentity
from cache.store import capture, open_cache, verify
from cache.testing import fill

root, identity, step = Path(sys.argv[1]), CacheIdentity.from_json(json.loads(sys.argv[2])), int(sys.argv[3])

def run(folder, deadly):
    changes = 0
    def count(event, arguments):
        nonlocal changes
        if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir") and str(folder) in str(arguments[0]):
            changes += 1
            if changes == deadly:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(count)
    with capture(folder, identity) as writer:
        fill(writer)

def fork(folder, deadly):
    if (pid := os.fork()) == 0:
        run(folder, deadly)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == signal.SIGKILL

deadly, died = 1, True
while died:
    folder = root / str(deadly)
    died = fork(folder, deadly)
    store = folder / identity.fingerprint
    whole = (store / "manifest.json").exists()
    problems = verify(store) if whole else []
    fork(folder, 0)
    content = {name: hashlib.sha256((store / name).read_bytes()).hexdigest() for name in files_below(store)}
    print(json.dumps({"died": died, "problems": problems, "content": content}), flush=True)
    deadly += step
"""


def child(code: str, *arguments: object) -> subprocess.Popen:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True)


def content(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in files_below(folder)}


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def in_one_order(records: Records) -> dict[str, np.ndarray]:
    """The columns with the entries of each record by ascending id: the order within a record means nothing."""
    columns = dict(records.columns)
    for part in {"head", "tail"} & {name[:4] for name in columns}:
        rows = np.repeat(np.arange(len(records)), columns[f"{part}_count"])
        order = np.lexsort((columns[f"{part}_ids"], rows))
        columns |= {name: columns[name][order] for name in (f"{part}_ids", f"{part}_logprobs") if name in columns}
    return columns


def equal(left: tuple[Sequences, Records], right: tuple[Sequences, Records]) -> bool:
    for mine, theirs in ((vars(left[0]), vars(right[0])), (in_one_order(left[1]), in_one_order(right[1]))):
        if mine.keys() != theirs.keys():
            return False
        if not all(
            np.array_equal(array, theirs[name]) and array.dtype == theirs[name].dtype for name, array in mine.items()
        ):
            return False
    return True


def picked(records: Records, draw: int) -> Records:
    """Records with the tails of one draw, as they are read."""
    tails = {name: column[:, draw] for name, column in records.columns.items() if name in ("tail_ids", "tail_logprobs")}
    return Records(records.columns | tails)


def captured(identity: CacheIdentity, draw: int = 0) -> tuple[Sequences, Records]:
    """What went into the cache."""
    shards = [make_shard(identity, index) for index in range(identity.shard_count)]
    return Sequences.concatenate(each[0] for each in shards), picked(
        Records.concatenate(each[1] for each in shards), draw
    )


@pytest.fixture(scope="module")
def all_pristine(tmp_path_factory) -> dict[str, Path]:
    """Complete small caches that nobody changes."""
    root = tmp_path_factory.mktemp("caches")
    return {profile: make_cache(root / profile, identity) for profile, identity in IDENTITIES.items()}


@pytest.fixture(params=PROFILES)
def profile(request) -> str:
    return request.param


@pytest.fixture
def pristine(all_pristine, profile) -> Path:
    """A complete small cache of each profile."""
    return all_pristine[profile]


@pytest.fixture
def store(pristine, tmp_path) -> Path:
    """A copy of it to damage."""
    return Path(shutil.copytree(pristine, tmp_path / pristine.name))


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """A complete cache of the default profile, for what does not depend on profiles."""
    return make_cache(tmp_path_factory.mktemp("plain"), IDENTITY)


@pytest.fixture
def plain_copy(plain, tmp_path) -> Path:
    return Path(shutil.copytree(plain, tmp_path / plain.name))


# ---- reading


def test_what_is_read_is_what_was_captured(pristine, profile):
    opened = open_cache(pristine, IDENTITIES[profile])
    assert equal(opened.read(range(len(opened))), captured(IDENTITIES[profile]))
    assert (opened.train, opened.validation) == (range(7), range(7, 10))
    assert opened.codec == IDENTITIES[profile].record_codec()


@pytest.mark.parametrize("sampled", ["threshold", "tempered"])
def test_each_sequence_is_read_with_the_draw_that_is_asked_for(all_pristine, sampled):
    opened = open_cache(all_pristine[sampled])
    draws = [captured(IDENTITIES[sampled], draw) for draw in range(3)]
    assert not equal(draws[0], draws[1])
    for draw in range(7):
        assert equal(opened.read(range(10), draw), draws[draw % 3])
    order, wanted = [4, 9, 0, 4], np.array([2, 0, 4, 3])
    mixed = Records.concatenate(opened.read([n], d)[1] for n, d in zip(order, wanted.tolist(), strict=True))
    assert equal(opened.read(order, wanted), (draws[0][0].select(order), mixed))


def test_any_order_reads_the_same_even_when_only_one_shard_fits_in_memory(pristine):
    in_order = [open_cache(pristine).read([number]) for number in range(10)]
    for memory_bytes in (0, 1 << 29):
        opened = open_cache(pristine, memory_bytes=memory_bytes)
        for seed in range(5):
            order = random.Random(seed).choices(range(10), k=6)
            expected = [in_order[number] for number in order]
            sequences = Sequences.concatenate(part[0] for part in expected)
            assert equal(opened.read(order), (sequences, Records.concatenate(part[1] for part in expected)))


def test_threads_may_share_an_open_cache(pristine):
    opened = open_cache(pristine, memory_bytes=0)
    orders = [random.Random(seed).choices(range(10), k=4) for seed in range(24)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(opened.read, orders))
    assert all(equal(each, open_cache(pristine).read(order)) for each, order in zip(found, orders, strict=True))


def test_shards_of_many_chunks_read_the_same(tmp_path, monkeypatch, pristine, profile):
    monkeypatch.setattr("cache.shard.CHUNK_BYTES", 64)
    folder = make_cache(tmp_path, IDENTITIES[profile])
    assert len(files_below(folder)) > 30 + len(files_below(pristine))
    assert equal(open_cache(folder).read([8, 1, 5]), open_cache(pristine).read([8, 1, 5]))


def test_memory_stays_within_its_bound(pristine):
    opened = open_cache(pristine, memory_bytes=1)
    opened.read(range(10))
    assert len(opened._shards) == 1


def test_what_is_read_cannot_change_what_is_read_next(pristine):
    opened = open_cache(pristine)
    sequences, records = opened.read([3])
    for array in (*vars(sequences).values(), *records.columns.values()):
        if array.size and array.flags.writeable:
            array[...] = 1
    assert equal(opened.read([3]), open_cache(pristine).read([3]))


@pytest.mark.parametrize("number", [-1, 10])
def test_a_sequence_outside_the_cache_is_refused(plain, number):
    with pytest.raises(IndexError, match=r"\[0, 10\)"):
        open_cache(plain).read([0, number])


def test_a_training_batch_decodes_in_milliseconds(tmp_path):
    opened = open_cache(make_cache(tmp_path, make_identity(1024, 512, 32, 0, make_codec(shard_sequences=32))))
    opened.read(range(32))
    seconds = []
    for seed in range(5):
        order = random.Random(seed).sample(range(32), 8)
        began = time.perf_counter()
        opened.read(order)
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 0.02  # 0.002 on an idle core


@pytest.mark.parametrize("profile", [name for name in PROFILES if name != "dense"])
def test_a_vocabulary_of_262144_ids_round_trips(tmp_path, profile):
    identity = identity_of(profile, 262_144, 8, 2, 0)
    sequences, records = make_shard(identity, 0)
    last = 262_143
    sequences.tokens[0, 0] = last
    for name in {"head_ids", "tail_ids", "top_ids"} & set(records.columns):
        if records[name].size:
            records[name].reshape(-1)[-1] = last
    with capture(tmp_path, identity) as writer:
        if profile == "hidden":
            writer.write_head(make_head(262_144))
        writer.write_shard(0, sequences, records)
        writer.finish(PROVENANCE)
    draw = identity.codec.draws - 1
    read = open_cache(tmp_path / identity.fingerprint).read(range(2), draw)
    assert equal(read, (sequences, picked(records, draw) if PROFILES[profile].sampled else records))
    assert read[0].tokens[0, 0] == last


@pytest.mark.parametrize("bits", [8, 16])
def test_a_hidden_cache_gives_its_head_as_it_was_written(tmp_path, bits):
    identity = make_identity(codec=make_codec("hidden", bits=bits))
    opened = open_cache(make_cache(tmp_path, identity))
    for name, array in make_head(V).items():
        assert np.array_equal(opened.teacher_head()[name], array)
    assert opened.manifest.head.bytes > 0


def test_a_hidden_cache_is_not_complete_without_its_head(tmp_path):
    identity = IDENTITIES["hidden"]
    with capture(tmp_path, identity) as writer:
        for index in writer.missing_shards():
            writer.write_shard(index, *make_shard(identity, index))
        with pytest.raises(CacheIncomplete, match="LM head is not sealed"):
            writer.finish(PROVENANCE)


def test_the_number_of_nodes_is_found_in_what_is_sealed(all_pristine, tmp_path):
    assert make_shard(IDENTITIES["tempered"], 0)[1]["partition"].shape[1:] == (4, 2)
    with capture(all_pristine["tempered"].parent, IDENTITIES["tempered"]) as writer:
        assert writer.sealed_shape("partition")[1:] == (4, 2)
    with capture(tmp_path, IDENTITIES["tempered"]) as writer:
        assert writer.sealed_shape("partition") is None


def make_cache_without_records(root: Path, identity: CacheIdentity) -> Path:
    """One shard of sequences in which every token is a document of its own."""
    shape = (identity.data.sequences, identity.data.sequence_length)
    tokens = np.arange(np.prod(shape), dtype=np.uint32).reshape(shape) % identity.tokenizer.vocabulary_size
    with capture(root, identity) as writer:
        if identity.codec.profile == "hidden":
            writer.write_head(make_head(identity.tokenizer.vocabulary_size))
        sequences = Sequences(tokens.astype(np.uint32), np.ones(shape, bool), np.zeros(shape, bool))
        writer.write_shard(0, sequences, make_records(0, 1, identity.record_codec()).slice(0, 0))
        writer.finish(PROVENANCE)
    return root / identity.fingerprint


def test_a_shard_without_any_record_is_possible(tmp_path, profile):
    folder = make_cache_without_records(tmp_path, identity_of(profile, V, 16, 2, 0))
    sequences, records = open_cache(folder).read([1, 0])
    assert verify(folder) == []
    assert len(records) == 0
    assert sequences.tokens.tolist() == [list(range(16, 32)), list(range(16))]


# ---- other readers


def raw(folder: Path, index: int, name: str) -> np.ndarray:
    return np.asarray(zarr.open_array(store=folder / "shards" / f"{index:06d}" / name, mode="r")[...])


def arrays_of(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob("shards/000000/*/zarr.json"))


def test_tensorstore_and_zarrs_read_every_array(pristine):
    for name in arrays_of(pristine):
        expected = raw(pristine, 0, name)
        path = str(pristine / "shards" / "000000" / name)
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}
        assert np.array_equal(tensorstore.open(spec, read=True).result().read().result(), expected), name
        with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
            assert np.array_equal(raw(pristine, 0, name), expected), name


def test_the_cache_reads_the_same_through_zarrs(pristine, profile):
    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        assert equal(open_cache(pristine).read(range(10)), captured(IDENTITIES[profile]))


@pytest.mark.parametrize(
    "setting",
    [
        {"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"},
        {"array.write_empty_chunks": False},
        {"json_indent": 2},
        {"array.order": "F", "async.concurrency": 1},
    ],
)
def test_how_the_user_set_up_zarr_does_not_change_a_byte(tmp_path, plain, setting):
    with zarr.config.set(setting):
        assert content(make_cache(tmp_path, IDENTITY)) == content(plain)


def test_shards_are_one_zarr_group_without_strangers(pristine, profile):
    group = zarr.open_group(pristine / "shards", mode="r")
    assert sorted(group.group_keys()) == ["000000", "000001", "000002"]
    names = {"offsets", "tokens", "document_start", "target_mask", "known", "entropy"}
    sampled = {"head_count", "tail_count", "token_classes", "head_symbols", "head_bits", "head_logprobs"}
    sampled |= {f"tail_{draw}_{part}" for draw in range(3) for part in ("symbols", "bits")}
    tempered = {"partition"} | {f"tail_{draw}_logprobs" for draw in range(3)}
    own = {
        "threshold": sampled,
        "tempered": sampled | tempered,
        "topk": {"top_ids", "top_logprobs", "residual"},
        "dense": {"logprobs"},
        "hidden": {"hidden", "hidden_scale"},
    }
    assert set(group["000000"].array_keys()) == names | own[profile]


def test_fixed_point_arrays_say_how_to_read_them(pristine):
    _, records = open_cache(pristine).read(range(4))
    known = zarr.open_array(store=pristine / "shards/000000/known", mode="r")
    assert np.array_equal(known[...], records["known"])
    assert known.attrs["scale"] == -(2.0**-8)


def test_every_array_has_a_checksum_and_chunks_of_a_bounded_size(tmp_path):
    identity = make_identity(70_000, 1024, 320, 0, make_codec(threshold=0.5, shard_sequences=320))
    folder = make_cache_without_records(tmp_path, identity)
    for metadata in folder.glob("shards/*/*/zarr.json"):
        document = json.loads(metadata.read_bytes())
        assert [codec["name"] for codec in document["codecs"]][1:] == ["blosc", "crc32c"]
        chunk = np.prod(document["chunk_grid"]["configuration"]["chunk_shape"])
        assert chunk * np.dtype(document["data_type"]).itemsize <= CHUNK_BYTES
    assert len(list(folder.glob("shards/000000/tokens/c.*"))) == 2


# ---- damage


def tiny(profile: str) -> CacheIdentity:
    """One sequence of four tokens: few bytes, so that every one of them can be tried."""
    options = {"k": 2} if profile == "topk" else {"draws": 1} if PROFILES[profile].sampled else {}
    return identity_of(profile, 20, 4, 1, 0, **options)


def test_every_single_flipped_byte_of_every_file_is_found(tmp_path, profile):
    """Files that are sealed one by one are tried together, byte n of each: every one of them must be named."""
    store, dice = make_cache(tmp_path, tiny(profile)), random.Random(0)
    whole = content(store)
    assert verify(store) == []
    signed = {name for name in whole if name == "manifest.json" or name.startswith("seals/")}
    for name in signed:
        for place, byte in enumerate(whole[name]):
            data = bytearray(whole[name])
            data[place] = byte ^ dice.randrange(1, 256)
            (store / name).write_bytes(data)
            assert any(name in line for line in verify(store)), f"{name}, byte {place}"
        (store / name).write_bytes(whole[name])
    handles = {name: os.open(store / name, os.O_RDWR) for name in whole if name not in signed}
    for place in range(max(len(whole[name]) for name in handles)):
        tried = [name for name in handles if place < len(whole[name])]
        for name in tried:
            os.pwrite(handles[name], bytes([whole[name][place] ^ dice.randrange(1, 256)]), place)
        named = sorted(line.split(": ")[0] for line in verify(store))
        assert named == sorted(tried), f"byte {place}"
        for name in tried:
            os.pwrite(handles[name], whole[name][place : place + 1], place)
    for handle in handles.values():
        os.close(handle)
    assert verify(store) == []


def test_every_edited_field_of_the_manifest_is_found_on_opening_and_by_verify(tmp_path, profile):
    store = make_cache(tmp_path, tiny(profile))
    for where, data in edits((store / "manifest.json").read_bytes()):
        (store / "manifest.json").write_bytes(data)
        assert verify(store), where
        with pytest.raises((CacheCorrupt, CacheMismatch)):
            open_cache(store)


def test_a_flipped_bit_of_one_file_is_found_and_named(store):
    rng = random.Random(0)
    for name, size in files_below(store).items():
        bit = rng.randrange(8 * size)
        flip(store / name, bit)
        problems = verify(store)
        assert problems, f"{name}, bit {bit}"
        assert any(name in line for line in problems), f"{name} is not named in {problems}"
        flip(store / name, bit)
    assert verify(store) == []


def test_a_flipped_bit_is_never_read_back_silently(store, profile):
    """Without verify: whatever is read is as it was captured, or an error that names the array."""
    rng = random.Random(1)
    draws = range(IDENTITIES[profile].codec.draws)
    for name, size in files_below(store).items():
        if not name.startswith(("shards/000001/", "head/")) or name.count("/") < 2 + name.startswith("shards"):
            continue  # groups hold nothing that is read, seals and manifest are tested above
        flip(store / name, bit := rng.randrange(8 * size))
        with pytest.raises(CacheCorrupt, match=name.split("/")[-2]) as refusal:  # noqa: PT012
            opened = open_cache(store)
            for draw in draws:
                opened.read(range(10), draw)
            opened.teacher_head()
        assert name.split("/")[-3] in refusal.value.detail
        assert refusal.value.remedy
        flip(store / name, bit)
    assert equal(open_cache(store).read(range(10)), captured(IDENTITIES[profile]))


def test_every_missing_file_is_found_and_never_read_as_zeros(store):
    for name in files_below(store):
        data = (store / name).read_bytes()
        (store / name).unlink()
        assert any(name in line for line in verify(store))
        if name != "shards/zarr.json":
            with pytest.raises((CacheCorrupt, CacheIncomplete)):
                open_cache(store)
        (store / name).write_bytes(data)
    assert verify(store) == []


def test_every_missing_folder_is_found(store):
    for folder in sorted({path.parent for path in store.rglob("*") if path.is_file()} - {store}):
        shutil.move(folder, store.parent / "aside")
        assert verify(store)
        with pytest.raises((CacheCorrupt, CacheIncomplete)):
            open_cache(store)
        shutil.move(store.parent / "aside", folder)
    assert verify(store) == []


@pytest.mark.parametrize("name", ["shards/000001/tokens/c.1.0", "shards/stray", "seals/000003.json", "notes.txt"])
def test_an_extra_file_is_found(plain_copy, name):
    (plain_copy / name).write_bytes(b"x")
    assert verify(plain_copy) == [f"{name}: not part of the cache"]


def test_a_chunk_lost_after_opening_is_an_error_and_not_zeros(plain_copy):
    opened = open_cache(plain_copy)
    opened.read([0])
    (plain_copy / "shards/000001/tail_0_symbols/c.0").unlink()
    with pytest.raises(CacheCorrupt, match=r"000001: array tail_0_symbols, chunk c.0"):
        opened.read([0, 5])


def test_a_chunk_cut_short_is_found_on_opening(plain_copy):
    path = plain_copy / "shards/000002/entropy/c.0"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CacheCorrupt, match=r"entropy/c.0: expected \d+ bytes"):
        open_cache(plain_copy)


@pytest.mark.parametrize("name", ["offsets/c.0.0", "tokens/c.0.0", "document_start/c.0.0", "target_mask/c.0.0"])
def test_a_sound_chunk_in_the_place_of_anothers_is_never_read(plain_copy, name):
    """As after a bad restore: each chunk is whole and of the right size, but it is the other shard's."""
    paths = [plain_copy / "shards" / shard / name for shard in ("000000", "000001")]
    chunks = [path.read_bytes() for path in paths]
    assert len(chunks[0]) == len(chunks[1])
    assert chunks[0] != chunks[1]
    for path, chunk in zip(paths, reversed(chunks), strict=True):
        path.write_bytes(chunk)
    for number in (0, 4):
        with pytest.raises(CacheCorrupt, match=rf"{number // 4:06d}: array .*{name} differs from its sha256"):
            open_cache(plain_copy).read([number])


def test_a_shard_of_another_cache_is_not_taken(plain_copy, tmp_path):
    other = make_cache(tmp_path / "other", make_identity(codec=make_codec(seed=1)))
    for name in ("shards/000001", "seals/000001.json"):
        (shutil.rmtree if name.startswith("shards") else os.unlink)(plain_copy / name)
        (shutil.copytree if name.startswith("shards") else shutil.copy)(other / name, plain_copy / name)
    with pytest.raises(CacheCorrupt, match=r"seals/000001.json is not the seal"):
        open_cache(plain_copy)
    assert any("seals/000001.json" in line for line in verify(plain_copy))


# ---- refusals


def test_a_mismatch_names_every_differing_field(plain):
    expected = make_identity(sequence_length=512, train_sequences=9, codec=make_codec(seed=3))
    with pytest.raises(CacheMismatch) as refusal:
        open_cache(plain, expected)
    for line in (
        "data.sequence_length: expected 512, got 16",
        "codec.seed: expected 3, got 0",
        "data.train_sequences: expected 9, got 7",
    ):
        assert line in refusal.value.detail
    assert "tokenizer" not in refusal.value.detail


def test_a_newer_version_is_refused(plain_copy):
    document = json.loads((plain_copy / "manifest.json").read_bytes())
    del document["digest"]
    (plain_copy / "manifest.json").write_bytes(signed_json({**document, "version": 3}))
    with pytest.raises(CacheMismatch, match="newer"):
        open_cache(plain_copy)


def test_a_cache_that_is_not_there_or_not_complete_is_refused(plain_copy, tmp_path):
    with pytest.raises(CacheNotFound):
        open_cache(tmp_path / "nothing")
    with pytest.raises(CacheNotFound):
        verify(tmp_path / "nothing")
    shutil.rmtree(plain_copy / "shards/000001")
    with pytest.raises(CacheIncomplete, match="000001 is missing"):
        open_cache(plain_copy)
    (plain_copy / "manifest.json").unlink()
    with pytest.raises(CacheIncomplete, match="has not finished"):
        open_cache(plain_copy)
    assert any("manifest.json" in line for line in verify(plain_copy))


def test_the_manifest_waits_for_the_last_shard(tmp_path):
    with capture(tmp_path, IDENTITY) as writer:
        writer.write_shard(1, *make_shard(IDENTITY, 1))
        assert writer.missing_shards() == [0, 2]
        with pytest.raises(CacheIncomplete, match="2 of 3 shards"):
            writer.finish(PROVENANCE)
    assert not (tmp_path / IDENTITY.fingerprint / "manifest.json").exists()


def test_data_that_does_not_fit_is_refused_before_anything_is_written(tmp_path):
    sequences, records = make_shard(IDENTITY, 0)
    with capture(tmp_path, IDENTITY) as writer:
        before = content(writer.folder)
        for index, wrong_sequences, wrong_records, message in [
            (3, sequences, records, "A shard must lie in"),
            (2, sequences, records, "must hold tokens of shape"),
            (0, sequences, records.slice(0, 3), "3 records for"),
            (0, *make_shard(make_identity(vocabulary_size=10_000), 0), "below the vocabulary size 300"),
            (0, sequences, make_shard(IDENTITIES["tempered"], 0)[1], "Profile threshold has columns"),
            (0, sequences, picked(records, 0), "tail_ids must be of type uint16 with 2 dimensions"),
        ]:
            with pytest.raises(ValueError, match=message):
                writer.write_shard(index, wrong_sequences, wrong_records)
        assert content(writer.folder) == before


# ---- crashes, and others who want the same


def test_kill_9_at_any_moment_then_resume_gives_the_same_bytes(tmp_path, profile):
    """Before every thirteenth change to the disk, of a cache of two shards."""
    identity = replace(tiny(profile), data=replace(tiny(profile).data, train_sequences=5))
    expected = {
        name: sha256(data).hexdigest() for name, data in content(make_cache(tmp_path / "whole", identity)).items()
    }
    process = child(KILLED, tmp_path, json.dumps(identity.to_json()), 13)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    reports = [json.loads(line) for line in output.splitlines()]
    assert [report["died"] for report in reports] == [True] * (len(reports) - 1) + [False]
    assert len(reports) > 7
    assert all(report["problems"] == [] for report in reports), "a manifest means that all is there"
    assert all(report["content"] == expected for report in reports)


def test_two_processes_that_want_the_same_cache_run_one_after_the_other(plain, tmp_path):
    processes = [child(CHILD, tmp_path) for _ in range(2)]
    reports = []
    for process in processes:
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        reports.append(json.loads(output))
    first, second = sorted(reports, key=lambda report: report["began"])
    assert first["ended"] <= second["began"]
    assert (first["missing"], second["missing"]) == ([0, 1, 2], [])
    assert content(tmp_path / plain.name) == content(plain)


def test_whoever_waits_is_told_and_may_give_up(tmp_path):
    def give_up() -> None:
        raise InterruptedError("asked to stop")

    with capture(tmp_path, IDENTITY), pytest.raises(InterruptedError), capture(tmp_path, IDENTITY, give_up):
        pass
    with capture(tmp_path, make_identity(codec=make_codec(seed=1)), give_up), capture(tmp_path, IDENTITY, give_up):
        pass  # another cache, or after the first is done: nobody waits


def test_a_damaged_shard_is_captured_again_and_not_trusted(plain, plain_copy):
    flip(plain_copy / "shards/000001/tail_0_symbols/c.0", 7)
    flip(plain_copy / "seals/000002.json", 99)
    with capture(plain_copy.parent, IDENTITY) as writer:
        assert writer.missing_shards() == [1, 2]
        writer.write_shard(1, *make_shard(IDENTITY, 1))
        with pytest.raises(CacheIncomplete):
            read_manifest(plain_copy)
        fill(writer)
    assert content(plain_copy) == content(plain)


def test_a_shard_whose_new_capture_failed_is_not_sealed_any_more(plain_copy):
    flip(plain_copy / "shards/000001/tail_0_symbols/c.0", 7)
    with capture(plain_copy.parent, IDENTITY) as writer:
        (plain_copy / ".tmp-shards-000001").write_bytes(b"in the way")
        with pytest.raises(OSError, match=r"\.tmp-shards-000001"):
            writer.write_shard(1, *make_shard(IDENTITY, 1))
        with pytest.raises(CacheIncomplete, match="the first is 1"):
            writer.finish(PROVENANCE)


def test_what_a_crash_left_behind_is_swept_away(plain, plain_copy):
    (plain_copy / ".tmp-shards-000001").mkdir()
    (plain_copy / ".tmp-shards-000001/half").write_bytes(b"x")
    (plain_copy / "seals/.tmp-000001.json").write_bytes(b"{")
    (plain_copy / "shards/zarr.json").write_bytes(b"{")
    with capture(plain_copy.parent, IDENTITY) as writer:
        assert writer.missing_shards() == []
    assert content(plain_copy) == content(plain)


def test_a_damaged_head_is_written_again_and_a_sound_one_left_alone(all_pristine, tmp_path):
    store = Path(shutil.copytree(all_pristine["hidden"], tmp_path / all_pristine["hidden"].name))
    before = (store / "head/weight/c.0.0").stat().st_mtime_ns
    with capture(tmp_path, IDENTITIES["hidden"]) as writer:
        writer.write_head(make_head(V))
        assert (store / "head/weight/c.0.0").stat().st_mtime_ns == before
        flip(store / "head/weight/c.0.0", 70)
        fill(writer)
    assert content(store) == content(all_pristine["hidden"])


@pytest.fixture
def small_disk(tmp_path):
    """A folder that soon is full, and how to make room: a tiny tmpfs, or else a limit on file sizes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(folder)]
    if shutil.which("mount") and subprocess.run(mount, capture_output=True).returncode == 0:
        yield folder, lambda: subprocess.run(["mount", "-o", "remount,size=4m", str(folder)], check=True)
        subprocess.run(["umount", str(folder)], check=True)
        return
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))
    yield folder, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_said_plainly_leaves_nothing_half_written_and_can_be_resumed(small_disk, plain):
    root, make_room = small_disk
    with pytest.raises(StorageError) as refusal, capture(root, IDENTITY) as writer:
        fill(writer)
    assert os.strerror(errno.ENOSPC) in refusal.value.detail or os.strerror(errno.EFBIG) in refusal.value.detail
    assert "Free space" in refusal.value.remedy
    folder = root / IDENTITY.fingerprint
    assert not [name for name in files_below(folder) if ".tmp-" in name]
    assert not (folder / "manifest.json").exists()
    make_room()
    with capture(root, IDENTITY) as writer:
        sealed = {int(path.stem) for path in folder.glob("seals/*.json")}
        assert sealed.isdisjoint(writer.missing_shards())
        fill(writer)
    assert content(folder) == content(plain)


def test_a_folder_that_cannot_be_written_is_said_plainly():
    with pytest.raises(StorageError, match="/sys") as refusal, capture(Path("/sys/potstill"), IDENTITY):
        pass
    assert "writable" in refusal.value.remedy


def test_errors_that_have_nothing_to_do_with_storage_pass_unchanged():
    with pytest.raises(FileNotFoundError), storage_errors(Path("/")):
        raise FileNotFoundError(errno.ENOENT, "gone")


# ---- listing


def test_bytes_per_token_counts_every_byte_on_disk(pristine, profile):
    opened = open_cache(pristine)
    size = sum(path.stat().st_size for path in pristine.rglob("*") if path.is_file())
    assert bytes_on_disk(pristine, opened.manifest) == size
    sequences, records = captured(IDENTITIES[profile])
    assert opened.bytes_per_token == size / sequences.positions
    assert opened.manifest.positions == sequences.positions
    entries = records["top_ids"].size if profile == "topk" else records.length("head") + records.length("tail")
    assert opened.manifest.entries == entries


def test_caches_are_listed_whole_begun_and_broken(plain_copy):
    root = plain_copy.parent
    with capture(root, make_identity(codec=make_codec(seed=1))) as writer:
        writer.write_shard(0, *make_shard(writer.identity, 0))
    broken = make_cache(root, make_identity(codec=make_codec(seed=2)))
    flip(broken / "manifest.json", 500)
    (root / ("f" * 32)).mkdir()
    (root / "unrelated").mkdir()
    listed = {summary.fingerprint: summary for summary in list_caches(root)}
    assert len(listed) == 4
    good, begun = listed[plain_copy.name], listed[make_identity(codec=make_codec(seed=1)).fingerprint]
    assert (good.complete, good.teacher, good.sequences, good.shards, good.problem) == (True, "tiny", 10, 3, "")
    assert good.bytes_per_token == round(open_cache(plain_copy).bytes_per_token, 3)
    assert good.created
    assert (begun.complete, begun.shards, begun.tokens) == (False, 1, None)
    assert "has not finished" in begun.problem
    assert "own digest" in listed[broken.name].problem
    assert json.loads(json.dumps(good.to_json()))["profile"] == "threshold"
    assert list_caches(root / "nothing") == []


def test_an_identity_that_is_not_the_folders_is_refused_even_when_it_is_signed(tmp_path):
    """A manifest edited by someone who signs it anew: the folder's name still tells."""
    folder = make_cache(tmp_path)
    document = json.loads((folder / "manifest.json").read_bytes())
    document.pop("digest")
    document["identity"]["data"]["sha256"] = "d" * 64
    (folder / "manifest.json").write_bytes(signed_json(document))
    with pytest.raises(CacheMismatch, match="its identity edited"):
        open_cache(folder)
    assert any("its identity edited" in line for line in verify(folder))
