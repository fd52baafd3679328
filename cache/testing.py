"""Small random data that is valid, for the tests of this project and of its users.

S   sequences       L   tokens of a sequence       V   vocabulary size       N   positions
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.codec import Codec
from cache.manifest import (
    CacheIdentity,
    CodecIdentity,
    DataIdentity,
    Manifest,
    Provenance,
    TeacherIdentity,
    TokenizerIdentity,
    TokenizerProbe,
)
from cache.profiles.table import PROFILES
from cache.profiles.whole import EXAMPLE_WIDTH
from cache.records import Records, Sequences
from cache.rounding import RecordPositions
from cache.writing.writer import CacheWriter, open_writer

PROVENANCE = Provenance("tiny", "main", (TokenizerProbe("It was", (3, 5)),), {"eos": 0})


def make_codec(profile: str = "threshold", **options: Any) -> CodecIdentity:
    """Make a codec of ``profile`` with small defaults and shards of four sequences."""
    rules = PROFILES[profile]
    own: dict[str, Any] = {"threshold": 0.04, "temperatures": (0.5, 2.0), "k": 5}
    found = {name: value for name, value in own.items() if name in rules.options}
    if rules.dtypes:
        found["bits"] = min(rules.dtypes.values())
    return CodecIdentity(profile, **{"shard_sequences": 4, **found, **options})


def make_identity(
    vocabulary_size: int = 300,
    sequence_length: int = 16,
    train_sequences: int = 7,
    validation_sequences: int = 3,
    codec: CodecIdentity | None = None,
) -> CacheIdentity:
    """Make the identity of a small cache; by default it has three shards, the last one short."""
    return CacheIdentity(
        TeacherIdentity("a" * 64, "float32"),
        TokenizerIdentity(vocabulary_size, "b" * 64),
        DataIdentity("c" * 64, sequence_length, True, train_sequences, validation_sequences),
        codec or make_codec(),
    )


def make_sequences(seed: int, count: int, length: int, vocabulary_size: int) -> Sequences:
    """Make random tokens (S, L), packed from documents of about eight tokens.

    Every position that can have a target has one.
    """
    rng = np.random.default_rng(seed)
    starts_SL = rng.random((count, length)) < 1 / 8
    starts_SL[:, 0] = True
    target_SL = np.zeros((count, length), bool)
    target_SL[:, :-1] = ~starts_SL[:, 1:]
    tokens_SL = rng.integers(0, vocabulary_size, (count, length), dtype=np.uint32)
    return Sequences(tokens_SL, starts_SL, target_SL)


def make_records(seed: int, positions: int, codec: Codec) -> Records:
    """Make ``positions`` random records.

    The ids of a tail differ from those of its head, and log-probabilities are those of logits.
    """
    rng = np.random.default_rng(seed)
    logits_NV = rng.normal(0, 3, (positions, codec.vocabulary_size))
    logp_NV = logits_NV - np.log(np.exp(logits_NV).sum(1, keepdims=True))
    places = RecordPositions(np.zeros(positions, np.int64), np.arange(positions))
    # Token 0 stands for the gold token.
    known = logp_NV[:, [0, *codec.always_keep]]
    reading = codec.rules.make_example(rng, codec, known, logp_NV)
    return codec.encode(reading, places)


def make_lm_head(vocabulary_size: int) -> dict[str, NDArray[Any]]:
    """Make a random LM head, for hidden caches."""
    weight = (
        np.random.default_rng(7).normal(size=(vocabulary_size, EXAMPLE_WIDTH)).astype(np.float32)
    )
    return {"weight": weight, "bias": np.zeros(0, np.float32), "transform": np.array([1.0, 0.0])}


def make_token_map(vocabulary_size: int) -> dict[str, NDArray[Any]]:
    """Make a map of ids to made-up tokens."""
    tokens = [f"token {number}".encode() for number in range(vocabulary_size)]
    return {
        "ids": np.arange(vocabulary_size, dtype=np.uint32),
        "lengths": np.array([len(token) for token in tokens], np.uint32),
        "text": np.frombuffer(b"".join(tokens), np.uint8),
    }


def make_shard(identity: CacheIdentity, index: int) -> tuple[Sequences, Records]:
    """Make the random content of a shard, which depends only on ``identity`` and ``index``."""
    seed = identity.codec.seed * 1000 + index
    sequences = make_sequences(
        seed,
        len(identity.shard_range(index)),
        identity.data.sequence_length,
        identity.tokenizer.vocabulary_size,
    )
    return sequences, make_records(seed, sequences.positions, identity.record_codec())


def fill_cache(writer: CacheWriter, provenance: Provenance = PROVENANCE) -> Manifest:
    """Write every missing shard, the LM head of a hidden cache and the token map, and finish."""
    if writer.codec.rules.needs_lm_head:
        writer.write_lm_head(make_lm_head(writer.identity.tokenizer.vocabulary_size))
    writer.write_token_map(make_token_map(writer.identity.tokenizer.vocabulary_size))
    for index in writer.find_missing_shards():
        writer.write_shard(index, *make_shard(writer.identity, index))
    return writer.finish(provenance)


def make_cache(
    root: Path, identity: CacheIdentity | None = None, teacher: str | None = None
) -> Path:
    """Write a small cache below ``root``, of the teacher of this name; return its folder."""
    identity = identity or make_identity()
    with open_writer(root, identity) as writer:
        fill_cache(writer, Provenance(teacher, "", (), {}) if teacher else PROVENANCE)
    return root / identity.fingerprint
