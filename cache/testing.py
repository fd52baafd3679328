"""Small random data that is valid: for this project's tests and for its users'.

S   sequences       L   tokens of a sequence       V   vocabulary size       P   positions with a record
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

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

PROVENANCE = Provenance("tiny", "main", (Probe("It was", (3, 5)),), {"eos": 0})


def make_identity(
    vocabulary_size: int = 300,
    sequence_length: int = 16,
    train_sequences: int = 7,
    validation_sequences: int = 3,
    shard_sequences: int = 4,
    threshold: float = 0.04,
    seed: int = 0,
) -> CacheIdentity:
    """The identity of a small cache: by default three shards, the last one short."""
    return CacheIdentity(
        TeacherIdentity("a" * 64, "float32"),
        TokenizerIdentity(vocabulary_size, "b" * 64),
        DataIdentity("c" * 64, sequence_length, True, train_sequences, validation_sequences),
        CodecIdentity("threshold", threshold, seed, shard_sequences),
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


def make_records(seed: int, positions: int, vocabulary_size: int, threshold: float) -> Records:
    """Records of ``positions`` random distributions: the head exact, the tail m of the remaining tokens."""
    rng = np.random.default_rng(seed)
    candidates = min(vocabulary_size, int(2 / threshold))
    p_PC = rng.dirichlet(np.full(candidates, 0.1), positions) if positions else np.zeros((0, candidates))
    p_PC = -np.sort(-p_PC, axis=1)
    in_head_PC = p_PC > threshold
    rest_P = 1 - np.where(in_head_PC, p_PC, 0).sum(axis=1)
    head_P = in_head_PC.sum(axis=1)
    tail_P = np.minimum(np.maximum(1, (rest_P / threshold).astype(int)), candidates - head_P)
    ranks_PC = np.arange(candidates)
    in_tail_PC = (ranks_PC >= head_P[:, None]) & (ranks_PC < (head_P + tail_P)[:, None])
    ids_PC = (rng.integers(0, vocabulary_size, (positions, 1)) + ranks_PC) % vocabulary_size
    tail_ids_PC = np.sort(np.where(in_tail_PC, ids_PC, -1), axis=1)
    log_PC = np.log(np.maximum(p_PC, 1e-30))
    return Records(
        head_count=head_P.astype(np.uint8),
        head_ids=ids_PC[in_head_PC].astype(np.uint32),
        head_logprobs=log_PC[in_head_PC].astype(np.float32),
        tail_count=tail_P.astype(np.uint8),
        tail_ids=tail_ids_PC[tail_ids_PC >= 0].astype(np.uint32),
        gold_logprob=-rng.exponential(3.0, positions).astype(np.float32),
        entropy=-(p_PC * log_PC).sum(axis=1).astype(np.float32),
    )


def make_shard(identity: CacheIdentity, index: int) -> tuple[Sequences, Records]:
    """The same random content for the same (identity, index)."""
    seed = identity.codec.seed * 1000 + index
    count, vocabulary_size = len(identity.shard_range(index)), identity.tokenizer.vocabulary_size
    sequences = make_sequences(seed, count, identity.data.sequence_length, vocabulary_size)
    return sequences, make_records(seed, sequences.positions, vocabulary_size, identity.codec.threshold)


def fill(writer: CacheWriter) -> Manifest:
    """Write every missing shard and finish."""
    for index in writer.missing_shards():
        writer.write_shard(index, *make_shard(writer.identity, index))
    return writer.finish(PROVENANCE)


def make_cache(root: Path, identity: CacheIdentity | None = None) -> Path:
    """Capture a small cache below ``root``; returns its folder."""
    identity = identity or make_identity()
    with capture(root, identity) as writer:
        fill(writer)
    return root / identity.fingerprint
