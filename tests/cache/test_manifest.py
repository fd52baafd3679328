"""Identity, fingerprint and manifest: strict to parse, precise about what differs."""

import json
from dataclasses import asdict, fields, replace

import pytest

from bench.support.small.caches import PROVENANCE, make_codec, make_identity
from cache.errors import CacheCorrupt, CacheMismatch
from cache.manifest import (
    CODEC_VERSION,
    FORMAT_VERSION,
    TAIL_MEAN_FORMAT_VERSION,
    CacheIdentity,
    CodecIdentity,
    FidelityRow,
    FolderEntry,
    Manifest,
    choose_codec_version,
    encode_canonical_json,
    list_differences,
    sign_json,
    verify_json,
)
from cache.profiles.table import PROFILES
from cache.shards.entries import ShardEntry
from tests.support.manifests import edits

IDENTITY = make_identity()
OTHER_VALUES = {
    "teacher.model_sha256": "f" * 64,
    "teacher.dtype": "bfloat16",
    "teacher.quantization": "int8",
    "teacher.parallel": "tensor",
    "teacher.server": "vllm 0.33.0",
    "teacher.proposal": "f" * 64,
    "tokenizer.vocabulary_size": 301,
    "tokenizer.sha256": "f" * 64,
    "data.sha256": "f" * 64,
    "data.sequence_length": 256,
    "data.packing": False,
    "data.train_sequences": 8,
    "data.validation_sequences": 2,
    "data.context_sha256": "f" * 64,
    "codec.profile": "topk",
    "codec.threshold": 0.05,
    "codec.temperatures": (0.5, 2.0),
    "codec.always_keep": (2,),
    "codec.draws": 3,
    "codec.clusters": 3,
    "codec.fitted": 2,
    "codec.entropies": True,
    "codec.k": 5,
    "codec.bits": 16,
    "codec.seed": 1,
    "codec.shard_sequences": 5,
    "codec.version": 3,
}


#: Of profile threshold as version 0.2.0 captured it, the only one that has draws without a range.
EARLIER = make_identity(codec=make_codec(clusters=0, fitted=0))


def changed(identity: CacheIdentity = IDENTITY, **names: object) -> CacheIdentity:
    for name, value in names.items():
        section, field = name.split(".")
        identity = replace(
            identity, **{section: replace(getattr(identity, section), **{field: value})}
        )
    return identity


def make_manifest() -> Manifest:
    shards = [
        ShardEntry(len(IDENTITY.shard_range(index)), 40, 90, 110, 5000, "d" * 64)
        for index in range(3)
    ]
    kinds = [str(field.type) for field in fields(FidelityRow)]
    rows = [
        FidelityRow(*(count if kind == "int" else 0.5 for kind in kinds)) for count in (512, 256)
    ]
    rows.append(
        replace(
            rows[0],
            **{field.name: None for field in fields(FidelityRow) if "None" in str(field.type)},
        )
    )
    return Manifest(IDENTITY, PROVENANCE, tuple(shards), FolderEntry(900, "e" * 64), tuple(rows))


def test_other_values_cover_every_field():
    names = {
        f"{section}.{field}" for section, values in asdict(IDENTITY).items() for field in values
    }
    assert names == set(OTHER_VALUES)


@pytest.mark.parametrize(
    "name,value", [(name, value) for name, value in OTHER_VALUES.items() if name != "codec.profile"]
)
def test_every_field_changes_the_fingerprint_and_is_named(name, value):
    identity = EARLIER if name == "codec.draws" else IDENTITY
    other = changed(identity, **{name: value})
    assert other.fingerprint != identity.fingerprint
    section, field = name.split(".")
    original = getattr(getattr(identity, section), field)
    assert list_differences(identity, other) == [f"{name}: expected {original}, got {value}"]


def test_every_profile_has_a_fingerprint_of_its_own():
    assert len(
        {make_identity(codec=make_codec(profile)).fingerprint for profile in PROFILES}
    ) == len(PROFILES)


