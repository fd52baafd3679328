"""docs/formats.md against the code: a reader that knows only the page reads what was written."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.support.paths import ROOT
from bench.support.small.caches import (
    PROVENANCE,
    make_cache,
    make_codec,
    make_identity,
    make_lm_head,
    make_shard,
    make_token_map,
)
from cache.manifest import FIRST_TAILS_FORMAT_VERSION, TAIL_MEAN_FORMAT_VERSION, CodecIdentity
from cache.records import Records, Sequences, TailSums
from cache.shard import make_shard_arrays, write_arrays
from cache.shards import entries as shard_entries
from cache.store import open_cache
from cache.units.dither import DitherTables
from cache.writing.writer import open_writer
from tests.support.formats.page_reader import (
    check_seal,
    find_best,
    read_array,
    read_entry,
    read_manifest,
    read_sequence,
    weigh_units,
)

PAGE = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
CODECS: dict[str, dict[str, Any]] = {
    "threshold": {"always_keep": (3, 9)},
    "earlier": {"draws": 2, "clusters": 0, "fitted": 0},
    "tempered": {"draws": 2, "always_keep": (3, 9)},
    "topk": {},
    "dense": {},
    "hidden": {"bits": 16},
}


def test_the_reader_of_the_page_imports_nothing_of_the_project() -> None:
    text = (ROOT / "tests" / "support" / "formats" / "page_reader.py").read_text(encoding="utf-8")
    assert not re.search(r"^\s*(from|import) (cache|kd|services|tests|bench)\b", text, re.MULTILINE)


@pytest.mark.parametrize("profile", CODECS)
def test_the_page_reads_what_the_store_reads(profile: str, tmp_path: Path) -> None:
    require_equal_reading(profile, 300, (0, 3, 4, 9), tmp_path)


def make_named(name: str) -> CodecIdentity:
    """Make a codec of ``CODECS``; "earlier" is profile threshold of version 0.2.0."""
    return make_codec("threshold" if name == "earlier" else name, **CODECS[name])


@pytest.mark.parametrize("profile", ["threshold", "topk"])
def test_the_page_reads_ids_of_32_bits(profile: str, tmp_path: Path) -> None:
    require_equal_reading(profile, 70_000, (9,), tmp_path)


def require_equal_reading(
    profile: str, vocabulary: int, numbers: tuple[int, ...], tmp_path: Path
) -> None:
    codec = make_named(profile)
    folder = make_cache(tmp_path, make_identity(vocabulary, codec=codec))
    store = open_cache(folder)
    for number in numbers:
        for draw in range(codec.draws):
            sequences, records = store.read([number], draw)
            found = read_sequence(folder, number, draw)
            assert found.pop("tokens") == sequences.tokens[0].tolist()
            assert found.pop("document_start") == sequences.document_start[0].tolist()
            assert found.pop("target_mask") == sequences.target_mask[0].tolist()
            # The store has one column of tails, that of the draw.
            expected = {name: column.tolist() for name, column in records.columns.items()}
            assert found == expected


@pytest.mark.parametrize("profile", CODECS)
def test_the_page_verifies_digests_and_fingerprint(profile: str, tmp_path: Path) -> None:
    folder = make_cache(tmp_path, make_identity(codec=make_named(profile)))
    manifest = read_manifest(folder)
    assert manifest.genuine
    assert manifest.fingerprint == folder.name
    for number, entry in enumerate(manifest.content["shards"]):
        name = f"{number:06d}"
        assert check_seal(folder, f"shards/{name}", f"{name}.json", entry["digest"])
    assert ("dither" in manifest.content) == (profile == "threshold")
    for name in ("head", "token_map", "dither"):
        if digest := manifest.content.get(name, {"digest": ""})["digest"]:
            assert check_seal(folder, name, f"{name}.json", digest)
    # A changed byte shows.
    path = folder / "shards" / "000000" / "tokens" / "c.0.0"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    digest = manifest.content["shards"][0]["digest"]
    assert not check_seal(folder, "shards/000000", "000000.json", digest)


def test_the_page_reads_the_mean_tail(tmp_path: Path) -> None:
    identity = make_identity(codec=make_named("earlier"))
    size = identity.tokenizer.vocabulary_size
    rng = np.random.default_rng(1)
    with open_writer(tmp_path, identity) as writer:
        for index in writer.find_missing_shards():
            sums = rng.random(size) * (rng.random(size) > 0.1)
            writer.write_shard(index, *make_shard(identity, index), TailSums(3, 30, sums, sums**2))
        writer.finish(PROVENANCE)
    folder = tmp_path / identity.fingerprint
    assert read_manifest(folder).content["version"] == TAIL_MEAN_FORMAT_VERSION
    expected = open_cache(folder).tail_mean()
    assert expected is not None
    means = read_array(folder / "tail_mean" / "mean").rows
    shares = read_array(folder / "tail_mean" / "share").rows
    found = [0.0 if code == 65535 else np.exp(-code / 256) for code in means]
    np.testing.assert_allclose(found, expected["mean"], rtol=1e-6)
    np.testing.assert_allclose([code / 255 for code in shares], expected["share"], rtol=1e-6)


def test_the_page_reads_head_and_token_map(tmp_path: Path) -> None:
    folder = make_cache(tmp_path, make_identity(codec=make_codec("hidden")))
    for name, arrays in (("head", make_lm_head(300)), ("token_map", make_token_map(300))):
        for each, values in arrays.items():
            assert read_array(folder / name / each).rows == values.tolist()


EXAMPLE_TABLES = DitherTables(
    slots_CZ=np.array([[100] * 4 + [101, 102, 103, 104], [7] * 4 + [40, 41, 42, 43]]),
    leading_CL=np.array([[40, 7], [100, 101]]),
    classes_V=(np.arange(300) == 299).astype(np.uint8),
    centres_CD=np.zeros((2, 1), np.float32),
)


def make_example() -> dict[str, np.ndarray]:
    """The arrays of the worked example: one sequence with three records, and its tables."""
    identity = make_identity(300, 4, 1, 0, make_codec("threshold", threshold=0.1, seed=5))
    sequences = Sequences(
        np.array([[5, 6, 8, 9]], np.uint32),
        np.array([[True, False, False, False]]),
        np.array([[True, True, True, False]]),
    )
    records = Records(
        {
            "known": np.array([[256], [512], [0]], np.uint16),
            "entropy": np.array([18, 17, 17], np.uint8),
            "cluster": np.array([0, 0, 1], np.uint8),
            "head_count": np.array([2, 2, 0], np.uint8),
            "head_ids": np.array([7, 40, 60, 7], np.uint16),
            "head_units": np.array([2, 9, 2, 14], np.uint16),
            "tail_count": np.array([2, 1, 0], np.uint8),
            "tail_ids": np.array([270, 102, 101], np.uint16),
            "tail_k": np.array([0, 9, 33], np.uint16),
        }
    )
    codec = identity.record_codec()
    return make_shard_arrays(sequences, records, codec, EXAMPLE_TABLES)


def describe_example() -> str:
    lines = []
    tables = {f"dither/{name}": each for name, each in EXAMPLE_TABLES.to_arrays().items()}
    for name, values in (make_example() | tables).items():
        raw = np.ascontiguousarray(values).tobytes().hex()
        width = 2 * values.itemsize
        shown = " ".join(raw[place : place + width] for place in range(0, len(raw), width))
        if name == "dither/classes":
            assert values.tolist() == [0] * 299 + [1]
            shown = "00 00 ... 00 01"
        if name != "dither/centres":
            lines.append(f"{name:14} {values.dtype!s:6} {values.shape!s:8} {shown}".rstrip())
    return "\n".join(lines) + "\n"


def test_the_worked_example_is_what_the_code_writes() -> None:
    assert f"```text\n{describe_example()}```" in PAGE


def test_the_page_reads_its_own_example(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    write_arrays(folder / "shards" / "000000", make_example())
    write_arrays(folder / "dither", EXAMPLE_TABLES.to_arrays())
    codec = {
        "shard_sequences": 1,
        "profile": "threshold",
        "clusters": 2,
        "threshold": 0.1,
        "always_keep": [],
        "seed": 5,
    }
    content = {"digest": "", "identity": {"codec": codec}}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    (folder / "manifest.json").write_text(text)
    found = read_sequence(folder, 0)
    assert found["head_ids"] == [40, 7, 7, 60]
    assert found["head_units"] == [9, 2, 14, 2]
    assert found["tail_ids"] == [270, 102, 101]
    assert found["tail_k"] == [0, 9, 33]
    assert [sum(weight for _, weight in each) for each in weigh_units(found, codec)] == [1.0] * 3
    assert find_best(found, codec) == [40, 7, 9]
    assert find_best(found | {"head_units": [8, 2, 15, 2]}, codec) == [6, 8, 9]


def test_the_page_reads_entries_in_the_manifest_and_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = make_identity(train_sequences=12, validation_sequences=2)
    listed = make_cache(tmp_path / "listed", identity)
    monkeypatch.setattr(shard_entries, "PIECE_SHARDS", 2)
    pieced = make_cache(tmp_path / "pieced", identity)
    assert "pieces" in read_manifest(pieced).content
    for number, entry in enumerate(open_cache(listed).entries):
        ours, theirs = read_entry(listed, number), read_entry(pieced, number)
        assert ours == theirs == entry.__dict__
        assert check_seal(pieced, f"shards/{number:06d}", f"{number:06d}.json", theirs["digest"])


def test_the_page_reads_the_sums_of_the_first_tails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cache.writing.writer.FIRST_TAILS_SHARE", 100.0)
    codec = make_named("earlier")
    identity = make_identity(train_sequences=12, validation_sequences=2, codec=codec)
    size = identity.tokenizer.vocabulary_size
    with open_writer(tmp_path, identity) as writer:
        for index in range(identity.shard_count):
            sums = TailSums(3, 20, np.full(size, 0.25 + index), np.full(size, 0.5))
            writer.write_shard(index, *make_shard(identity, index), sums)
        writer.finish(PROVENANCE)
    content = read_manifest(writer.folder).content
    assert content["version"] == FIRST_TAILS_FORMAT_VERSION
    first = writer.folder / "first_tails"
    count = identity.lasting_shards
    assert read_array(first / "counts").rows == [3 * count, 20 * count]
    assert read_array(first / "sums").rows == [sum(0.25 + each for each in range(count))] * size
    assert read_array(first / "squares").rows == [0.5 * count] * size
    assert check_seal(
        writer.folder, "first_tails", "first_tails.json", content["first_tails"]["digest"]
    )
