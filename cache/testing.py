"""Small random data that is valid: for this project's tests and for its users'.

S   sequences       L   tokens of a sequence       V   vocabulary size       P   positions with a record
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.codec import Codec, Places, Sample
from cache.manifest import (
    CacheIdentity,
    CodecIdentity,
    DataIdentity,
    Manifest,
    Probe,
    Provenance,
    TeacherIdentity,
    TokenizerIdentity,
)
from cache.records import Records, Sequences
from cache.store import CacheWriter, capture

#: Width of the hidden states of a hidden cache.
HIDDEN = 6
PROVENANCE = Provenance("tiny", "main", (Probe("It was", (3, 5)),), {"eos": 0})


def make_codec(profile: str = "threshold", **options: Any) -> CodecIdentity:
    """A codec of ``profile`` with small defaults, shards of four sequences."""
    own: dict[str, dict[str, Any]] = {
        "threshold": {"threshold": 0.04},
        "tempered": {"threshold": 0.04, "temperatures": (0.5, 2.0)},
        "topk": {"k": 5},
        "dense": {"bits": 16},
        "hidden": {"bits": 8},
    }
    return CodecIdentity(profile, **{"shard_sequences": 4, **own[profile], **options})


def make_identity(
    vocabulary_size: int = 300,
    sequence_length: int = 16,
    train_sequences: int = 7,
    validation_sequences: int = 3,
    codec: CodecIdentity | None = None,
) -> CacheIdentity:
    """The identity of a small cache: by default three shards, the last one short."""
    return CacheIdentity(
        TeacherIdentity("a" * 64, "float32"),
        TokenizerIdentity(vocabulary_size, "b" * 64),
        DataIdentity("c" * 64, sequence_length, True, train_sequences, validation_sequences),
        codec or make_codec(),
    )


def make_sequences(seed: int, count: int, length: int, vocabulary_size: int) -> Sequences:
    """Random tokens (S, L) packed from documents of about eight tokens, with a target wherever there can be one."""
    rng = np.random.default_rng(seed)
    starts_SL = rng.random((count, length)) < 1 / 8
    starts_SL[:, 0] = True
    target_SL = np.zeros((count, length), bool)
    target_SL[:, :-1] = ~starts_SL[:, 1:]
    tokens_SL = rng.integers(0, vocabulary_size, (count, length), dtype=np.uint32)
    return Sequences(tokens_SL, starts_SL, target_SL)


def make_records(seed: int, positions: int, codec: Codec) -> Records:
    """Columns of ``positions`` random records; a tail's ids differ from its head's, and log-probabilities are real."""
    rng = np.random.default_rng(seed)
    logits_PV = rng.normal(0, 3, (positions, codec.vocabulary_size))
    logp_PV = logits_PV - np.log(np.exp(logits_PV).sum(1, keepdims=True))
    entropy = -(np.exp(logp_PV) * logp_PV).sum(1)
    places = Places(np.zeros(positions, np.int64), np.arange(positions))
    known = logp_PV[:, [0, *codec.always_keep]]  # token 0 plays the gold token
    if codec.profile == "topk":
        top_ids = np.argsort(-logp_PV, axis=1)[:, : codec.k]
        top = np.take_along_axis(logp_PV, top_ids, 1)
        residual = np.log(np.maximum(1 - np.exp(top).sum(1), 1e-12))
        return codec.encode_top(known[:, :1], entropy, (top_ids, top), residual, places)
    if codec.profile == "dense":
        return codec.encode_dense(known, entropy, logp_PV, places)
    if codec.profile == "hidden":
        return codec.encode_hidden(known, entropy, rng.normal(size=(positions, HIDDEN)), places)
    return codec.encode_sample(_sample(rng, logp_PV, known, codec), places)


def _sample(rng: np.random.Generator, logp_PV: NDArray[Any], known: NDArray[Any], codec: Codec) -> Sample:
    """Every token above the threshold, and one to four others for each draw: valid, but no fair sample."""
    free_PV = np.ones(logp_PV.shape, bool)
    free_PV[:, [0, *codec.always_keep]] = False
    head_PV = free_PV & (np.exp(logp_PV) > codec.threshold)
    tail_count = rng.integers(1, 5, len(logp_PV))
    others = [np.flatnonzero(row) for row in free_PV & ~head_PV]
    picks = [
        np.stack([rng.choice(ids, count, replace=False) for _ in range(codec.draws)], axis=1)
        for ids, count in zip(others, tail_count.tolist(), strict=True)
    ]
    tail_ids = np.concatenate([np.empty((0, codec.draws), np.int64), *picks])
    rows = np.repeat(np.arange(len(logp_PV)), tail_count)[:, None]
    tempered = codec.profile == "tempered"
    return Sample(
        known_logprobs=known,
        entropy=-(np.exp(logp_PV) * logp_PV).sum(1),
        head_count=head_PV.sum(1),
        head_ids=np.nonzero(head_PV)[1],
        head_logprobs=logp_PV[head_PV],
        tail_count=tail_count,
        tail_ids=tail_ids,
        tail_logprobs=logp_PV[rows, tail_ids] if tempered else None,
        partition=rng.normal(-2, 1, (len(logp_PV), 4, 2)) if tempered else None,
    )


def make_head(vocabulary_size: int) -> dict[str, NDArray[Any]]:
    """A random LM head, for hidden caches."""
    weight = np.random.default_rng(7).normal(size=(vocabulary_size, HIDDEN)).astype(np.float32)
    return {"weight": weight, "bias": np.zeros(0, np.float32), "transform": np.array([1.0, 0.0])}


def make_shard(identity: CacheIdentity, index: int) -> tuple[Sequences, Records]:
    """The same random content for the same (identity, index)."""
    seed = identity.codec.seed * 1000 + index
    count, vocabulary_size = len(identity.shard_range(index)), identity.tokenizer.vocabulary_size
    sequences = make_sequences(seed, count, identity.data.sequence_length, vocabulary_size)
    return sequences, make_records(seed, sequences.positions, identity.record_codec())


def fill(writer: CacheWriter) -> Manifest:
    """Write every missing shard, and the head that a hidden cache needs, and finish."""
    if writer.identity.codec.profile == "hidden":
        writer.write_head(make_head(writer.identity.tokenizer.vocabulary_size))
    for index in writer.missing_shards():
        writer.write_shard(index, *make_shard(writer.identity, index))
    return writer.finish(PROVENANCE)


def make_cache(root: Path, identity: CacheIdentity | None = None) -> Path:
    """Capture a small cache below ``root``; returns its folder."""
    identity = identity or make_identity()
    with capture(root, identity) as writer:
        fill(writer)
    return root / identity.fingerprint