def test_all_differing_fields_are_named_together():
    # Another profile needs its k at the same time, and no threshold.
    other = replace(
        changed(**{name: value for name, value in OTHER_VALUES.items() if name[:5] != "codec"})
    )
    codec = CodecIdentity(
        **{name[6:]: value for name, value in OTHER_VALUES.items() if name[:5] == "codec"}
    )
    assert len(list_differences(IDENTITY, replace(other, codec=codec))) == len(OTHER_VALUES)
    assert list_differences(IDENTITY, make_identity()) == []


def test_the_fingerprint_is_32_hex_digits_that_never_change():
    # These must not change: no cache of today would be found again.
    assert IDENTITY.fingerprint == "be05f7cd834b779f98b300e98a29c077"
    assert EARLIER.fingerprint == "0eec6647f0cac57011a11f56c8e362e2"


def test_fields_that_earlier_versions_did_not_have_are_left_out_where_they_are_empty():
    assert "context_sha256" not in IDENTITY.to_json()["data"]
    added = {"clusters", "fitted", "entropies"}
    assert not added & set(EARLIER.to_json()["codec"])
    own = replace(IDENTITY, codec=replace(IDENTITY.codec, entropies=True))
    document = json.loads(encode_canonical_json(own.to_json()))
    assert added <= set(document["codec"]) and CacheIdentity.from_json(document) == own


@pytest.mark.parametrize("profile", PROFILES)
def test_identity_and_json_are_inverses(profile):
    draws = 2 if "draws" in PROFILES[profile].options else 1
    identity = make_identity(codec=make_codec(profile, draws=draws, always_keep=(0, 7)))
    assert (
        CacheIdentity.from_json(json.loads(encode_canonical_json(identity.to_json()))) == identity
    )
    codec = identity.record_codec()
    own = {name: value for name, value in asdict(identity.codec).items() if hasattr(codec, name)}
    assert {name: getattr(codec, name) for name in own} == own
    assert codec.vocabulary_size == identity.tokenizer.vocabulary_size


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


def test_only_a_quantised_teacher_changes_the_format():
    plain = json.loads(make_manifest().to_bytes())
    assert plain["version"] == 3 and "quantization" not in plain["identity"]["teacher"]
    identity = changed(**{"teacher.quantization": "int8"})
    manifest = replace(make_manifest(), identity=identity)
    assert json.loads(manifest.to_bytes())["version"] == TAIL_MEAN_FORMAT_VERSION
    assert Manifest.from_bytes(manifest.to_bytes(), "manifest.json") == manifest
    assert CacheIdentity.from_json(json.loads(json.dumps(identity.to_json()))) == identity
    assert identity.teacher.describe_precision() == "float32, weights in int8"
    groups = [changed(**{"teacher.quantization": name}) for name in ("int4", "int4-group-64")]
    assert len({each.fingerprint for each in groups}) == 2


def test_a_spread_teacher_changes_the_format_and_only_its_own_fingerprint():
    plain = make_manifest()
    assert "parallel" not in json.loads(plain.to_bytes())["identity"]["teacher"]
    identity = changed(**{"teacher.parallel": "device_map"})
    manifest = replace(plain, identity=identity)
    assert json.loads(manifest.to_bytes())["version"] == TAIL_MEAN_FORMAT_VERSION
    assert Manifest.from_bytes(manifest.to_bytes(), "manifest.json") == manifest
    assert identity.fingerprint != plain.identity.fingerprint
    assert not identity.teacher.plain and plain.identity.teacher.plain
    assert identity.teacher.describe_precision() == "float32, spread by device_map"


def test_a_context_changes_the_format_so_that_earlier_programs_refuse_it_by_name():
    plain = make_manifest()
    identity = changed(**{"data.context_sha256": "f" * 64})
    manifest = replace(plain, identity=identity)
    assert json.loads(manifest.to_bytes())["version"] == FORMAT_VERSION
    assert Manifest.from_bytes(manifest.to_bytes(), "manifest.json") == manifest
    assert identity.fingerprint != plain.identity.fingerprint


