"""The teacher reads every sequence once; what it knows is sealed in a cache, shard by shard.

    tokens -> hidden states -> logits of one chunk -> records -> shard on disk

Shapes: B sequences of a micro-batch, T tokens, N positions of one sequence that have a target, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cache.codec import Codec
from cache.errors import CacheError
from cache.manifest import (
    CacheIdentity,
    DataIdentity,
    FidelityRow,
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
from kd.config.job import JobConfig
from kd.config.teacher import TeacherConfig
from kd.data import Corpus
from kd.errors import ConfigError, Problem
from kd.estimate import codec_identity, hidden_width, require_space
from kd.fidelity import Live, measure, require_fidelity
from kd.nodes import NodesFound, choose_nodes
from kd.precision import float32_products, pick_device
from kd.progress import Meter, Monitor
from kd.recording import Recorder
from kd.remote import RemoteTeacher, remote_sha256

CAPTURE = "another job's capture of the same cache"


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

    lock = root / f"{plan.identity.fingerprint}.lock"
    waiting = partial(monitor.wait_for, CAPTURE, lock, "precompute")
    with float32_products(), open_for_capture(root, plan.identity, waiting) as writer:
        if (found := find_sealed(folder, plan.identity)) is not None:
            return summarise(found, reused=True)
        positions = plan.corpus.train.positions + plan.corpus.validation.positions
        require_space(folder, plan.identity, positions, hidden_width(plan.folder))
        teacher = fill(writer, plan, monitor)
        writer.finish(_provenance(plan), check_fidelity(writer.readable(), plan, teacher, monitor))
    return summarise(open_cache(folder, plan.identity), reused=False)


def find_sealed(folder: Path, identity: CacheIdentity) -> Cache | None:
    """The cache in ``folder`` if every byte of it is as it was sealed; a damaged one will be captured anew."""
    try:
        found = open_cache(folder, identity)
    except CacheError:
        return None
    return None if verify(folder) else found


def check_fidelity(store: Cache, plan: Plan, teacher: Reader | None, monitor: Monitor) -> tuple[FidelityRow, ...]:
    """Compare a few records with the teacher before the manifest completes them; a remote one cannot be asked.

    Raises ``FidelityError`` where they differ: the shards stay, the cache is not sealed.
    """
    if plan.teacher.backend != "local":
        return ()
    monitor.emit("stage", stage="precompute", phase="checking fidelity")
    if isinstance(teacher, Teacher):
        live = Live(teacher.model, teacher.recorder.head)
    else:
        live = Live.load(plan.identity, plan.teacher, plan.folder)
    began = time.monotonic()
    rows = measure(store, live)
    require_fidelity(store, rows)
    monitor.emit("stage", stage="precompute", phase=f"fidelity checked in {time.monotonic() - began:.1f} s")
    return rows


def fill(writer: CacheWriter, plan: Plan, monitor: Monitor) -> Reader | None:
    """Capture every shard that is not sealed yet; returns who read them, None where nothing was missing."""
    missing = writer.missing_shards()
    sizes = [len(plan.identity.shard_range(index)) for index in range(plan.identity.shard_count)]
    meter = Meter(sum(sizes), "sequences", done=sum(sizes) - sum(sizes[index] for index in missing))
    if not missing:
        return None
    monitor.emit("stage", stage="precompute", phase="loading the teacher")
    with open_reader(plan, writer, monitor) as teacher:
        monitor.emit("stage", stage="precompute", phase="capturing")
        for index in missing:
            sequences = shard_sequences(plan, index)
            parts, left = [], len(sequences)
            for count, records in teacher.read(sequences, plan.identity.shard_range(index).start):
                parts.append(records)
                left -= count
                monitor.emit("progress", **meter.advance(count, len(records)))
                monitor.alive()
                if left:
                    monitor.check(f"in shard {index + 1} of {len(sizes)}")
            monitor.alive(stepping=False)
            began = time.monotonic()
            written = writer.write_shard(index, sequences, Records.concatenate(parts))
            monitor.emit("shard", bytes=written, seconds=time.monotonic() - began)
            if index != missing[-1]:
                monitor.check(f"after shard {index + 1} of {len(sizes)}")
        return teacher


class Reader(Protocol):
    """Whatever reads sequences and knows what the teacher says of them."""

    def read(self, sequences: Sequences, first: int) -> Iterator[tuple[int, Records]]:
        """Yield (sequences read, their records) per micro-batch; ``first`` is the number of the first sequence."""
        ...


@contextmanager
def open_reader(plan: Plan, writer: CacheWriter, monitor: Monitor) -> Iterator[Reader]:
    """The teacher of ``plan``, ready to read: here, or on its server."""
    if plan.teacher.backend == "local":
        yield load_teacher(plan, writer, monitor)
        return
    with RemoteTeacher.connect(plan.teacher, plan.identity.record_codec(), monitor) as teacher:
        length = plan.config.data.sequence_length
        teacher.require_same_tokenizer(models.probe(plan.tokenizer, models.PROBES), length)
        yield teacher


def load_teacher(plan: Plan, writer: CacheWriter, monitor: Monitor) -> Teacher:
    """The teacher of ``plan``; a hidden cache is given its head here, a tempered one the number of its nodes."""
    teacher = Teacher.load(plan)
    if plan.identity.codec.profile == "hidden":
        writer.write_head(teacher.recorder.head_arrays())
    if plan.identity.codec.profile != "tempered":
        return teacher
    if (sealed := writer.sealed_shape("partition")) is not None:  # one cache has one number of nodes
        return replace(teacher, recorder=replace(teacher.recorder, nodes=sealed[1]))
    found = teacher.choose_nodes(plan.corpus.train)
    monitor.emit("stage", stage="precompute", phase=str(found))
    return replace(teacher, recorder=replace(teacher.recorder, nodes=found.count))


@dataclass(frozen=True)
class Teacher:
    """A loaded teacher, and what to keep of it."""

    model: PreTrainedModel
    recorder: Recorder
    batch_size: int

    @classmethod
    def load(cls, plan: Plan) -> Teacher:
        """Load the model of ``plan`` and check that its head and its attention are what we think they are."""
        model = models.load_teacher(plan.teacher, plan.folder, pick_device())
        models.require_context(model, plan.config.data.sequence_length)
        head = models.head_of(model, plan.identity.tokenizer.vocabulary_size)
        if plan.config.data.packing:
            models.require_document_isolation(model)
        return cls(model, Recorder(head, plan.identity.record_codec()), plan.teacher.batch_size)

    @torch.no_grad()
    def read(self, sequences: Sequences, first: int) -> Iterator[tuple[int, Records]]:
        """Yield (sequences read, their records) per micro-batch; ``first`` is the number of the first sequence."""
        for start in range(0, len(sequences), self.batch_size):
            part = sequences.select(slice(start, start + self.batch_size))
            records = [
                self.recorder.records(hidden_ND, gold_N, first + start + row, positions_N)
                for row, (hidden_ND, gold_N, positions_N) in enumerate(self.rows(part))
            ]
            yield len(part), Records.concatenate(records)

    @torch.no_grad()
    def choose_nodes(self, sequences: Sequences) -> NodesFound:
        """How many nodes a tempered cache of this teacher needs, measured on the first sequence that has targets."""
        first = int(np.argmax(sequences.target_mask.any(axis=1)))
        hidden_ND, gold_N, _ = next(self.rows(sequences.select(slice(first, first + 1))))
        return choose_nodes(hidden_ND, gold_N, self.recorder.head, self.recorder.codec)

    def rows(self, sequences: Sequences) -> Iterator[tuple[Tensor, Tensor, np.ndarray]]:
        """Of each sequence the hidden states (N, D), next tokens and places of its targets; one forward pass."""
        batch = make_batch(sequences, None).to(self.model.device)
        hidden_BTD = models.hidden_states(self.model, batch.tokens_BT, batch.positions_BT)
        for row, (tokens_T, mask_T) in enumerate(zip(sequences.tokens, sequences.target_mask, strict=True)):
            positions_N = np.flatnonzero(mask_T)
            gold_N = torch.from_numpy(tokens_T[positions_N + 1].astype(np.int64)).to(hidden_BTD.device)
            yield hidden_BTD[row, torch.from_numpy(positions_N).to(hidden_BTD.device)], gold_N, positions_N


def shard_sequences(plan: Plan, index: int) -> Sequences:
    """The sequences of a shard; training ones come first, so one shard may hold both kinds."""
    numbers = np.asarray(plan.identity.shard_range(index))
    train = plan.corpus.train
    parts = [train.select(numbers[numbers < len(train)])]
    parts += [plan.corpus.validation.select(numbers[numbers >= len(train)] - len(train))]
    return Sequences.concatenate(part for part in parts if len(part))


# ---------------------------------------------------------------------- what a cache is made of


def make_plan(config: JobConfig, tokenizer: PreTrainedTokenizerBase, corpus: Corpus, folder: Path) -> Plan:
    """The identity of the cache that ``config`` asks for, and all that is needed to capture it."""
    identity = CacheIdentity(
        _teacher_identity(config, folder),
        TokenizerIdentity(models.vocabulary_size(tokenizer), models.tokenizer_sha256(tokenizer)),
        DataIdentity(
            sha256=corpus.sha256(),
            sequence_length=config.data.sequence_length,
            packing=config.data.packing,
            train_sequences=len(corpus.train),
            validation_sequences=len(corpus.validation),
        ),
        codec_identity(config.cache),
    )
    _require_vocabulary(identity)
    return Plan(config, folder, tokenizer, corpus, identity)


def _teacher_identity(config: JobConfig, folder: Path) -> TeacherIdentity:
    """The weights and their precision; of a server's, which cannot be seen, its address and the model's name."""
    assert config.teacher is not None
    if config.teacher.backend == "http":
        return TeacherIdentity(remote_sha256(config.teacher), "remote")
    dtype = models.teacher_dtype(config.teacher, folder, pick_device())
    return TeacherIdentity(models.fingerprint(folder, config.teacher.gguf_file), str(dtype).removeprefix("torch."))


def _require_vocabulary(identity: CacheIdentity) -> None:
    """Raise ``ConfigError`` where the job asks for tokens that the tokenizer does not have."""
    size, codec = identity.tokenizer.vocabulary_size, identity.codec
    too_large = [token for token in codec.always_keep if token >= size]
    if too_large or codec.k > size:
        field, got = ("always_keep", too_large[0]) if too_large else ("k", codec.k)
        detail = f"{got} is more than the tokenizer has: its vocabulary is {size} tokens."
        raise ConfigError([Problem(f"/cache/{field}", detail, "Ids run from 0; ask the tokenizer for them.")])


def _provenance(plan: Plan) -> Provenance:
    tokenizer = plan.tokenizer
    excerpt = str(tokenizer.decode(plan.corpus.train.tokens[0][:256].tolist(), skip_special_tokens=True))
    special = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id}
    return Provenance(
        teacher_name="/".join([plan.teacher.model, *filter(None, [plan.teacher.gguf_file])]),
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
    def identity(self) -> str:
        """A name for the content."""
        return self.store.identity.fingerprint

    @property
    def codec(self) -> Codec:
        """What the records' columns mean."""
        return self.store.codec

    def teacher_head(self) -> dict[str, NDArray[Any]]:
        """The teacher's LM head, of a hidden cache."""
        return self.store.teacher_head()

    def read(self, indices: np.ndarray, draws: int | np.ndarray = 0) -> tuple[Sequences, Records]:
        """The sequences of ``indices`` and their records, in that order; ``draws`` picks among their tail samples."""
        return self.store.read(indices, draws)
