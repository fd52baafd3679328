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
from pathlib import Path

import numpy as np
import pytest
import tensorstore
import zarr
import zarrs  # noqa: F401  # registers its codec pipeline

from cache.disk import files_below, storage_errors
from cache.errors import CacheCorrupt, CacheIncomplete, CacheMismatch, CacheNotFound, StorageError
from cache.manifest import CacheIdentity, signed_json
from cache.records import Records, Sequences
from cache.shard import CHUNK_BYTES, CUT_BY, PER_SEQUENCE
from cache.store import bytes_on_disk, capture, list_caches, open_cache, read_manifest, verify
from cache.testing import PROVENANCE, fill, make_cache, make_identity, make_shard

IDENTITY = make_identity()
ROOT = Path(__file__).parent.parent

# A capture in a process of its own. It kills itself before the n-th change it makes to the disk; n = 0: never.
CHILD = """
import json, os, signal, sys, time
from pathlib import Path
from cache.store import capture
from cache.testing import PROVENANCE, make_identity, make_shard

root, deadly, pause = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
changes = 0

def count(event, arguments):
    global changes
    if event in ("open", "os.rename", "os.mkdir", "os.remove") and str(root) in str(arguments[0]):
        changes += 1
        if changes == deadly:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(count)
waits = []
with capture(root, make_identity(), waiting=lambda: waits.append(1)) as writer:
    began, missing = time.monotonic(), writer.missing_shards()
    for index in missing:
        writer.write_shard(index, *make_shard(writer.identity, index))
        time.sleep(pause)
    writer.finish(PROVENANCE)
    print(json.dumps({"began": began, "ended": time.monotonic(), "missing": missing, "waits": len(waits)}))
"""


def child(root: Path, deadly: int = 0, pause: float = 0.0) -> subprocess.Popen:
    command = [sys.executable, "-c", CHILD, str(root), str(deadly), str(pause)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True)


def content(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in files_below(folder)}


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def equal(left: tuple[Sequences, Records], right: tuple[Sequences, Records]) -> bool:
    arrays = [[array for part in side for array in vars(part).values()] for side in (left, right)]
    return all(np.array_equal(mine, theirs) for mine, theirs in zip(*arrays, strict=True))


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    """A complete small cache that nobody changes."""
    return make_cache(tmp_path_factory.mktemp("caches"))


@pytest.fixture
def store(pristine, tmp_path) -> Path:
    """A copy of it to damage."""
    return Path(shutil.copytree(pristine, tmp_path / pristine.name))


def captured() -> tuple[Sequences, Records]:
    """What went into the cache, with head log-probabilities and reports on their grids."""
    shards = [make_shard(IDENTITY, index) for index in range(IDENTITY.shard_count)]
    sequences = Sequences.concatenate(shard[0] for shard in shards)
    codec, (rows, positions) = IDENTITY.record_codec(), np.nonzero(sequences.target_mask)
    records = Records.concatenate(shard[1] for shard in shards)
    return sequences, codec.decode(codec.encode(records, rows, positions))


# ---- reading


def test_what_is_read_is_what_was_captured(pristine):
    opened = open_cache(pristine, IDENTITY)
    assert equal(opened.read(range(len(opened))), captured())
    assert (opened.train, opened.validation) == (range(7), range(7, 10))


def test_any_order_reads_the_same_even_when_only_one_shard_fits_in_memory(pristine):
    in_order = [open_cache(pristine).read([number]) for number in range(10)]
    for memory_bytes in (0, 1 << 29):
        opened = open_cache(pristine, memory_bytes=memory_bytes)
        for seed in range(5):
            order = random.Random(seed).choices(range(10), k=6)
            expected = [in_order[number] for number in order]
            sequences = Sequences.concatenate(part[0] for part in expected)
            assert equal(opened.read(order), (sequences, Records.concatenate(part[1] for part in expected)))


def test_a_shard_of_many_chunks_reads_the_same(tmp_path, monkeypatch, pristine):
    monkeypatch.setattr("cache.shard.CHUNK_BYTES", 64)
    folder = make_cache(tmp_path)
    assert len(files_below(folder)) > 50 + len(files_below(pristine))
    assert equal(open_cache(folder).read([8, 1, 5]), open_cache(pristine).read([8, 1, 5]))


def test_memory_stays_within_its_bound(pristine):
    opened = open_cache(pristine, memory_bytes=1)
    opened.read(range(10))
    assert len(opened._shards) == 1


@pytest.mark.parametrize("number", [-1, 10])
def test_a_sequence_outside_the_cache_is_refused(pristine, number):
    with pytest.raises(IndexError, match=r"\[0, 10\)"):
        open_cache(pristine).read([0, number])


