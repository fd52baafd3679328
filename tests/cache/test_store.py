"""The folder of a cache: any damage is found, any crash is survived, any order reads the same."""

import json
import random
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import tensorstore
import zarr
import zarrs  # noqa: F401  # registers its codec pipeline

from bench.support.small.caches import (
    PROVENANCE,
    make_cache,
    make_codec,
    make_identity,
    make_lm_head,
    make_records,
    make_shard,
    write_folders,
)
from cache.checking.listing import list_caches
from cache.checking.verify import verify_cache
from cache.disk import list_file_sizes
from cache.errors import CacheIncomplete, CacheMismatch, CacheNotFound
from cache.manifest import FORMAT_VERSION, CacheIdentity, sign_json
from cache.profiles.table import PROFILES
from cache.reading.arrays import ArrayFolder
from cache.records import Records, Sequences, compute_offsets
from cache.shard import CHUNK_BYTES, Seal
from cache.store import measure_cache_bytes, open_cache
from cache.writing.writer import open_writer
from tests.support.caches import (
    EARLIER,
    IDENTITIES,
    IDENTITY,
    V,
    captured,
    content,
    equal,
    flip,
    identity_of,
    picked,
)

# ---- reading


@pytest.fixture
def decoded(monkeypatch):
    """The chunks that are decoded during the test, as (folder, array, number)."""
    found = []
    decode = ArrayFolder._decode

    def watched(self, name, number):
        found.append((self.folder, name, number))
        return decode(self, name, number)

    monkeypatch.setattr(ArrayFolder, "_decode", watched)
    return found


@pytest.mark.long
def test_what_is_read_is_what_was_captured(pristine, profile):
    opened = open_cache(pristine, IDENTITIES[profile])
    assert equal(opened.read(range(len(opened))), captured(IDENTITIES[profile]))
    assert (opened.train, opened.validation) == (range(7), range(7, 10))
    assert opened.codec == IDENTITIES[profile].record_codec()


@pytest.mark.parametrize("sampled", [EARLIER, IDENTITIES["tempered"]])
def test_each_sequence_is_read_with_its_own_draw(tmp_path, sampled):
    opened = open_cache(make_cache(tmp_path, sampled))
    draws = [captured(sampled, draw) for draw in range(3)]
    assert not equal(draws[0], draws[1])
    for draw in range(7):
        assert equal(opened.read(range(10), draw), draws[draw % 3])
    order = [4, 9, 0, 4]
    wanted = np.array([2, 0, 4, 3])
    mixed = Records.concatenate(
        opened.read([n], d)[1] for n, d in zip(order, wanted.tolist(), strict=True)
    )
    assert equal(opened.read(order, wanted), (draws[0][0].select(order), mixed))


def test_any_order_reads_the_same_even_when_only_one_shard_fits_in_memory(pristine):
    in_order = [open_cache(pristine).read([number]) for number in range(10)]
    for memory_bytes in (0, 1 << 29):
        opened = open_cache(pristine, memory_bytes=memory_bytes)
        for seed in range(5):
            order = random.Random(seed).choices(range(10), k=6)
            expected = [in_order[number] for number in order]
            sequences = Sequences.concatenate(part[0] for part in expected)
            assert equal(
                opened.read(order), (sequences, Records.concatenate(part[1] for part in expected))
            )


@pytest.mark.parametrize("memory_bytes", [0, 500, 20_000, 1 << 29])
def test_threads_may_share_an_open_cache(pristine, profile, memory_bytes):
    opened = open_cache(pristine, memory_bytes=memory_bytes)
    orders = [random.Random(seed).choices(range(10), k=4) for seed in range(24)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(opened.read, orders))
    sequences, records = captured(IDENTITIES[profile])
    offsets = compute_offsets(sequences.target_mask.sum(axis=1))
    for each, order in zip(found, orders, strict=True):
        parts = [records.slice(offsets[number], offsets[number + 1]) for number in order]
        assert equal(each, (sequences.select(order), Records.concatenate(parts)))
    assert opened._memory.size <= memory_bytes


