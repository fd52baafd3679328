"""A manifest in pieces: opened, read, resumed and verified as one that lists its shards."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from bench.support.small.caches import (
    PROVENANCE,
    fill_cache,
    make_cache,
    make_identity,
    make_shard,
    write_folders,
)
from cache.checking.listing import list_caches
from cache.checking.verify import find_extras, verify_cache
from cache.errors import CacheCorrupt, CacheError, CacheIncomplete, CacheMismatch
from cache.inspection import compare_caches, compute_cache_stats
from cache.manifest import (
    DITHER_FORMAT_VERSION,
    FORMAT_VERSION,
    PIECES_FORMAT_VERSION,
    PLAIN_FORMAT_VERSION,
    Manifest,
    sign_json,
)
from cache.operations import find_garbage
from cache.shards.entries import ShardEntry, ShardTotals, decode_row, encode_piece, sum_piece
from cache.shards.manifest_pieces import EntryPieces, write_pieces
from cache.shards.names import MANIFEST
from cache.shards.shard_runs import ShardRuns
from cache.store import measure_cache_bytes, open_cache, read_manifest, replace_fidelity
from cache.writing.writer import open_writer
from tests.support.caches import EARLIER, captured, child, content, equal, flip

#: Six shards of four sequences, the last one short, in pieces of two.
IDENTITY = make_identity(train_sequences=17, validation_sequences=5)


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache with its entries in the manifest."""
    return make_cache(tmp_path_factory.mktemp("listed"), IDENTITY)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cache.shards.entries.PIECE_SHARDS", 2)


@pytest.fixture
def pieced(tmp_path: Path, small_pieces: None) -> Path:
    """The same cache with its entries in pieces."""
    return make_cache(tmp_path / "pieced", IDENTITY)


@pytest.mark.long
def test_only_the_manifest_of_many_shards_has_pieces(listed: Path, pieced: Path) -> None:
    ours, theirs = content(pieced), content(listed)
    assert {name for name in ours if name.startswith("manifest/")} == {
        f"manifest/{piece:06d}.bin" for piece in range(3)
    }
    plain = json.loads(theirs.pop(MANIFEST))
    document = json.loads(ours.pop(MANIFEST))
    assert (plain["version"], document["version"]) == (DITHER_FORMAT_VERSION,) * 2
    assert "pieces" not in plain and "shards" not in document
    assert {name: ours[name] for name in theirs} == theirs, "everything else is the same"


def test_pieces_have_a_format_of_their_own_in_caches_of_earlier_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_version(root: str) -> int:
        folder = make_cache(tmp_path / root, EARLIER)
        assert equal(open_cache(folder).read(range(10)), captured(EARLIER))
        return int(json.loads((folder / MANIFEST).read_bytes())["version"])

    assert read_version("listed") == PLAIN_FORMAT_VERSION
    monkeypatch.setattr("cache.shards.entries.PIECE_SHARDS", 2)
    assert read_version("pieced") == PIECES_FORMAT_VERSION


def test_it_reads_as_the_cache_that_lists_its_shards(listed: Path, pieced: Path) -> None:
    opened, plain = open_cache(pieced, IDENTITY), open_cache(listed, IDENTITY)
    assert equal(opened.read(range(22)), captured(IDENTITY))
    assert list(opened.entries) == list(plain.manifest.shards)
    assert opened.entries[5] == plain.manifest.shards[5]
    for number in (-1, 6):
        with pytest.raises(IndexError, match=r"in \[0, 6\)"):
            opened.entries[number]
    assert opened.manifest.totals == plain.manifest.totals
    assert opened.manifest.entries == plain.manifest.entries
    assert verify_cache(pieced) == []
    size = sum(map(len, content(pieced).values()))
    assert measure_cache_bytes(pieced, opened.manifest) == size
    (summary,) = list_caches(pieced.parent)
    assert (summary.shards, summary.bytes, summary.problem) == (6, size, "")
    assert compare_caches(opened, plain).equal
    ours, theirs = compute_cache_stats(opened), compute_cache_stats(plain)
    assert ours.gold == theirs.gold and ours.entropy == theirs.entropy


def test_manifest_and_bytes_are_inverses(pieced: Path) -> None:
    manifest = read_manifest(pieced)
    assert Manifest.from_bytes(manifest.to_bytes(), MANIFEST) == manifest
    assert manifest.pieces is not None and not manifest.shards
    replace_fidelity(pieced, ())
    assert read_manifest(pieced) == manifest