def test_a_training_batch_decodes_in_milliseconds(tmp_path):
    opened = open_cache(make_cache(tmp_path, make_identity(49152, 512, 64, 0, 32)))
    opened.read(range(64))
    seconds = []
    for seed in range(5):
        order = random.Random(seed).sample(range(64), 8)
        began = time.perf_counter()
        opened.read(order)
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 0.02  # 0.0005 on an idle core


def test_a_vocabulary_of_262144_ids_round_trips(tmp_path):
    identity = make_identity(vocabulary_size=262_144)
    sequences, records = make_shard(identity, 0)
    last = 262_143
    sequences.tokens[0, 0] = records.head_ids[0] = records.tail_ids[records.tail_count[0] - 1] = last
    with capture(tmp_path, identity) as writer:
        writer.write_shard(0, sequences, records)
        for index in (1, 2):
            writer.write_shard(index, *make_shard(identity, index))
        writer.finish(PROVENANCE)
    read_sequences, read_records = open_cache(tmp_path / identity.fingerprint).read(range(4))
    assert read_sequences.tokens[0, 0] == read_records.head_ids[0] == last
    assert np.array_equal(read_sequences.tokens, sequences.tokens)
    assert np.array_equal(read_records.head_ids, records.head_ids)
    assert np.array_equal(read_records.tail_ids, records.tail_ids)


def make_cache_without_records(root: Path, identity: CacheIdentity) -> Path:
    """One shard of sequences in which every token is a document of its own."""
    shape = (identity.data.sequences, identity.data.sequence_length)
    tokens = np.arange(np.prod(shape), dtype=np.uint32).reshape(shape) % identity.tokenizer.vocabulary_size
    with capture(root, identity) as writer:
        sequences = Sequences(tokens.astype(np.uint32), np.ones(shape, bool), np.zeros(shape, bool))
        writer.write_shard(0, sequences, make_shard(identity, 0)[1].slice(0, 0))
        writer.finish(PROVENANCE)
    return root / identity.fingerprint


def test_a_shard_without_any_record_is_possible(tmp_path):
    folder = make_cache_without_records(tmp_path, make_identity(train_sequences=2, validation_sequences=0))
    sequences, records = open_cache(folder).read([1, 0])
    assert verify(folder) == []
    assert len(records) == 0
    assert sequences.tokens.tolist() == [list(range(16, 32)), list(range(16))]


# ---- other readers


def raw(folder: Path, index: int, name: str) -> np.ndarray:
    return np.asarray(zarr.open_array(store=folder / "shards" / f"{index:06d}" / name, mode="r")[...])


@pytest.mark.parametrize("name", ["offsets", *PER_SEQUENCE, *CUT_BY])
def test_tensorstore_and_zarrs_read_every_array(pristine, name):
    expected = raw(pristine, 0, name)
    path = str(pristine / "shards" / "000000" / name)
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}
    assert np.array_equal(tensorstore.open(spec, read=True).result().read().result(), expected)
    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        assert np.array_equal(raw(pristine, 0, name), expected)


def test_the_cache_reads_the_same_through_zarrs(pristine):
    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        assert equal(open_cache(pristine).read(range(10)), captured())


def test_shards_are_one_zarr_group_without_strangers(pristine):
    group = zarr.open_group(pristine / "shards", mode="r")
    assert sorted(group.group_keys()) == ["000000", "000001", "000002"]
    assert set(group["000000"].array_keys()) == {"offsets", *PER_SEQUENCE, *CUT_BY}


def test_every_array_has_a_checksum_and_chunks_of_a_bounded_size(tmp_path):
    folder = make_cache_without_records(tmp_path, make_identity(70_000, 1024, 320, 0, 320, threshold=0.5))
    for metadata in folder.glob("shards/*/*/zarr.json"):
        document = json.loads(metadata.read_bytes())
        assert [codec["name"] for codec in document["codecs"]][1:] == ["blosc", "crc32c"]
        chunk = np.prod(document["chunk_grid"]["configuration"]["chunk_shape"])
        assert chunk * np.dtype(document["data_type"]).itemsize <= CHUNK_BYTES
    assert len(list(folder.glob("shards/000000/tokens/c.*"))) == 2


# ---- damage


def test_verify_finds_flipped_bits_in_every_file(store):
    assert verify(store) == []
    rng = random.Random(0)
    for name, size in files_below(store).items():
        for bit in rng.sample(range(8 * size), 3):
            flip(store / name, bit)
            problems = verify(store)
            assert problems, f"{name}, bit {bit}"
            assert any(name in line for line in problems), f"{name} is not named in {problems}"
            flip(store / name, bit)
    assert verify(store) == []


