"""Small caches of random data, for tests and benches.

S   sequences       L   tokens of a sequence       V   vocabulary size       N   positions
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
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
from cache.profiles.profile import Reading
from cache.profiles.sampled import Sample
from cache.profiles.table import PROFILES
from cache.profiles.threshold import UnitSample
from cache.profiles.topk import TopReading
from cache.profiles.whole import DenseReading, HiddenReading
from cache.records import Records, Sequences
from cache.rounding import RecordPositions
from cache.units.dither import DitherTables, choose_leading, share_slots
from cache.writing.writer import CacheWriter, open_writer

#: Width of the hidden states.
_WIDTH = 6

PROVENANCE = Provenance("tiny", "main", (TokenizerProbe("It was", (3, 5)),), {"eos": 0})


def make_codec(profile: str = "threshold", **options: Any) -> CodecIdentity:
    """Make a codec of ``profile`` with small defaults and shards of four sequences."""
    rules = PROFILES[profile]
    own: dict[str, Any] = {"threshold": 0.04, "temperatures": (0.5, 2.0), "k": 5}
    found = {name: value for name, value in own.items() if name in rules.options}
    if rules.dithered:
        found |= {"clusters": 2, "fitted": 1, "k": 0}
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


def make_records(
    seed: int,
    positions: int,
    codec: Codec,
    gold_N: NDArray[Any] | None = None,
    places: RecordPositions | None = None,
) -> Records:
    """Make ``positions`` random records, by default those of sequence 0 with next tokens of id 0.

    The ids of a tail differ from those of its head, and log-probabilities are those of logits.
    """
    rng = np.random.default_rng(seed)
    logits_NV = rng.normal(0, 3, (positions, codec.vocabulary_size))
    logp_NV = logits_NV - np.log(np.exp(logits_NV).sum(1, keepdims=True))
    places = places or RecordPositions(np.zeros(positions, np.int64), np.arange(positions))
    if codec.rules.dithered:
        gold_N = np.zeros(positions, np.int64) if gold_N is None else gold_N
        return codec.encode(read_units(codec, logp_NV, gold_N, places), places)
    return codec.encode(make_reading(rng, codec, logp_NV), places)


def make_reading(rng: np.random.Generator, codec: Codec, logp_NV: NDArray[Any]) -> Reading:
    """Make a reading of the distributions ``logp_NV``, of the class of the codec's profile."""
    return _READERS[codec.rules.reading](rng, codec, logp_NV)


def read_units(
    codec: Codec, logp_NV: NDArray[Any], gold_N: NDArray[Any], places: RecordPositions
) -> Reading:
    """Sample distributions as a capture does, with the tables of small caches."""
    import torch  # most readers of small caches need none of it

    from kd.capture.units.drawing import UnitRandomness, UnitSampler

    sampler = UnitSampler(codec, make_tables(codec.vocabulary_size, codec.clusters))
    rows = [places.position_N[places.sequence_N == each] for each in np.unique(places.sequence_N)]
    numbers = np.unique(places.sequence_N).tolist() or [0]
    chance = UnitRandomness.of_each(
        codec, numbers, rows or [np.zeros(0, np.int64)], torch.device("cpu")
    )
    found = sampler.draw_units(
        torch.from_numpy(logp_NV),
        torch.from_numpy(gold_N.astype(np.int64)),
        torch.arange(len(logp_NV)) % codec.clusters,
        UnitRandomness.join(chance),
    )
    return codec.rules.reading(**{name: each.numpy() for name, each in found.items()})


@functools.cache
def make_tables(vocabulary_size: int, clusters: int, width: int = _WIDTH) -> DitherTables:
    """Make the tables of small caches: random priors, and centres of states of ``width``."""
    rng = np.random.default_rng(11)
    priors = rng.exponential(size=(clusters, vocabulary_size)) ** 2
    orders = [rng.permutation(vocabulary_size) for _ in range(clusters)]
    leading = choose_leading(vocabulary_size)
    return DitherTables(
        np.stack([share_slots(prior_V) for prior_V in priors]),
        np.stack([order_V[:leading] for order_V in orders]),
        rng.integers(0, 9, vocabulary_size).astype(np.uint8),
        np.round(rng.normal(size=(clusters, width)) * 4).astype(np.float32),
    )


def _read_units(_: np.random.Generator, codec: Codec, logp_NV: NDArray[Any]) -> Reading:
    count = len(logp_NV)
    places = RecordPositions(np.zeros(count, np.int64), np.arange(count))
    return read_units(codec, logp_NV, np.zeros(count, np.int64), places)