def test_only_the_pieces_that_are_needed_are_read(
    pieced: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    before = EntryPieces._read

    def watched(self: EntryPieces, piece: int) -> bytes:
        read.append(piece)
        return before(self, piece)

    monkeypatch.setattr(EntryPieces, "_read", watched)
    opened = open_cache(pieced)
    assert read == []
    opened.read([9, 13, 8])
    assert read == [1], "shards 2 and 3 are in the second piece"


def test_the_pieces_in_memory_are_few(pieced: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cache.shards.manifest_pieces._KEPT_PIECES", 1)
    opened = open_cache(pieced)
    assert isinstance(opened.entries, EntryPieces)
    assert len(list(opened.entries)) == 6
    assert opened.entries._kept.size == 1


DAMAGE = {
    "missing": (lambda path: path.unlink(), "it is missing"),
    "short": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "it has 127 bytes"),
    "flipped": (lambda path: flip(path, 77), "content differs from its sha256"),
    "foreign": (
        lambda path: path.write_bytes((path.parent / "000000.bin").read_bytes()),
        "content differs from its sha256",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_piece_is_refused_and_written_again(name: str, pieced: Path) -> None:
    before = content(pieced)
    change, why = DAMAGE[name]
    change(pieced / "manifest/000001.bin")
    with pytest.raises(
        CacheCorrupt, match=f"manifest/000001.bin is not the piece .*{why}"
    ) as found:
        open_cache(pieced).read([8])
    assert "Run the job again" in found.value.remedy
    (line,) = verify_cache(pieced)
    assert line.startswith("manifest/000001.bin: ") and why in line
    with open_writer(pieced.parent, IDENTITY) as writer:
        assert not writer.find_missing_shards()
        writer.finish(PROVENANCE)
    assert content(pieced) == before


def test_sound_shards_are_read_beside_a_damaged_piece(pieced: Path) -> None:
    flip(pieced / "manifest/000001.bin", 77)
    sequences, records = captured(IDENTITY)
    count = sequences.select(slice(0, 8)).positions
    assert equal(
        open_cache(pieced).read(range(8)),
        (sequences.select(slice(0, 8)), records.slice(0, count)),
    )


def test_damage_of_a_shard_and_files_that_do_not_belong_are_found(pieced: Path) -> None:
    (pieced / "manifest/000003.bin").write_bytes(b"x")
    (pieced / "seals/000006.json").write_bytes(b"x")
    (pieced / "shards/000005/more").write_bytes(b"x")
    (pieced / "shards/0000005").mkdir()
    (pieced / "shards/0000005/more").write_bytes(b"x")
    assert find_extras(pieced) == [
        "manifest/000003.bin",
        "seals/000006.json",
        "shards/0000005/more",
        "shards/000005/more",
    ]
    flip(pieced / "shards/000003/tokens/c.0.0", 100)
    assert verify_cache(pieced) == ["shards/000003/tokens/c.0.0: content differs from its sha256"]


def test_a_lost_shard_is_found_when_it_is_read(pieced: Path) -> None:
    shutil.rmtree(pieced / "shards/000004")
    opened = open_cache(pieced)
    with pytest.raises(CacheError, match="shards/000004"):
        opened.read([16])
    assert find_garbage(pieced.parent, 0.0) == []


@pytest.mark.long
def test_a_capture_resumes(pieced: Path, tmp_path: Path) -> None:
    with open_writer(tmp_path / "begun", IDENTITY) as writer:
        write_folders(writer)
        for index in (0, 1, 4):
            writer.write_shard(index, *make_shard(IDENTITY, index))
        with pytest.raises(CacheIncomplete, match="3 of 6 shards are not sealed, the first is 2"):
            writer.finish(PROVENANCE)
        assert not (writer.folder / "manifest").exists()
        assert not list(writer.folder.glob(".tmp-*"))
    with open_writer(tmp_path / "begun", IDENTITY) as writer:
        assert writer.find_missing_shards().runs == (range(2, 4), range(5, 6))
        fill_cache(writer)
    assert content(writer.folder) == content(pieced)


def test_a_manifest_that_does_not_fit_its_pieces_is_refused(pieced: Path) -> None:
    manifest = read_manifest(pieced)
    assert manifest.pieces is not None
    for change in (
        {"piece_shards": 7},
        {"piece_shards": 0},
        {"sha256": manifest.pieces.sha256[:-1]},
        {"totals": replace(manifest.pieces.totals, shards=5)},
        {"totals": replace(manifest.pieces.totals, sequences=21)},
    ):
        forged = replace(manifest, pieces=replace(manifest.pieces, **change))
        (pieced / MANIFEST).write_bytes(forged.to_bytes())
        with pytest.raises(CacheCorrupt, match="shards must hold every sequence"):
            open_cache(pieced)
    wrong = replace(manifest.pieces.totals, positions=manifest.positions + 1)
    forged = replace(manifest, pieces=replace(manifest.pieces, totals=wrong))
    (pieced / MANIFEST).write_bytes(forged.to_bytes())
    (line,) = verify_cache(pieced)
    assert "the entries add up to" in line


def test_each_format_has_only_its_own_form_of_entries(pieced: Path, listed: Path) -> None:
    for folder, version in ((pieced, PLAIN_FORMAT_VERSION), (listed, PIECES_FORMAT_VERSION)):
        document = json.loads((folder / MANIFEST).read_bytes())
        del document["digest"]
        with pytest.raises(CacheCorrupt, match=f"version {version} must have no"):
            Manifest.from_bytes(sign_json({**document, "version": version}), MANIFEST)
    document = json.loads((pieced / MANIFEST).read_bytes())
    assert document["version"] > 5, "a program that reads up to 5 refuses it by name"
    with pytest.raises(CacheMismatch, match="newer"):
        Manifest.from_bytes(sign_json({**document, "version": FORMAT_VERSION + 1}), MANIFEST)


#: A capture that kills itself before the n-th change to the pieces or the manifest.
KILLED = """
import json, os, signal, sys
from pathlib import Path
from cache.manifest import CacheIdentity
from cache.shards import entries
from cache.writing.writer import open_writer
from bench.support.small.caches import fill_cache

entries.PIECE_SHARDS = 2
deadly = int(sys.argv[3])
changes = 0

def count(event, arguments):
    global changes
    if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"):
        name = str(arguments[0])
        if "manifest" in name and ".py" not in name:
            changes += 1
            if changes == deadly:
                os.kill(os.getpid(), signal.SIGKILL)

with open_writer(Path(sys.argv[1]), CacheIdentity.from_json(json.loads(sys.argv[2]))) as writer:
    for index in writer.find_missing_shards():
        pass
    sys.addaudithook(count)
    fill_cache(writer)
"""


@pytest.mark.long
def test_a_capture_that_is_killed_while_it_writes_pieces_resumes(pieced: Path, tmp_path: Path):
    for deadly in (1, 3, 6, 8, 10, 12, 14):
        root = tmp_path / str(deadly)
        shutil.copytree(pieced, root / pieced.name)
        if deadly % 4:
            (root / pieced.name / MANIFEST).unlink()
            shutil.rmtree(root / pieced.name / "manifest")
        process = child(KILLED, root, json.dumps(IDENTITY.to_json()), deadly)
        process.communicate()
        if (root / pieced.name / MANIFEST).exists():
            assert verify_cache(root / pieced.name) == []
        with open_writer(root, IDENTITY) as writer:
            assert not writer.find_missing_shards()
            fill_cache(writer)
        assert content(root / pieced.name) == content(pieced)


@pytest.mark.long
def test_no_process_holds_a_list_of_the_entries(tmp_path: Path) -> None:
    """Many pieces are written with one of them in memory."""
    entry = ShardEntry(4, 40, 90, 110, 5000, "d" * 64)
    count = 60_000
    tracemalloc.start()
    index = write_pieces(tmp_path, (entry for _ in range(count)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(index.sha256) == 15 and index.totals.shards == count
    assert peak < 3_000_000, "a list of 60,000 entries in JSON takes more than 12 MB"


def test_totals_and_pieces_agree() -> None:
    entries = [ShardEntry(4, n, 2**40 + n, 0, 7 * n, f"{n:064x}") for n in range(5)]
    data = encode_piece(entries)
    assert len(data) == 5 * 64
    assert [decode_row(data, row, 4) for row in range(5)] == entries
    assert sum_piece(data, 20) == ShardTotals.of(entries)


def test_runs_hold_the_numbers_that_they_were_made_of() -> None:
    numbers = [0, 1, 2, 5, 7, 8]
    runs = ShardRuns.of(numbers)
    assert runs.runs == (range(3), range(5, 6), range(7, 9))
    assert (list(runs), len(runs), runs.first, runs.last) == (numbers, 6, 0, 8)
    assert [number for number in range(10) if number in runs] == numbers
    assert list(runs + ShardRuns.of([3])) == [*numbers, 3]
    assert not ShardRuns.of([])