def test_verify_finds_every_single_bit_of_a_chunk(tmp_path):
    store = make_cache(tmp_path, make_identity(train_sequences=1, validation_sequences=0, sequence_length=4))
    name = "shards/000000/head_count/c.0"
    for bit in range(8 * (store / name).stat().st_size):
        flip(store / name, bit)
        assert verify(store) == [f"{name}: content differs from its sha256"], f"bit {bit}"
        flip(store / name, bit)


def test_a_flipped_bit_is_never_read_back_silently(store):
    rng = random.Random(1)
    for name, size in files_below(store / "shards").items():
        if name == "zarr.json" or name.count("/") == 1:
            continue  # groups: hold nothing that is read
        flip(store / "shards" / name, bit := rng.randrange(8 * size))
        with pytest.raises(CacheCorrupt, match=name.split("/")[1]) as refusal:
            open_cache(store).read(range(10))
        assert name.split("/")[0] in refusal.value.detail
        assert refusal.value.remedy
        flip(store / "shards" / name, bit)
    assert equal(open_cache(store).read(range(10)), captured())


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


@pytest.mark.parametrize("name", ["shards/000001/tokens/c.1.0", "shards/stray", "seals/000003.json", "notes.txt"])
def test_an_extra_file_is_found(store, name):
    (store / name).write_bytes(b"x")
    assert verify(store) == [f"{name}: not part of the cache"]


def test_a_chunk_lost_after_opening_is_an_error_and_not_zeros(store):
    opened = open_cache(store)
    opened.read([0])
    (store / "shards/000001/tail_ids/c.0").unlink()
    with pytest.raises(CacheCorrupt, match=r"000001: array tail_ids, chunk c.0"):
        opened.read([0, 5])


def test_a_chunk_cut_short_is_found_on_opening(store):
    path = store / "shards/000002/entropy/c.0"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CacheCorrupt, match=r"entropy/c.0: expected \d+ bytes"):
        open_cache(store)


def test_a_shard_of_another_cache_is_not_taken(store, tmp_path):
    other = make_cache(tmp_path / "other", make_identity(seed=1))
    for name in ("shards/000001", "seals/000001.json"):
        (shutil.rmtree if name.startswith("shards") else os.unlink)(store / name)
        (shutil.copytree if name.startswith("shards") else shutil.copy)(other / name, store / name)
    with pytest.raises(CacheCorrupt, match=r"seals/000001.json is not the seal"):
        open_cache(store)
    assert any("seals/000001.json" in line for line in verify(store))


# ---- refusals


def test_a_mismatch_names_every_differing_field(pristine):
    expected = make_identity(sequence_length=512, seed=3, train_sequences=9)
    with pytest.raises(CacheMismatch) as refusal:
        open_cache(pristine, expected)
    for line in (
        "data.sequence_length: expected 512, got 16",
        "codec.seed: expected 3, got 0",
        "data.train_sequences: expected 9, got 7",
    ):
        assert line in refusal.value.detail
    assert "tokenizer" not in refusal.value.detail


def test_a_newer_version_is_refused(store):
    document = json.loads((store / "manifest.json").read_bytes())
    del document["digest"]
    (store / "manifest.json").write_bytes(signed_json({**document, "version": 2}))
    with pytest.raises(CacheMismatch, match="newer"):
        open_cache(store)


def test_a_cache_that_is_not_there_or_not_complete_is_refused(store, tmp_path):
    with pytest.raises(CacheNotFound):
        open_cache(tmp_path / "nothing")
    with pytest.raises(CacheNotFound):
        verify(tmp_path / "nothing")
    shutil.rmtree(store / "shards/000001")
    with pytest.raises(CacheIncomplete, match="000001 is missing"):
        open_cache(store)
    (store / "manifest.json").unlink()
    with pytest.raises(CacheIncomplete, match="has not finished"):
        open_cache(store)
    assert any("manifest.json" in line for line in verify(store))


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
        ]:
            with pytest.raises(ValueError, match=message):
                writer.write_shard(index, wrong_sequences, wrong_records)
        assert content(writer.folder) == before


# ---- crashes, and others who want the same


def test_kill_9_at_any_moment_then_resume_gives_the_same_bytes(pristine, tmp_path):
    folder, deaths = tmp_path / pristine.name, 0
    for deadly in random.Random(7).sample(range(2, 420), 5):  # a shard takes about 200 changes to the disk
        process = child(tmp_path, deadly)
        _, errors = process.communicate(timeout=60)
        assert process.returncode in (0, -9), errors
        deaths += process.returncode == -9
        assert not (folder / "manifest.json").exists() or verify(folder) == []
    with capture(tmp_path, IDENTITY) as writer:
        fill(writer)
    assert deaths >= 3
    assert content(folder) == content(pristine)


