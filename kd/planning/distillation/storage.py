"""Shards, objects and bytes of a token store and of a cache, by arithmetic. Imports no torch.

sequences  = tokens / L
positions  = sequences (L - 1)                 the last token of a sequence has no target
shards     = sequences / cache.shard_sequences
pieces     = shards / 4,096                    of the manifest, if there are more shards than that
objects    = shards (2 A + 2 + bytes / 1 MiB)  A arrays: metadata and a chunk of each, one more
                                               chunk for each further MiB, the group, the seal

The token store has shards of its own, of some 4 million tokens: a file each, and its seal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cache.codec import Codec
from cache.profiles.table import PROFILES
from cache.shard import CHUNK_BYTES
from cache.shards.entries import PIECE_SHARDS
from kd.capture.codec_identity import make_codec_identity
from kd.capture.estimate.storage import CacheSize, estimate_cache_size, estimate_entries
from kd.capture.estimate.text import BYTES_PER_TOKEN
from kd.config.cache import CacheConfig
from kd.planning.distillation.sources import ARRAYS, RECORDS, Line
from kd.text.stored.shards import Layout

#: Objects of a shard besides those of its arrays: the metadata of the group, and the seal.
_SHARD_OBJECTS = 2
#: Objects of an array that has one chunk: its metadata, and the chunk.
_ARRAY_OBJECTS = 2
#: Objects of a shard of the token store: its file, and its seal.
_TEXT_OBJECTS = 2


@dataclass(frozen=True)
class TokenCount:
    """A text of so many tokens, cut into sequences, of which a shard has some."""

    tokens: int
    length: int
    shard_sequences: int

    @property
    def sequences(self) -> int:
        """Sequences of ``length`` tokens; the last one is filled."""
        return math.ceil(self.tokens / self.length)

    @property
    def positions(self) -> int:
        """Positions with a record: all but the last token of each sequence."""
        return self.sequences * (self.length - 1)

    @property
    def shards(self) -> int:
        """Shards of the cache."""
        return math.ceil(self.sequences / self.shard_sequences)

    @property
    def pieces(self) -> int:
        """Pieces of the manifest; a smaller one lists the shards itself."""
        return math.ceil(self.shards / PIECE_SHARDS) if self.shards > PIECE_SHARDS else 0

    @property
    def shard_positions(self) -> int:
        """Positions of a full shard."""
        return self.shard_sequences * (self.length - 1)


@dataclass(frozen=True)
class StoreSize:
    """What the token store of a text takes."""

    sequences: int
    layout: Layout

    @classmethod
    def of(cls, text: TokenCount, vocabulary: int) -> StoreSize:
        """The store of ``text`` in tokens of V ``vocabulary``."""
        return cls(text.sequences, Layout.choose(text.length, vocabulary))

    @property
    def bytes(self) -> int:
        """Bytes of all shards."""
        return self.layout.count_bytes(self.sequences)

    @property
    def objects(self) -> int:
        """Files of all shards."""
        return _TEXT_OBJECTS * math.ceil(self.sequences / self.layout.shard_sequences)

    @property
    def shard_tokens(self) -> int:
        """Tokens of a full shard."""
        return self.layout.shard_sequences * self.layout.sequence_length


@dataclass(frozen=True)
class RecordSize:
    """What a cache of a profile takes: bytes on disk, and files of a shard.

    ``entries`` are those of a sampled record; ``position`` are the bytes of one.
    """

    codec: Codec
    size: CacheSize
    entries: float

    @classmethod
    def of(cls, options: CacheConfig, vocabulary: int, width: int) -> RecordSize:
        """The records of a job's cache, for a teacher of V ``vocabulary`` and D ``width``."""
        codec = make_codec_identity(options).record_codec(vocabulary)
        return cls(codec, estimate_cache_size(codec, width), estimate_entries(codec))

    @property
    def name(self) -> str:
        """The profile with the setting that decides its size."""
        codec = self.codec
        setting = {
            "threshold": f"{codec.threshold:g}",
            "tempered": f"{codec.threshold:g}",
            "topk": f"{codec.k}",
            "dense": f"float{codec.bits}",
            "hidden": f"int{codec.bits}",
        }
        return f"{codec.profile} {setting[codec.profile]}"

    @property
    def measured(self) -> str:
        """The measured bytes of such a record at V = 49,152, or why there are none."""
        found = RECORDS.get(self.name)
        return "not measured" if found is None else f"{found.value:,} ({found})"

    @property
    def source(self) -> str:
        """How the bytes are estimated, and what was measured of another teacher."""
        how = "table" if PROFILES[self.codec.profile].sampled else "format, before compression"
        vocabulary = f"V = {self.codec.vocabulary_size:,}"
        return f"kd estimate's {how}, {vocabulary}; at V = 49,152, D = 576: {self.measured}"

    def count_bytes(self, text: TokenCount) -> int:
        """Bytes of the cache of ``text``."""
        return self.size.sum_bytes(text.positions, text.shards)

    def count_token_bytes(self, text: TokenCount) -> float:
        """Bytes on disk for each position, with its part of what a shard has once."""
        return self.size.position + self.size.shard / text.shard_positions

    def count_shard_objects(self, text: TokenCount) -> int:
        """Files of a full shard."""
        size = self.size.position * text.shard_positions
        return count_shard_objects(int(ARRAYS[self.codec.profile].value), size)