def _read_sample(rng: np.random.Generator, codec: Codec, logp_NV: NDArray[Any]) -> Sample:
    """Take every token above the threshold, and one to four others in each draw, at random."""
    free_NV = np.ones(logp_NV.shape, bool)
    free_NV[:, [0, *codec.always_keep]] = False
    head_NV = free_NV & (np.exp(logp_NV) > codec.threshold)
    tail_count = rng.integers(1, 5, len(logp_NV))
    others = [np.flatnonzero(row) for row in free_NV & ~head_NV]
    picks = [
        np.stack([rng.choice(ids, count, replace=False) for _ in range(codec.draws)], axis=1)
        for ids, count in zip(others, tail_count.tolist(), strict=True)
    ]
    tail_ids = np.concatenate([np.empty((0, codec.draws), np.int64), *picks])
    found = Sample(
        **_read_known(codec, logp_NV),
        head_count=head_NV.sum(1),
        head_ids=np.nonzero(head_NV)[1],
        head_logprobs=logp_NV[head_NV],
        tail_count=tail_count,
        tail_ids=tail_ids,
    )
    if not codec.rules.keeps_partition:
        return found
    rows_M1 = np.repeat(np.arange(len(logp_NV)), tail_count)[:, None]
    partition = rng.normal(-2, 1, (len(logp_NV), 4, 2))  # at four knots
    return replace(found, tail_logprobs=logp_NV[rows_M1, tail_ids], partition=partition)


def _read_top(_: np.random.Generator, codec: Codec, logp_NV: NDArray[Any]) -> TopReading:
    """Take the K most probable tokens."""
    ids = np.argsort(-logp_NV, axis=1)[:, : codec.k]
    logprobs = np.take_along_axis(logp_NV, ids, 1)
    residual = np.log(np.maximum(1 - np.exp(logprobs).sum(1), 1e-12))
    known = _read_known(codec, logp_NV)
    known["known_logprobs"] = known["known_logprobs"][:, :1]
    return TopReading(**known, ids=ids, logprobs=logprobs, residual=residual)


def _read_all(_: np.random.Generator, codec: Codec, logp_NV: NDArray[Any]) -> DenseReading:
    return DenseReading(**_read_known(codec, logp_NV), logprobs=logp_NV)


def _read_states(rng: np.random.Generator, codec: Codec, logp_NV: NDArray[Any]) -> HiddenReading:
    """Make random states, which do not belong to the distributions."""
    states = rng.normal(size=(len(logp_NV), _WIDTH))
    return HiddenReading(**_read_known(codec, logp_NV), states=states)


def _read_known(codec: Codec, logp_NV: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Return what the readings of all profiles have; token 0 stands for the gold token."""
    known = logp_NV[:, [0, *codec.always_keep]]
    return {"known_logprobs": known, "entropy": -(np.exp(logp_NV) * logp_NV).sum(1)}


#: Makes a reading of the distributions (N, V), by the class of the reading.
_READERS: dict[type[Reading], Callable[[np.random.Generator, Codec, NDArray[Any]], Reading]] = {
    Sample: _read_sample,
    UnitSample: _read_units,
    TopReading: _read_top,
    DenseReading: _read_all,
    HiddenReading: _read_states,
}


def make_lm_head(vocabulary_size: int) -> dict[str, NDArray[Any]]:
    """Make a random LM head, for hidden caches."""
    weight = np.random.default_rng(7).normal(size=(vocabulary_size, _WIDTH)).astype(np.float32)
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
    codec = identity.record_codec()
    if not codec.rules.dithered:
        # As the version before makes them, whose caches are compared with these.
        return sequences, make_records(seed, sequences.positions, codec)
    rows, position_N = np.nonzero(sequences.target_mask)
    places = RecordPositions(rows + identity.shard_range(index).start, position_N)
    records = make_records(seed, len(rows), codec, sequences.find_gold_ids(), places)
    return sequences, records


def write_folders(writer: CacheWriter) -> None:
    """Write the folders that the records need: the LM head, or the tables of the dither."""
    vocabulary_size = writer.identity.tokenizer.vocabulary_size
    if writer.codec.rules.needs_lm_head:
        writer.write_lm_head(make_lm_head(vocabulary_size))
    if writer.codec.rules.dithered:
        writer.write_tables(make_tables(vocabulary_size, writer.codec.clusters))


def fill_cache(writer: CacheWriter, provenance: Provenance = PROVENANCE) -> Manifest:
    """Write every missing shard, the folders beside them and the token map, and finish."""
    write_folders(writer)
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