def test_shards_of_many_chunks_read_the_same(tmp_path, monkeypatch, pristine, profile):
    monkeypatch.setattr("cache.shard.CHUNK_BYTES", 64)
    folder = make_cache(tmp_path, IDENTITIES[profile])
    assert len(list_file_sizes(folder)) > 30 + len(list_file_sizes(pristine))
    assert equal(open_cache(folder).read([8, 1, 5]), open_cache(pristine).read([8, 1, 5]))


def test_a_chunk_is_decoded_once_where_all_fit_in_memory(pristine, decoded):
    opened = open_cache(pristine)
    orders = [random.Random(seed).choices(range(10), k=4) for seed in range(24)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(opened.read, orders))
    assert len(decoded) == len(set(decoded))


def test_chunks_leave_memory_one_by_one(pristine, decoded):
    """Memory lacks half of the first shard: that half is decoded again, and the rest is not."""
    first = open_cache(pristine)
    first.read(range(4))
    needed = len(decoded)
    whole = open_cache(pristine)
    whole.read(range(10))
    tight = open_cache(pristine, memory_bytes=whole._memory.size - first._memory.size // 2)
    tight.read(range(10))
    decoded.clear()
    tight.read(range(4))
    assert 0 < len(decoded) < needed


def test_sequences_that_share_chunks_are_read_one_after_the_other(plain, decoded):
    """Memory holds the chunks of one shard: reading two shards in turn decodes no chunk twice."""
    whole = open_cache(plain)
    whole.read(range(4))
    opened = open_cache(plain, memory_bytes=whole._memory.size)
    decoded.clear()
    opened.read([0, 4, 1, 5, 2, 6, 3, 7])
    assert len(decoded) == len(set(decoded))


def test_the_metadata_of_shards_is_parsed_once_and_kept_for_a_bounded_number(plain, monkeypatch):
    parsed = []
    parse = Seal.from_bytes
    monkeypatch.setattr(Seal, "from_bytes", lambda *given: parsed.append(1) or parse(*given))
    opened = open_cache(plain, memory_bytes=0)
    assert opened.tables is opened.tables
    parsed.clear()
    for number in (0, 4, 8) * 3:
        opened.read([number])
    assert len(parsed) == 3
    monkeypatch.setattr("cache.store._OPEN_SHARDS", 2)
    opened = open_cache(plain, memory_bytes=0)
    for number in (0, 4, 8) * 3:
        opened.read([number])
    assert opened._shards.size == 2


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


@pytest.mark.long
def test_a_training_batch_decodes_in_milliseconds(tmp_path):
    opened = open_cache(
        make_cache(tmp_path, make_identity(1024, 512, 32, 0, make_codec(shard_sequences=32)))
    )
    opened.read(range(32))
    seconds = []
    for seed in range(5):
        order = random.Random(seed).sample(range(32), 8)
        began = time.process_time()  # other processes may have the cores
        opened.read(order)
        seconds.append(time.process_time() - began)
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
    if "tail_k" in records.columns:
        records["tail_k"][-1] = 0  # no candidate brings it
    with open_writer(tmp_path, identity) as writer:
        write_folders(writer)
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
    for name, array in make_lm_head(V).items():
        assert np.array_equal(opened.teacher_head()[name], array)
    assert opened.manifest.head.bytes > 0


def test_a_hidden_cache_is_not_complete_without_its_head(tmp_path):
    identity = IDENTITIES["hidden"]
    with open_writer(tmp_path, identity) as writer:
        for index in writer.find_missing_shards():
            writer.write_shard(index, *make_shard(identity, index))
        with pytest.raises(CacheIncomplete, match="LM head is not sealed"):
            writer.finish(PROVENANCE)


def test_the_number_of_nodes_is_found_in_what_is_sealed(all_pristine, tmp_path):
    assert make_shard(IDENTITIES["tempered"], 0)[1]["partition"].shape[1:] == (4, 2)
    with open_writer(all_pristine["tempered"].parent, IDENTITIES["tempered"]) as writer:
        assert writer.read_sealed_shape("partition")[1:] == (4, 2)
    with open_writer(tmp_path, IDENTITIES["tempered"]) as writer:
        assert writer.read_sealed_shape("partition") is None


def make_cache_without_records(root: Path, identity: CacheIdentity) -> Path:
    """Make one shard of sequences in which every token is a document, so that none has a record."""
    shape = (identity.data.sequences, identity.data.sequence_length)
    tokens = (
        np.arange(np.prod(shape), dtype=np.uint32).reshape(shape)
        % identity.tokenizer.vocabulary_size
    )
    with open_writer(root, identity) as writer:
        write_folders(writer)
        sequences = Sequences(tokens.astype(np.uint32), np.ones(shape, bool), np.zeros(shape, bool))
        writer.write_shard(0, sequences, make_records(0, 1, identity.record_codec()).slice(0, 0))
        writer.finish(PROVENANCE)
    return root / identity.fingerprint


def test_a_shard_without_any_record_is_possible(tmp_path, profile):
    folder = make_cache_without_records(tmp_path, identity_of(profile, V, 16, 2, 0))
    sequences, records = open_cache(folder).read([1, 0])
    assert verify_cache(folder) == []
    assert len(records) == 0
    assert sequences.tokens.tolist() == [list(range(16, 32)), list(range(16))]


# ---- other readers


def raw(folder: Path, index: int, name: str) -> np.ndarray:
    return np.asarray(
        zarr.open_array(store=folder / "shards" / f"{index:06d}" / name, mode="r")[...]
    )


def arrays_of(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob("shards/000000/*/zarr.json"))


def test_tensorstore_and_zarrs_read_every_array(pristine):
    for name in arrays_of(pristine):
        expected = raw(pristine, 0, name)
        path = str(pristine / "shards" / "000000" / name)
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}
        assert np.array_equal(
            tensorstore.open(spec, read=True).result().read().result(), expected
        ), name
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
    sampled = {
        "head_count",
        "tail_count",
        "token_classes",
        "head_symbols",
        "head_bits",
        "head_logprobs",
    }
    sampled |= {f"tail_{draw}_{part}" for draw in range(3) for part in ("symbols", "bits")}
    tempered = {"partition"} | {f"tail_{draw}_logprobs" for draw in range(3)}
    units = {"cluster", "head_count", "head_units", "other_count"}
    units |= {f"{part}_{of}" for part in ("head", "gap", "other") for of in ("symbols", "bits")}
    own = {
        "threshold": units,
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
    (plain_copy / "manifest.json").write_bytes(
        sign_json({**document, "version": FORMAT_VERSION + 1})
    )
    with pytest.raises(CacheMismatch, match="newer"):
        open_cache(plain_copy)


def test_a_cache_that_is_not_there_or_not_complete_is_refused(plain_copy, tmp_path):
    with pytest.raises(CacheNotFound):
        open_cache(tmp_path / "nothing")
    with pytest.raises(CacheNotFound):
        verify_cache(tmp_path / "nothing")
    shutil.rmtree(plain_copy / "shards/000001")
    with pytest.raises(CacheIncomplete, match="000001 is missing"):
        open_cache(plain_copy)
    (plain_copy / "manifest.json").unlink()
    with pytest.raises(CacheIncomplete, match="has not finished"):
        open_cache(plain_copy)
    assert any("manifest.json" in line for line in verify_cache(plain_copy))


def test_the_manifest_waits_for_the_last_shard(tmp_path):
    with open_writer(tmp_path, IDENTITY) as writer:
        write_folders(writer)
        writer.write_shard(1, *make_shard(IDENTITY, 1))
        assert list(writer.find_missing_shards()) == [0, 2]
        with pytest.raises(CacheIncomplete, match="2 of 3 shards"):
            writer.finish(PROVENANCE)
    assert not (tmp_path / IDENTITY.fingerprint / "manifest.json").exists()


def test_data_that_does_not_fit_is_refused_before_anything_is_written(tmp_path):
    sequences, records = make_shard(IDENTITY, 0)
    wide = Records(records.columns | {"tail_ids": records["tail_ids"][:, None]})
    with open_writer(tmp_path, IDENTITY) as writer:
        write_folders(writer)
        before = content(writer.folder)
        for index, wrong_sequences, wrong_records, message in [
            (3, sequences, records, "A shard must lie in"),
            (2, sequences, records, "must hold tokens of shape"),
            (0, sequences, records.slice(0, 3), "3 records for"),
            (
                0,
                *make_shard(make_identity(vocabulary_size=10_000), 0),
                "below the vocabulary size 300",
            ),
            (
                0,
                sequences,
                make_shard(IDENTITIES["tempered"], 0)[1],
                "Profile threshold has columns",
            ),
            (0, sequences, wide, "tail_ids must be of type uint16 with 1 dimensions"),
        ]:
            with pytest.raises(ValueError, match=message):
                writer.write_shard(index, wrong_sequences, wrong_records)
        assert content(writer.folder) == before


# ---- listing


def test_bytes_per_token_counts_every_byte_on_disk(pristine, profile):
    opened = open_cache(pristine)
    size = sum(path.stat().st_size for path in pristine.rglob("*") if path.is_file())
    assert measure_cache_bytes(pristine, opened.manifest) == size
    sequences, records = captured(IDENTITIES[profile])
    assert opened.bytes_per_token == size / sequences.positions
    assert opened.manifest.positions == sequences.positions
    entries = (
        records["top_ids"].size
        if profile == "topk"
        else records.length("head") + records.length("tail")
    )
    assert opened.manifest.entries == entries


def test_caches_are_listed_whole_begun_and_broken(plain_copy):
    root = plain_copy.parent
    with open_writer(root, make_identity(codec=make_codec(seed=1))) as writer:
        write_folders(writer)
        writer.write_shard(0, *make_shard(writer.identity, 0))
    broken = make_cache(root, make_identity(codec=make_codec(seed=2)))
    flip(broken / "manifest.json", 500)
    (root / ("f" * 32)).mkdir()
    (root / "unrelated").mkdir()
    listed = {summary.fingerprint: summary for summary in list_caches(root)}
    assert len(listed) == 4
    good = listed[plain_copy.name]
    begun = listed[make_identity(codec=make_codec(seed=1)).fingerprint]
    assert (good.complete, good.teacher, good.sequences, good.shards, good.problem) == (
        True,
        "tiny",
        10,
        3,
        "",
    )
    assert good.bytes_per_token == round(open_cache(plain_copy).bytes_per_token, 3)
    assert good.created
    assert (begun.complete, begun.shards, begun.tokens) == (False, 1, None)
    assert "has not finished" in begun.problem
    assert "own digest" in listed[broken.name].problem
    assert json.loads(json.dumps(asdict(good)))["profile"] == "threshold"
    assert list_caches(root / "nothing") == []


def test_an_identity_that_is_not_the_folders_is_refused_even_when_it_is_signed(tmp_path):
    """Someone may edit a manifest and sign it again, but the folder's name shows it."""
    folder = make_cache(tmp_path)
    document = json.loads((folder / "manifest.json").read_bytes())
    document.pop("digest")
    document["identity"]["data"]["sha256"] = "d" * 64
    (folder / "manifest.json").write_bytes(sign_json(document))
    with pytest.raises(CacheMismatch, match="the identity was edited"):
        open_cache(folder)
    assert any("the identity was edited" in line for line in verify_cache(folder))


# ---- a cache that vanishes


@pytest.fixture
def opened(plain_copy):
    """An open cache that keeps no shard in memory."""
    return open_cache(plain_copy, memory_bytes=0)


READERS = {
    "records": lambda cache: cache.read(range(len(cache))),
    "the token map": lambda cache: cache.token_map(),
    "the size": lambda cache: cache.bytes_per_token,
}


@pytest.mark.parametrize("what", READERS)
def test_a_cache_that_vanishes_while_it_is_open_is_named(opened, what):
    opened.read([0])
    shutil.rmtree(opened.folder)
    with pytest.raises(CacheNotFound, match="removed while it was in use") as caught:
        READERS[what](opened)
    assert str(opened.folder) in caught.value.detail and "retry" in caught.value.remedy


def test_a_file_that_vanishes_is_named_and_can_be_captured_again(opened):
    (opened.folder / "manifest.json").unlink()
    with pytest.raises(CacheIncomplete, match=r"manifest\.json is missing"):
        _ = opened.bytes_per_token