def count_shard_objects(arrays: int, size: float) -> int:
    """Files of a shard of so many arrays and bytes, with its seal."""
    return _SHARD_OBJECTS + _ARRAY_OBJECTS * arrays + math.floor(size / CHUNK_BYTES)


def list_records(options: CacheConfig, vocabulary: int, width: int) -> Iterator[RecordSize]:
    """The records of the job, and those of every profile with the usual settings."""
    choices = (
        {"profile": "threshold", "threshold": 0.04},
        {"profile": "threshold", "threshold": 0.02},
        {"profile": "threshold", "threshold": 0.01},
        {"profile": "tempered", "threshold": 0.04},
        {"profile": "topk", "k": 128},
        {"profile": "hidden", "dtype": "int8"},
        {"profile": "hidden", "dtype": "int16"},
        {"profile": "dense"},
    )
    own = RecordSize.of(options, vocabulary, width)
    kept = {"shard_sequences": options.shard_sequences}
    others = [RecordSize.of(CacheConfig(**each, **kept), vocabulary, width) for each in choices]
    if own.codec not in [each.codec for each in others]:
        yield own
    yield from others


def describe_storage(text: TokenCount, records: RecordSize) -> tuple[Line, ...]:
    """The lines of a plan about sequences, shards, objects and bytes."""
    length, sequences = f"{text.length:,}", f"{text.shard_sequences:,}"
    objects = records.count_shard_objects(text)
    store = StoreSize.of(text, records.codec.vocabulary_size)
    return (
        Line("sequences", text.sequences, "", f"tokens / {length} (data.sequence_length)"),
        Line("positions with a record", text.positions, "", "sequences x (length - 1)"),
        Line("shards", text.shards, "", f"sequences / {sequences} (cache.shard_sequences)"),
        Line("pieces of the manifest", text.pieces, "", f"shards / {PIECE_SHARDS:,}"),
        Line(
            "text", round(text.tokens * BYTES_PER_TOKEN), "bytes",
            f"{BYTES_PER_TOKEN:g} bytes a token of English, assumed",
        ),
        Line(
            "token store", store.bytes, "bytes",
            f"{store.layout.bytes_per_token:g} bytes a token: its id, and two bits",
        ),
        Line(
            "objects of the token store", store.objects, "",
            f"{_TEXT_OBJECTS} a shard of {store.shard_tokens:,} tokens",
        ),
        Line(
            "cache", records.count_bytes(text), "bytes",
            f"{records.count_token_bytes(text):.4g} bytes a token: {records.source}",
        ),
        Line(
            "objects of the cache", text.shards * objects, "",
            f"{objects} a shard: {ARRAYS[records.codec.profile]} (arrays), one more for each MiB",
        ),
    )  # fmt: skip


def describe_profiles(
    text: TokenCount, options: CacheConfig, vocabulary: int, width: int
) -> list[dict[str, Any]]:
    """A row for each profile: bytes a token, bytes, objects, and what was measured."""
    return [
        {
            "profile": each.name,
            "bytes_per_token": round(each.count_token_bytes(text), 2),
            "bytes": each.count_bytes(text),
            "objects": text.shards * each.count_shard_objects(text),
            "source": each.source,
        }
        for each in list_records(options, vocabulary, width)
    ]
