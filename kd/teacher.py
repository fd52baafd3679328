"""The teacher reads every sequence once; what it knows is sealed in a cache, shard by shard.

    tokens -> hidden states -> logits of one chunk -> records -> shard on disk

Shapes: B sequences of a micro-batch, T tokens, N positions of one sequence that have a target, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cache.errors import CacheError
from cache.manifest import (
    CacheIdentity,
    CodecIdentity,
    DataIdentity,
    Manifest,
    Provenance,
    TeacherIdentity,
    TokenizerIdentity,
)
from cache.records import Records, Sequences
from cache.store import Cache, CacheWriter, open_cache, verify
from cache.store import capture as open_for_capture
from kd import models
from kd.batches import make_batch
from kd.config import JobConfig, TeacherConfig
from kd.data import Corpus
from kd.models import Head
from kd.precision import pick_device
from kd.progress import Meter, Monitor
from kd.sampling import draws, sample_records

WAITING_SECONDS = 30.0

# Logits held at once, and how many of them are sampled at once. The head's matrix product wants many rows; sampling
# passes over them several times, which on a CPU should happen in its cache. Both are cut within a sequence, so that a
# record does not depend on what else is in the micro-batch.
LOGIT_ELEMENTS = {"cpu": 2**24, "cuda": 2**26}
SAMPLE_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}


@dataclass(frozen=True)
class Plan:
    """What a capture will read, known before the teacher is loaded."""

    config: JobConfig
    folder: Path
    tokenizer: PreTrainedTokenizerBase
    corpus: Corpus
    identity: CacheIdentity

    @property
    def teacher(self) -> TeacherConfig:
        """The job's teacher, which a job with a capture always has."""
        assert self.config.teacher is not None
        return self.config.teacher


def capture(plan: Plan, root: Path, monitor: Monitor) -> dict[str, Any]:
    """Seal the cache of ``plan`` below ``root``, or find it sealed; returns its summary.

    Sealed shards of an earlier attempt are kept. Two captures of one cache run one after the other, and the second
    finds the work done.
    """
    folder = root / plan.identity.fingerprint
    if (found := find_sealed(folder, plan.identity)) is not None:
        return summarise(found, reused=True)

    with open_for_capture(root, plan.identity, _Waiting(monitor)) as writer:
        if (found := find_sealed(folder, plan.identity)) is not None:
            return summarise(found, reused=True)
        fill(writer, plan, monitor)
        writer.finish(_provenance(plan))
    return summarise(open_cache(folder, plan.identity), reused=False)