def test_two_processes_that_want_the_same_cache_run_one_after_the_other(pristine, tmp_path):
    processes = [child(tmp_path, pause=0.4) for _ in range(2)]
    reports = []
    for process in processes:
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        reports.append(json.loads(output))
    first, second = sorted(reports, key=lambda report: report["began"])
    assert first["ended"] <= second["began"]
    assert (first["missing"], second["missing"]) == ([0, 1, 2], [])
    assert content(tmp_path / pristine.name) == content(pristine)


def test_whoever_waits_is_told_and_may_give_up(tmp_path):
    def give_up() -> None:
        raise InterruptedError("asked to stop")

    with capture(tmp_path, IDENTITY), pytest.raises(InterruptedError), capture(tmp_path, IDENTITY, give_up):
        pass
    with capture(tmp_path, make_identity(seed=1), give_up), capture(tmp_path, IDENTITY, give_up):
        pass  # another cache, or after the first is done: nobody waits


def test_a_damaged_shard_is_captured_again_and_not_trusted(pristine, store):
    flip(store / "shards/000001/tail_ids/c.0", 77)
    flip(store / "seals/000002.json", 99)
    with capture(store.parent, IDENTITY) as writer:
        assert writer.missing_shards() == [1, 2]
        writer.write_shard(1, *make_shard(IDENTITY, 1))
        with pytest.raises(CacheIncomplete):
            read_manifest(store)
        fill(writer)
    assert content(store) == content(pristine)


def test_a_shard_whose_new_capture_failed_is_not_sealed_any_more(store):
    flip(store / "shards/000001/tail_ids/c.0", 77)
    with capture(store.parent, IDENTITY) as writer:
        (store / ".tmp-000001").write_bytes(b"in the way")
        with pytest.raises(OSError, match=r"\.tmp-000001"):
            writer.write_shard(1, *make_shard(IDENTITY, 1))
        with pytest.raises(CacheIncomplete, match="the first is 1"):
            writer.finish(PROVENANCE)


def test_what_a_crash_left_behind_is_swept_away(pristine, store):
    (store / ".tmp-000001").mkdir()
    (store / ".tmp-000001/half").write_bytes(b"x")
    (store / "seals/.tmp-000001.json").write_bytes(b"{")
    (store / "shards/zarr.json").write_bytes(b"{")
    with capture(store.parent, IDENTITY) as writer:
        assert writer.missing_shards() == []
    assert content(store) == content(pristine)


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


def test_a_full_disk_is_said_plainly_leaves_nothing_half_written_and_can_be_resumed(small_disk, pristine):
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
    assert content(folder) == content(pristine)


def test_a_folder_that_cannot_be_written_is_said_plainly():
    with pytest.raises(StorageError, match="/sys") as refusal, capture(Path("/sys/potstill"), IDENTITY):
        pass
    assert "writable" in refusal.value.remedy


def test_errors_that_have_nothing_to_do_with_storage_pass_unchanged():
    with pytest.raises(FileNotFoundError), storage_errors(Path("/")):
        raise FileNotFoundError(errno.ENOENT, "gone")


# ---- listing


def test_bytes_per_token_counts_every_byte_on_disk(pristine):
    opened = open_cache(pristine)
    size = sum(path.stat().st_size for path in pristine.rglob("*") if path.is_file())
    assert bytes_on_disk(pristine, opened.manifest) == size
    assert opened.bytes_per_token == size / captured()[0].positions
    assert opened.manifest.positions == captured()[0].positions
    assert opened.manifest.entries == len(captured()[1].head_ids) + len(captured()[1].tail_ids)


def test_caches_are_listed_whole_begun_and_broken(store):
    root = store.parent
    with capture(root, make_identity(seed=1)) as writer:
        writer.write_shard(0, *make_shard(writer.identity, 0))
    broken = make_cache(root, make_identity(seed=2))
    flip(broken / "manifest.json", 500)
    (root / ("f" * 32)).mkdir()
    (root / "unrelated").mkdir()
    listed = {summary.fingerprint: summary for summary in list_caches(root)}
    assert len(listed) == 4
    good, begun = listed[store.name], listed[make_identity(seed=1).fingerprint]
    assert (good.complete, good.teacher, good.sequences, good.shards, good.problem) == (True, "tiny", 10, 3, "")
    assert good.bytes_per_token == round(open_cache(store).bytes_per_token, 3)
    assert good.created
    assert (begun.complete, begun.shards, begun.tokens) == (False, 1, None)
    assert "has not finished" in begun.problem
    assert "own digest" in listed[broken.name].problem
    assert json.loads(json.dumps(good.to_json()))["profile"] == "threshold"
    assert list_caches(root / "nothing") == []
