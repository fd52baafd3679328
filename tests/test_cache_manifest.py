"""Identity, fingerprint and manifest: strict to parse, precise about what differs."""

import json
from dataclasses import asdict, replace

import pytest

from cache.errors import CacheCorrupt, CacheMismatch
from cache.manifest import (
    CODEC_VERSION,
    FORMAT_VERSION,
    CacheIdentity,
    CodecIdentity,
    Manifest,
    ShardEntry,
    canonical_json,
    differences,
    signed_json,
    verified_json,
)
from cache.testing import PROVENANCE, make_identity

IDENTITY = make_identity()
OTHER_VALUES = {
    "teacher.model_sha256": "f" * 64,
    "teacher.dtype": "bfloat16",
    "tokenizer.vocabulary_size": 301,
    "tokenizer.sha256": "f" * 64,
    "data.sha256": "f" * 64,
    "data.sequence_length": 256,
    "data.packing": False,
    "data.train_sequences": 8,
    "data.validation_sequences": 2,
    "codec.threshold": 0.05,
    "codec.seed": 1,
    "codec.shard_sequences": 5,
    "codec.version": 2,
}


def changed(**names: object) -> CacheIdentity:
    identity = IDENTITY
    for name, value in names.items():
        section, field = name.split(".")
        identity = replace(identity, **{section: replace(getattr(identity, section), **{field: value})})
    return identity


def make_manifest() -> Manifest:
    shards = [ShardEntry(len(IDENTITY.shard_range(index)), 40, 90, 110, 5000, "d" * 64) for index in range(3)]
    return Manifest(IDENTITY, PROVENANCE, tuple(shards))


def test_other_values_cover_every_field_but_the_profile_of_which_there_is_one():
    fields = {f"{section}.{field}" for section, values in asdict(IDENTITY).items() for field in values}
    assert fields - set(OTHER_VALUES) == {"codec.profile"}


@pytest.mark.parametrize("name,value", OTHER_VALUES.items())
def test_every_field_changes_the_fingerprint_and_is_named(name, value):
    other = changed(**{name: value})
    assert other.fingerprint != IDENTITY.fingerprint
    section, field = name.split(".")
    original = getattr(getattr(IDENTITY, section), field)
    assert differences(IDENTITY, other) == [f"{name}: expected {original}, got {value}"]


def test_all_differing_fields_are_named_together():
    assert len(differences(IDENTITY, changed(**OTHER_VALUES))) == len(OTHER_VALUES)
    assert differences(IDENTITY, make_identity()) == []


def test_the_fingerprint_is_32_hex_digits_that_never_change():
    # On record: were these to change, no cache of today would be found again.
    assert IDENTITY.fingerprint == "0ddf901b46401642546f42d09748b3dd"


def test_identity_and_json_are_inverses():
    document = json.loads(canonical_json(IDENTITY.to_json()))
    assert CacheIdentity.from_json(document) == IDENTITY


def test_shards_hold_every_sequence_once():
    assert [list(IDENTITY.shard_range(index)) for index in range(IDENTITY.shard_count)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
    ]


def test_manifest_and_bytes_are_inverses():
    manifest = make_manifest()
    parsed = Manifest.from_bytes(manifest.to_bytes(), "manifest.json")
    assert parsed == manifest
    assert (parsed.positions, parsed.entries) == (120, 600)


def test_every_flipped_bit_of_a_manifest_is_found():
    good = make_manifest().to_bytes()
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises((CacheCorrupt, CacheMismatch)):
            Manifest.from_bytes(bytes(bad), "manifest.json")


@pytest.mark.parametrize("tail", [b" ", b"\n", b"{}"])
def test_bytes_after_the_document_are_found(tail):
    with pytest.raises(CacheCorrupt):
        verified_json(signed_json({"a": 1}) + tail, "seal")


def forged(change):
    """A manifest whose digest is right and whose content is not."""
    document = json.loads(make_manifest().to_bytes())
    del document["digest"]
    change(document)
    return signed_json(document)


WRONG_CONTENT = {
    "a missing field": (lambda d: d["identity"]["data"].pop("packing"), "identity.data was damaged: fields must be"),
    "an unknown field": (lambda d: d.update(colour=1), "fields must be"),
    "a wrong type": (
        lambda d: d["identity"]["data"].update(packing=1),
        "identity.data.packing was damaged: it must be of type bool",
    ),
    "a number as text": (
        lambda d: d["shards"][1].update(bytes="5"),
        r"shards\[1\].bytes was damaged: it must be of type int",
    ),
    "a value out of range": (lambda d: d["identity"]["codec"].update(threshold=1.5), "codec.threshold must lie"),
    "a missing shard": (lambda d: d["shards"].pop(), "shards must hold every sequence"),
    "another format": (lambda d: d.update(format="other"), "format must be"),
    "an unknown old version": (lambda d: d.update(version=0), "version must be"),
    "a list for an object": (lambda d: d.update(identity=[]), "identity was damaged: it must be an object"),
    "an object for a list": (lambda d: d.update(shards={}), "shards was damaged: it must be a list"),
}


@pytest.mark.parametrize("name", WRONG_CONTENT)
def test_wrong_content_is_refused_by_name(name):
    change, message = WRONG_CONTENT[name]
    with pytest.raises(CacheCorrupt, match=message):
        Manifest.from_bytes(forged(change), "manifest.json")


def test_a_newer_format_is_refused_whatever_else_it_holds():
    data = signed_json({"format": "potstill-cache", "version": FORMAT_VERSION + 1, "novelty": 1})
    with pytest.raises(CacheMismatch, match="format version 2 is newer than 1") as refusal:
        Manifest.from_bytes(data, "manifest.json")
    assert "Upgrade" in refusal.value.remedy


def test_a_newer_codec_is_refused():
    data = forged(lambda d: d["identity"]["codec"].update(version=CODEC_VERSION + 1))
    with pytest.raises(CacheMismatch, match="codec version 2 is newer than 1"):
        Manifest.from_bytes(data, "manifest.json")


@pytest.mark.parametrize(
    "field,value",
    [("profile", "dense"), ("threshold", 0.003), ("threshold", 1.0), ("shard_sequences", 0), ("seed", -1)],
)
def test_a_codec_that_cannot_be_stored_is_refused(field, value):
    good = {"profile": "threshold", "threshold": 0.04, "seed": 0, "shard_sequences": 4}
    with pytest.raises(ValueError, match=field):
        CodecIdentity(**{**good, field: value})
