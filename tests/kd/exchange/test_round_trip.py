"""Exports that are imported again: the same cache, or the records that the format holds."""

from __future__ import annotations

import json
import shutil
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from bench.support.paths import AUSTEN
from bench.support.small.caches import make_codec, make_identity, make_shard, write_folders
from cache.manifest import FidelityRow, Provenance, TokenizerIdentity
from cache.profiles.table import PROFILES
from cache.records import Records, Sequences, TailSums
from cache.rounding import TOP_STEP, UNKNOWN
from cache.store import Cache, open_cache
from cache.writing.writer import open_writer
from kd.errors import DataError, TokenizerMismatch
from kd.exchange import exporting
from kd.exchange.entries import read_entries
from kd.exchange.exporting import export_records
from kd.exchange.importing import ImportRequest, import_records
from kd.models.tokenizers import PROBE_TEXTS, encode_probes, hash_tokenizer, make_token_map
from kd.models.tokenizing.token_map import TokenMap
from kd.progress import Monitor
from tests.support.caches import content
from tests.support.kd.tokenizers import exchange_ids, list_rare_tokens

V = 2048
TOKENIZER = AUSTEN / "teacher"
#: The cache of profile threshold as version 0.2.0 captured it.
EARLIER = "threshold of version 0.2.0"
FIDELITY = (FidelityRow(1.0, 9, 0.8, 1e-3, 0.1, None, None, 1e-2, 1.0, 1e-4),)


def without_some(sequences: Sequences, records: Records) -> tuple[Sequences, Records]:
    """Leave out every fifth record, and all of the first sequence, as a mask of answers does."""
    kept = np.arange(len(records)) % 5 > 0
    kept[: int(sequences.target_mask[0].sum())] = False
    target = sequences.target_mask.copy()
    target[target] = kept
    rows = np.flatnonzero(kept)
    some = Records.concatenate(records.slice(int(row), int(row) + 1) for row in rows)
    return replace(sequences, target_mask=target), some


@pytest.fixture(scope="module")
def stores(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Cache]:
    """A cache of each profile, with the example's tokenizer, and one of version 0.2.0.

    Profiles with draws have three.
    """
    root = tmp_path_factory.mktemp("caches")
    names = (*PROFILES, EARLIER)
    return {name: make_store(root, name, tokenizer) for name in names}


def make_store(root: Path, profile: str, tokenizer: Any) -> Cache:
    options: dict[str, Any] = {}
    if profile == EARLIER:
        profile, options = "threshold", {"clusters": 0, "fitted": 0}
    rules = PROFILES[profile]
    options |= {"always_keep": (5, 7)} if rules.sampled else {}
    options |= {"draws": 3} if "draws" in rules.options or options.get("clusters") == 0 else {}
    identity = make_identity(vocabulary_size=V, codec=make_codec(profile, **options))
    identity = replace(identity, tokenizer=TokenizerIdentity(V, hash_tokenizer(tokenizer)))
    with open_writer(root, identity) as writer:
        write_folders(writer)
        for index in range(identity.shard_count):
            shard = make_shard(identity, index)
            sums = np.linspace(0.0, 1.0 + index, V)
            tails = TailSums(3, 30, sums, sums**2) if profile == "threshold" else None
            writer.write_shard(index, *(shard if index else without_some(*shard)), tails)
        writer.write_token_map(make_token_map(tokenizer, V).to_arrays())
        probes = encode_probes(tokenizer, PROBE_TEXTS)
        writer.finish(Provenance("tiny", probes=probes), FIDELITY)
    return open_cache(root / identity.fingerprint)


def bring_back(format_: str, folder: Path, root: Path, **options: Any) -> Cache:
    request = ImportRequest(format_, (folder,), options.pop("tokenizer", TOKENIZER), **options)
    return open_cache(root / import_records(request, root)["fingerprint"])


@pytest.mark.long
@pytest.mark.parametrize("profile", ["threshold", EARLIER, "tempered", "topk"])
def test_parquet_brings_back_the_same_cache_byte_for_byte(
    stores: dict[str, Cache], profile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "FILE_SEQUENCES", 4)
    store = stores[profile]
    export_records(store, "parquet", tmp_path / "out")
    again = bring_back("parquet", tmp_path / "out", tmp_path / "again")
    assert again.folder.name == store.folder.name
    assert content(again.folder) == content(store.folder)
    assert (again.tail_mean() is not None) == (profile in ("threshold", EARLIER))
    assert bool(again.manifest.dither.digest) == (profile == "threshold")
    assert TokenMap.of_cache(again).rules