def test_every_edited_or_removed_field_of_a_manifest_is_found():
    found = list(edits(make_manifest().to_bytes()))
    assert len(found) > 160
    for where, data in found:
        assert json.loads(data) != json.loads(make_manifest().to_bytes()), where
        with pytest.raises((CacheCorrupt, CacheMismatch)):
            Manifest.from_bytes(data, "manifest.json")


@pytest.mark.long
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
        verify_json(sign_json({"a": 1}) + tail, "seal")


def forged(change):
    """Make a manifest with a right digest and wrong content."""
    document = json.loads(make_manifest().to_bytes())
    del document["digest"]
    change(document)
    return sign_json(document)


WRONG_CONTENT = {
    "a missing field": (
        lambda d: d["identity"]["data"].pop("packing"),
        "identity.data was damaged: fields must be",
    ),
    "an unknown field": (lambda d: d.update(colour=1), "fields must be"),
    "a wrong type": (
        lambda d: d["identity"]["data"].update(packing=1),
        "identity.data.packing was damaged: it must be of type bool",
    ),
    "a number as text": (
        lambda d: d["shards"][1].update(bytes="5"),
        r"shards\[1\].bytes was damaged: it must be of type int",
    ),
    "a value out of range": (
        lambda d: d["identity"]["codec"].update(threshold=1.5),
        "codec.threshold must lie",
    ),
    "an unknown profile": (
        lambda d: d["identity"]["codec"].update(profile="top"),
        "codec.profile must be one of",
    ),
    "a word for a temperature": (
        lambda d: d["identity"]["codec"].update(temperatures=["1"]),
        r"codec.temperatures\[0\] was damaged: it must be of type float",
    ),
    "a word for a number or nothing": (
        lambda d: d["fidelity"][0].update(kl="0.1"),
        r"fidelity\[0\].kl was damaged: it must be of type float",
    ),
    "a missing shard": (lambda d: d["shards"].pop(), "shards must hold every sequence"),
    "another format": (lambda d: d.update(format="other"), "format must be"),
    "a version that never was": (lambda d: d.update(version=0), "version must be"),
    "a list for an object": (
        lambda d: d.update(identity=[]),
        "identity was damaged: it must be an object",
    ),
    "an object for a list": (
        lambda d: d.update(shards={}),
        "shards was damaged: it must be a list",
    ),
}


@pytest.mark.parametrize("name", WRONG_CONTENT)
def test_wrong_content_is_refused_by_name(name):
    change, message = WRONG_CONTENT[name]
    with pytest.raises(CacheCorrupt, match=message):
        Manifest.from_bytes(forged(change), "manifest.json")


def test_a_newer_format_is_refused_whatever_else_it_holds():
    data = sign_json({"format": "potstill-cache", "version": FORMAT_VERSION + 1, "novelty": 1})
    with pytest.raises(CacheMismatch, match="format version 10 is newer than 9") as refusal:
        Manifest.from_bytes(data, "manifest.json")
    assert "Upgrade" in refusal.value.remedy


def test_a_newer_codec_is_refused():
    data = forged(lambda d: d["identity"]["codec"].update(version=CODEC_VERSION + 1))
    with pytest.raises(CacheMismatch, match="codec version 3 is newer than 2"):
        Manifest.from_bytes(data, "manifest.json")