class _Waiting:
    """Called while another job captures the same cache: says so now and then, for silence is taken for a hang."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor, self._said = monitor, -math.inf

    def __call__(self) -> None:
        if time.monotonic() - self._said > WAITING_SECONDS:
            self._said = time.monotonic()
            self._monitor.emit("stage", stage="precompute", phase="waiting for another job's capture of the same cache")
        self._monitor.check("while another job captures the same cache")


def find_sealed(folder: Path, identity: CacheIdentity) -> Cache | None:
    """The cache in ``folder`` if every byte of it is as it was sealed; a damaged one will be captured anew."""
    try:
        found = open_cache(folder, identity)
    except CacheError:
        return None
    return None if verify(folder) else found


def fill(writer: CacheWriter, plan: Plan, monitor: Monitor) -> None:
    """Capture every shard that is not sealed yet."""
    missing = writer.missing_shards()
    sizes = [len(plan.identity.shard_range(index)) for index in range(plan.identity.shard_count)]
    meter = Meter(sum(sizes), "sequences", done=sum(sizes) - sum(sizes[index] for index in missing))
    if not missing:
        return
    monitor.emit("stage", stage="precompute", phase="loading the teacher")
    teacher = Teacher.load(plan)
    monitor.emit("stage", stage="precompute", phase="capturing")
    for index in missing:
        sequences = _sequences(plan, index)
        parts, left = [], len(sequences)
        for count, records in teacher.read(sequences, plan.identity.shard_range(index).start):
            parts.append(records)
            left -= count
            monitor.emit("progress", **meter.advance(count, len(records)))
            if left:
                monitor.check(f"in shard {index + 1} of {len(sizes)}")
        writer.write_shard(index, sequences, Records.concatenate(parts))
        if index != missing[-1]:
            monitor.check(f"after shard {index + 1} of {len(sizes)}")


@dataclass(frozen=True)
class Teacher:
    """A loaded teacher and how to read records off it."""

    model: PreTrainedModel
    head: Head
    batch_size: int
    threshold: float
    seed: int

    @classmethod
    def load(cls, plan: Plan) -> Teacher:
        """Load the model of ``plan`` and check that its head and its attention are what we think they are."""
        model = models.load_teacher(plan.teacher, plan.folder, pick_device())
        models.require_context(model, plan.config.data.sequence_length)
        head = models.head_of(model, plan.identity.tokenizer.vocabulary_size)
        if plan.config.data.packing:
            models.require_document_isolation(model)
        codec = plan.identity.codec
        return cls(model, head, plan.teacher.batch_size, codec.threshold, codec.seed)

    @torch.no_grad()
    def read(self, sequences: Sequences, first: int) -> Iterator[tuple[int, Records]]:
        """Yield (sequences read, their records) per micro-batch; ``first`` is the number of the first sequence."""
        for start in range(0, len(sequences), self.batch_size):
            part = sequences.select(slice(start, start + self.batch_size))
            batch = make_batch(part, None).to(self.model.device)
            hidden_BTD = models.hidden_states(self.model, batch.tokens_BT, batch.positions_BT)
            records = [
                self._read_sequence(hidden_BTD[row], part.tokens[row], part.target_mask[row], first + start + row)
                for row in range(len(part))
            ]
            yield len(part), Records.concatenate(records)

    def _read_sequence(self, hidden_TD: Tensor, tokens_T: np.ndarray, mask_T: np.ndarray, number: int) -> Records:
        """The records of one sequence; its logits exist one chunk at a time."""
        device, vocabulary = hidden_TD.device, self.head.vocabulary
        positions_N = np.flatnonzero(mask_T)
        uniform_N, order_V = map(torch.from_numpy, draws(self.seed, number, positions_N, vocabulary))
        gold_N = torch.from_numpy(tokens_T[positions_N + 1].astype(np.int64))
        uniform_N, order_V, gold_N = uniform_N.to(device), order_V.to(device), gold_N.to(device)
        hidden_ND = hidden_TD[torch.from_numpy(positions_N).to(device)]
        parts = []
        for outer in _runs(0, len(positions_N), LOGIT_ELEMENTS[device.type] // vocabulary):
            logits_NV = self.head.logits(hidden_ND[outer])
            for rows in _runs(outer.start, outer.stop, SAMPLE_ELEMENTS[device.type] // vocabulary):
                inner = slice(rows.start - outer.start, rows.stop - outer.start)
                parts.append(sample_records(logits_NV[inner], gold_N[rows], uniform_N[rows], order_V, self.threshold))
        return Records.concatenate(parts)


def _runs(start: int, stop: int, size: int) -> list[slice]:
    """``range(start, stop)`` cut into slices of ``size``; one empty slice where there is nothing."""
    size = max(size, 1)
    return [slice(first, min(first + size, stop)) for first in range(start, max(stop, start + 1), size)]


def _sequences(plan: Plan, index: int) -> Sequences:
    """The sequences of a shard; training ones come first, so one shard may hold both kinds."""
    numbers = np.asarray(plan.identity.shard_range(index))
    train = plan.corpus.train
    parts = [train.select(numbers[numbers < len(train)])]
    parts += [plan.corpus.validation.select(numbers[numbers >= len(train)] - len(train))]
    return Sequences.concatenate(part for part in parts if len(part))


# ---------------------------------------------------------------------- what a cache is made of


def make_plan(config: JobConfig, tokenizer: PreTrainedTokenizerBase, corpus: Corpus, folder: Path) -> Plan:
    """The identity of the cache that ``config`` asks for, and all that is needed to capture it."""
    assert config.teacher is not None
    dtype = models.teacher_dtype(config.teacher, folder, pick_device())
    options = config.cache
    identity = CacheIdentity(
        TeacherIdentity(models.fingerprint(folder, config.teacher.gguf_file), str(dtype).removeprefix("torch.")),
        TokenizerIdentity(models.vocabulary_size(tokenizer), models.tokenizer_sha256(tokenizer)),
        DataIdentity(
            sha256=corpus.sha256(),
            sequence_length=config.data.sequence_length,
            packing=config.data.packing,
            train_sequences=len(corpus.train),
            validation_sequences=len(corpus.validation),
        ),
        CodecIdentity(options.profile, options.threshold, options.seed, options.shard_sequences),
    )
    return Plan(config, folder, tokenizer, corpus, identity)


def _provenance(plan: Plan) -> Provenance:
    tokenizer = plan.tokenizer
    excerpt = str(tokenizer.decode(plan.corpus.train.tokens[0][:256].tolist(), skip_special_tokens=True))
    special = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id}
    return Provenance(
        teacher_name=plan.teacher.model,
        teacher_revision=plan.teacher.revision or "",
        probes=models.probe(tokenizer, (*models.PROBES, excerpt)),
        special_tokens={name: int(value) for name, value in special.items() if value is not None},
    )


def summarise(store: Cache, reused: bool) -> dict[str, Any]:
    """What an event and a report say of a cache."""
    manifest: Manifest = store.manifest
    return {
        "fingerprint": manifest.identity.fingerprint,
        "bytes_per_token": round(store.bytes_per_token, 3),
        "entries_per_token": round(manifest.entries / max(manifest.positions, 1), 3),
        "tokens": manifest.positions,
        "reused": reused,
    }


@dataclass(frozen=True)
class CachedRecords:
    """A sealed cache as a source of training batches."""

    store: Cache

    @property
    def train_count(self) -> int:
        """Sequences to train on; their indices come first."""
        return len(self.store.train)

    @property
    def validation_count(self) -> int:
        """Sequences held out."""
        return len(self.store.validation)

    @property
    def has_records(self) -> bool:
        """Whether the teacher's records come with them."""
        return True

    @property
    def identity(self) -> str:
        """A name for the content."""
        return self.store.identity.fingerprint

    def read(self, indices: np.ndarray) -> tuple[Sequences, Records]:
        """The sequences of ``indices`` and their records, in that order."""
        return self.store.read(indices)