def test_other_rules_of_the_tokenizer_are_told_when_an_export_comes_back(
    stores: dict[str, Cache], tmp_path: Path
) -> None:
    export_records(stores["topk"], "parquet", tmp_path / "out")
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    content = json.loads((TOKENIZER / "tokenizer.json").read_text(encoding="utf-8"))
    content["normalizer"] = {"type": "NFC"}
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    shutil.copy(TOKENIZER / "tokenizer_config.json", folder)
    monitor = Monitor()
    for tokenizer in (TOKENIZER, folder):
        request = ImportRequest("parquet", (tmp_path / "out",), tokenizer)
        import_records(request, tmp_path / tokenizer.name, monitor)
        told = [notice.example for notice in monitor.notices]
        assert told == (["normalizer"] if tokenizer == folder else [])
    assert (
        "rules of the given tokenizer that are not those of the export's"
        in str(monitor.notices[0]).lower()
    )


@pytest.mark.parametrize("profile", ["topk", "dense", "hidden"])
@pytest.mark.parametrize("format_", ["parquet", "distillkit"])
def test_the_k_entries_of_each_record_come_back(
    stores: dict[str, Cache], profile: str, format_: str, tmp_path: Path
) -> None:
    store = stores[profile]
    if format_ == "distillkit":
        # The format needs a record for each position: the first shard has not.
        store = replace_first(store, tmp_path / "whole")
    export_records(store, format_, tmp_path / "out", 4)
    again = bring_back(format_, tmp_path / "out", tmp_path / "again")
    assert (again.codec.profile, again.codec.k) == ("topk", 4)
    numbers = (*store.train, *store.validation)
    (_, whole, entries), *more = read_entries(store, range(len(numbers)), 4)
    assert more == []
    ids, logprobs = entries.take_top(4)
    _, records = again.read(range(len(again)))
    assert len(records) == len(whole)
    np.testing.assert_array_equal(records["top_ids"], ids)
    off = np.abs(records["top_logprobs"] * -TOP_STEP - logprobs)
    assert off.max() <= TOP_STEP * 1.01
    rest = np.abs(np.exp(records["residual"] * -TOP_STEP) - np.exp(entries.residual))
    assert rest.max() <= 4 * TOP_STEP
    if format_ == "parquet":
        np.testing.assert_array_equal(records["entropy"], whole["entropy"])


def replace_first(store: Cache, root: Path) -> Cache:
    """Write the cache again with all records of the first shard."""
    with open_writer(root, store.identity) as writer:
        write_folders(writer)
        for index in range(store.identity.shard_count):
            writer.write_shard(index, *make_shard(store.identity, index))
        writer.write_token_map(store.token_map())
        writer.finish(store.manifest.provenance)
    return open_cache(writer.folder)


@pytest.mark.parametrize("profile", ["threshold", EARLIER, "tempered"])
def test_what_distillkit_cannot_hold_is_refused(
    stores: dict[str, Cache], profile: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="no place for the sampled tail") as caught:
        export_records(stores[profile], "distillkit", tmp_path / "out")
    assert "Parquet" in caught.value.remedy and not (tmp_path / "out").exists()


@pytest.mark.parametrize("k", [None, 4])
@pytest.mark.parametrize("profile", ["threshold", EARLIER, "tempered"])
def test_a_lossy_export_for_distillkit_comes_back(
    stores: dict[str, Cache], profile: str, k: int | None, tmp_path: Path
) -> None:
    store = replace_first(stores[profile], tmp_path / "whole")
    said = export_records(store, "distillkit", tmp_path / "out", k, lossy=True)
    again = bring_back("distillkit", tmp_path / "out", tmp_path / "again")
    sequences, records = again.read(range(len(again)))
    assert int(sequences.target_mask.sum()) == said["records"]
    logprobs = np.where(records["top_logprobs"] == UNKNOWN, np.inf, records["top_logprobs"])
    mass = np.exp(logprobs * -TOP_STEP).sum(axis=1)
    assert mass.mean() == pytest.approx(said["kept_mass"], abs=1e-3)
    assert np.exp(records["residual"] * -TOP_STEP) == pytest.approx(1 - mass, abs=1e-2)