def test_states_in_int8_have_a_codec_version_of_their_own():
    """The codec version of all other profiles stays, so their caches keep their fingerprints."""
    versions = {("hidden", 8): 3, ("hidden", 16): 2, ("dense", 16): 2, ("topk", 0): 2}
    for (profile, bits), version in versions.items():
        assert CodecIdentity(profile, bits=bits, k=4).version == version
    older = replace(IDENTITY, codec=CodecIdentity("hidden", bits=8, version=2))
    data = replace(make_manifest(), identity=older, shards=()).to_bytes()
    with pytest.raises(CacheMismatch, match="codec version 2 is older than 3"):
        Manifest.from_bytes(data, "manifest.json")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_logits_in_float32_of_a_teacher_in_half_precision_have_a_codec_version(dtype):
    """A cache of such a teacher whose logits were rounded has another name, and is still read."""
    teacher = replace(IDENTITY.teacher, dtype=dtype)
    for (profile, bits), version in {("threshold", 0): 4, ("hidden", 8): 5}.items():
        assert choose_codec_version(profile, bits, dtype) == version
    assert choose_codec_version("threshold", 0, "float32") == CODEC_VERSION
    names = set()
    for version in (CODEC_VERSION, CODEC_VERSION + 2):
        codec = replace(IDENTITY.codec, version=version)
        identity = replace(IDENTITY, teacher=teacher, codec=codec)
        manifest = replace(make_manifest(), identity=identity)
        assert Manifest.from_bytes(manifest.to_bytes(), "manifest.json") == manifest
        names.add(identity.fingerprint)
    assert len(names) == 2
    newer = replace(identity, codec=replace(codec, version=CODEC_VERSION + 4))
    with pytest.raises(CacheMismatch, match="codec version 6 is newer than 4"):
        Manifest.from_bytes(replace(manifest, identity=newer).to_bytes(), "manifest.json")


@pytest.mark.parametrize("what", ["format", "codec"])
def test_an_older_version_is_refused_with_what_to_do(what):
    # A manifest of the first format has other fields.
    if what == "format":
        data = sign_json({"format": "potstill-cache", "version": 1, "shards": []})
    else:
        data = forged(lambda d: d["identity"]["codec"].update(version=CODEC_VERSION - 1))
    with pytest.raises(CacheMismatch, match=f"{what} version 1 is older than 2") as refusal:
        Manifest.from_bytes(data, "manifest.json")
    assert "Capture the cache again" in refusal.value.remedy


WRONG_CODECS = [
    ("threshold", {"threshold": 0.0009}, "threshold"),
    ("threshold", {"threshold": 1.0}, "threshold"),
    ("tempered", {"threshold": 0.0}, "threshold"),
    ("tempered", {"temperatures": ()}, "temperatures"),
    ("tempered", {"temperatures": (0.0, 2.0)}, "temperatures"),
    ("tempered", {"temperatures": (2.0, 2.0)}, "temperatures"),
    ("tempered", {"temperatures": (2.0, 0.5)}, "temperatures"),
    ("tempered", {"temperatures": (0.5, 1.0, 2.0)}, "temperatures"),
    ("topk", {"k": 0}, "k must"),
    ("dense", {"shard_sequences": 0}, "shard_sequences"),
    ("dense", {"bits": 8}, "bits"),
    ("hidden", {"bits": 32}, "bits"),
    ("hidden", {"seed": -1}, "seed"),
    ("hidden", {"seed": 1 << 64}, "seed"),
    ("threshold", {"clusters": -1}, "clusters must lie in"),
    ("threshold", {"clusters": 257}, "clusters must lie in"),
    ("threshold", {"draws": 2}, "draws must be 1"),
    ("threshold", {"draws": 0}, "draws"),
    ("threshold", {"draws": 65}, "draws"),
    ("threshold", {"always_keep": (-1,)}, "always_keep"),
    ("threshold", {"always_keep": (4, 4)}, "always_keep"),
]


@pytest.mark.parametrize("profile,options,field", WRONG_CODECS)
def test_a_codec_that_cannot_be_stored_is_refused(profile, options, field):
    assert make_codec(profile)
    with pytest.raises(ValueError, match=field):
        make_codec(profile, **options)


def test_a_profile_that_does_not_exist_is_refused():
    with pytest.raises(
        ValueError, match="profile must be one of threshold, tempered, topk, dense, hidden"
    ):
        CodecIdentity("top")