def test_another_tokenizer_is_refused_by_its_ids(
    stores: dict[str, Cache], tokenizer: Any, tmp_path: Path
) -> None:
    pairs = list_rare_tokens(tokenizer, 4)
    other = exchange_ids(tokenizer, tmp_path / "other", pairs)
    first = min(tokenizer.convert_tokens_to_ids([token for pair in pairs for token in pair]))
    for format_, k in (("parquet", None), ("parquet", 2), ("distillkit", 2)):
        out = tmp_path / f"{format_} {k}"
        whole = replace_first(stores["topk"], tmp_path / "whole")
        export_records(whole, format_, out, k)
        with pytest.raises(TokenizerMismatch, match=rf"8 id\(s\) .* id {first}: expected"):
            bring_back(format_, out, tmp_path / "again", tokenizer=other)
    assert not (tmp_path / "again").exists()


def test_an_export_that_was_changed_is_not_taken_for_the_cache(
    stores: dict[str, Cache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "FILE_SEQUENCES", 4)
    out = tmp_path / "out"
    export_records(stores["threshold"], "parquet", out)

    def refused(why: str) -> None:
        with pytest.raises(DataError, match=why) as caught:
            bring_back("parquet", out, tmp_path / "again")
        assert caught.value.remedy and not (tmp_path / "again").exists()

    path = out / "train-00001.parquet"
    whole = path.read_bytes()
    table = pyarrow.parquet.read_table(path)
    metadata = pyarrow.parquet.read_metadata(path).metadata
    kept = {key: value for key, value in metadata.items() if key.startswith(b"potstill")}
    with pyarrow.parquet.ParquetWriter(path, table.schema) as file:
        file.write_table(table.slice(1))
        file.add_key_value_metadata(kept)
    refused(r"train-00001.parquet was changed since its export")
    path.unlink()
    refused(r"validation-00000.parquet begins at sequence 7, but expected 4")
    path.write_bytes(whole)
    (out / "validation-00000.parquet").unlink()
    refused("ends at sequence 7 of 10")
    with pytest.raises(DataError, match="weights of sampled entries"):
        bring_back("parquet", out, tmp_path / "again", validation_fraction=0.2)


def test_tables_of_the_dither_that_were_changed_are_refused(
    stores: dict[str, Cache], tmp_path: Path
) -> None:
    export_records(stores["threshold"], "parquet", tmp_path / "out")
    path = tmp_path / "out" / "train-00000.parquet"
    table = pyarrow.parquet.read_table(path)
    metadata = pyarrow.parquet.read_metadata(path).metadata
    kept = {key: value for key, value in metadata.items() if key.startswith(b"potstill")}
    slots = bytearray(zlib.decompress(kept[b"potstill.dither.slots"]))
    slots[77] ^= 1
    changed = r"train-00000.parquet was changed since its export"
    for found, why in (
        ({b"potstill.dither.slots": zlib.compress(slots)}, changed),
        ({b"potstill.dither.slots": zlib.compress(slots[: len(slots) // 2])}, changed),
        ({b"potstill.dither.slots": zlib.compress(slots[:-2])}, "cannot be imported"),
        ({b"potstill.dither.centres": b"no zlib"}, "cannot be imported"),
        (None, changed),
    ):
        given = kept | (found or {})
        if found is None:
            del given[b"potstill.dither.leading"]
        with pyarrow.parquet.ParquetWriter(path, table.schema) as file:
            file.write_table(table)
            file.add_key_value_metadata(given)
        with pytest.raises(DataError, match=why):
            bring_back("parquet", tmp_path / "out", tmp_path / "again")
        assert not (tmp_path / "again").exists()
    # Only the damage was refused: a file written again with what it had is the export.
    with pyarrow.parquet.ParquetWriter(path, table.schema) as file:
        file.write_table(table)
        file.add_key_value_metadata(kept)
    again = bring_back("parquet", tmp_path / "out", tmp_path / "again")
    assert content(again.folder) == content(stores["threshold"].folder)
