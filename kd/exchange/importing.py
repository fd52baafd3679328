"""Somebody else's records -> a sealed cache of profile topk.

    files -> rows -> checked rows -> pieces of one sequence each -> shards

Everything is read twice: once to check all of it, and to know how many sequences there are, how long and with how many
entries; then to write, holding one shard at a time. Rows are not packed: each becomes a sequence, padded to the
longest, or is cut at a given length and goes on as a sequence of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from cache.codec import Codec, Places
from cache.manifest import CacheIdentity, CodecIdentity, DataIdentity, Provenance, TeacherIdentity, TokenizerIdentity
from cache.records import Records, Sequences
from cache.store import CacheWriter, capture, open_cache
from kd import models
from kd.errors import DataError
from kd.exchange import axolotl, distillkit, parquet, prompt_logprobs
from kd.exchange.files import content_sha256, find
from kd.exchange.rows import Alignment, Row, checked, resized
from kd.progress import SILENT, Meter, Monitor
from kd.teacher import find_sealed, summarise

FORMATS = ("distillkit", "vllm", "axolotl", "parquet")
_SUFFIXES = {
    "distillkit": (".parquet",),
    "vllm": (".jsonl", ".json"),
    "axolotl": (".jsonl", ".json", ".parquet"),
    "parquet": (".parquet",),
}
#: Entries of a shard at most (one sequence at least), and sequences.
SHARD_ENTRIES, SHARD_SEQUENCES = 1 << 25, 256


@dataclass(frozen=True)
class Request:
    """What to import, and how.

    ``k`` entries are kept of a record (default: as many as the longest has), ``sequence_length`` cuts longer rows
    (default: nothing is cut), ``validation_fraction`` of the sequences is held out unless files called ``validation*``
    hold them. ``config`` is DistillKit's, by default beside the data. ``tolerance`` is how far the probabilities of a
    record may sum above 1, by default what rounding explains; ``ahead`` is for axolotl (see there).
    """

    format: str
    paths: tuple[Path, ...]
    tokenizer: str | Path
    k: int | None = None
    sequence_length: int | None = None
    validation_fraction: float = 0.0
    config: Path | None = None
    teacher_name: str = ""
    tolerance: float | None = None
    ahead: bool = False


def import_records(request: Request, root: Path, monitor: Monitor = SILENT) -> dict[str, Any]:
    """Seal a cache with the records of ``request`` below ``root``, or find it sealed; returns its summary.

    Raises ``DataError`` before anything is written where a file, row or record is wrong.
    """
    source = Source.open(request)
    monitor.emit("stage", stage="import", phase="checking")
    survey = Survey.of(source, monitor)
    identity = _identity(source, survey)
    if (found := find_sealed(root / identity.fingerprint, identity)) is not None:
        return summarise(found, reused=True)
    monitor.emit("stage", stage="import", phase="writing")
    with capture(root, identity, lambda: monitor.check("while the same records are imported")) as writer:
        _write(writer, source, monitor)
        writer.finish(_provenance(source, survey))
    return summarise(open_cache(root / identity.fingerprint, identity), reused=False)


# ---------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Source:
    """The files of a request, and how one of them is read; V = ``vocabulary``."""

    request: Request
    tokenizer: PreTrainedTokenizerBase
    vocabulary: int
    train: tuple[Path, ...]
    held_out: tuple[Path, ...]
    read: Callable[[Path], Iterator[Row]]
    described_by: tuple[Path, ...] = ()

    @classmethod
    def open(cls, request: Request) -> Source:
        """Find the files and load the tokenizer."""
        if request.format not in FORMATS:
            raise DataError(f"There is no format {request.format!r}.", f"Use one of {', '.join(FORMATS)}.")
        train, held_out = find(request.paths, _SUFFIXES[request.format])
        if held_out and request.validation_fraction:
            detail = f"{held_out[0]} holds held-out sequences, and a validation fraction is given too."
            raise DataError(detail, "Leave out one of them.")
        tokenizer = models.load_tokenizer(models.resolve(str(request.tokenizer), weights=None))
        config = request.config or (train + held_out)[0].parent / distillkit.CONFIG
        described_by = (config,) if request.format == "distillkit" else ()
        return cls(
            request=request,
            tokenizer=tokenizer,
            vocabulary=models.vocabulary_size(tokenizer),
            train=tuple(train),
            held_out=tuple(held_out),
            read=_reader(request, tokenizer, config),
            described_by=described_by,
        )

    def sequences(self, files: tuple[Path, ...]) -> Iterator[Row]:
        """Every row of ``files``, checked and cut to the request's length; those without a record are left out."""
        for row in chain.from_iterable(map(self.read, files)):
            sound = checked(row, self.vocabulary, self.request.tolerance)
            yield from (piece for piece in _pieces(sound, self.request.sequence_length) if len(piece.positions))


def _reader(request: Request, tokenizer: PreTrainedTokenizerBase, config: Path) -> Callable[[Path], Iterator[Row]]:
    match request.format:
        case "distillkit":
            compression = distillkit.Compression.read(config)
            return lambda path: distillkit.rows(path, compression)
        case "vllm":
            return prompt_logprobs.rows
        case "axolotl":
            return lambda path: axolotl.rows(path, tokenizer, request.ahead)
        case _:
            return parquet.rows


def _pieces(row: Row, length: int | None) -> Iterator[Row]:
    """``row`` cut at ``length`` tokens; what follows a piece's last token lies in the next, so that has no record."""
    length = length or len(row.tokens)
    for first in range(0, len(row.tokens), max(length, 1)):
        stop = min(first + length, len(row.tokens))
        part = row.keep((row.positions >= first) & (row.positions < stop - 1))
        start = row.document_start[first:stop].copy()
        start[:1] = True
        yield replace(part, tokens=row.tokens[first:stop], document_start=start, positions=part.positions - first)


@dataclass
class Survey:
    """What a first reading finds: numbers of sequences, the longest, the most entries, and a hash of the text."""

    train: int = 0
    held_out: int = 0
    length: int = 0
    k: int = 0
    packed: bool = False
    excerpt: list[int] = field(default_factory=list)
    sha256: str = ""

    @classmethod
    def of(cls, source: Source, monitor: Monitor) -> Survey:
        """Read and check everything that ``source`` holds; raises ``DataError`` where there is nothing to train on."""
        survey, digest, alignment = cls(), hashlib.sha256(), Alignment()
        for files in (source.train, source.held_out):
            for row in source.sequences(files):
                survey._add(row, files is source.train)
                alignment.add(row)
                for array in (row.tokens.astype("<u4"), row.document_start, row.positions.astype("<u4")):
                    digest.update(len(array).to_bytes(8, "little") + np.ascontiguousarray(array).tobytes())
                monitor.check("while checking the records")
        survey.sha256 = digest.hexdigest()
        alignment.require(map(str, source.request.paths))
        survey._hold_out(source.request)
        return survey

    def _add(self, row: Row, to_train_on: bool) -> None:
        self.train, self.held_out = self.train + to_train_on, self.held_out + (not to_train_on)
        self.length, self.k = max(self.length, len(row.tokens)), max(self.k, row.ids.shape[1])
        self.packed = self.packed or bool(row.document_start[1:].any())
        self.excerpt = self.excerpt or row.tokens[:256].tolist()

    def _hold_out(self, request: Request) -> None:
        count = max(1, round(self.train * request.validation_fraction)) if request.validation_fraction > 0 else 0
        self.train, self.held_out = self.train - count, self.held_out + count
        if self.train < 1:
            detail = f"{', '.join(map(str, request.paths))}: no sequence with a record to train on."
            raise DataError(detail, "Check the path and the format, or hold out fewer.")


# ---------------------------------------------------------------------- writing


def _write(writer: CacheWriter, source: Source, monitor: Monitor) -> None:
    """Write the shards that are missing, one after the other."""
    identity, missing = writer.identity, set(writer.missing_shards())
    meter = Meter(identity.data.sequences, "sequences")
    rows = chain(source.sequences(source.train), source.sequences(source.held_out))
    for index, numbered in groupby(enumerate(rows), lambda pair: pair[0] // identity.codec.shard_sequences):
        if index in missing:
            pairs = [
                (_padded(row, identity.data.sequence_length, source.tokenizer), _encoded(row, number, writer.codec))
                for number, row in numbered
            ]
            sequences, records = Sequences.concatenate(one for one, _ in pairs), [each for _, each in pairs]
            writer.write_shard(index, sequences, Records.concatenate(records))
        monitor.emit("progress", **meter.advance(len(identity.shard_range(index)), 0))
        monitor.check(f"after shard {index + 1} of {identity.shard_count}")


def _encoded(row: Row, number: int, codec: Codec) -> Records:
    row = resized(row, codec.k)
    assert row.residual is not None
    places = Places(np.full(len(row.positions), number), row.positions)
    entropy = np.full(len(row.positions), np.nan) if row.entropy is None else row.entropy
    return codec.encode_top(row.gold[:, None], entropy, (row.ids, row.logprobs), row.residual, places)


def _padded(row: Row, length: int, tokenizer: PreTrainedTokenizerBase) -> Sequences:
    """The one sequence of ``row``; padding is a document of its own."""
    rest = length - len(row.tokens)
    target = np.zeros(length, bool)
    target[row.positions] = True
    padding = next((each for each in (tokenizer.pad_token_id, tokenizer.eos_token_id) if each is not None), 0)
    tokens = np.concatenate([row.tokens, np.full(rest, padding)]).astype(np.uint32)
    start = np.concatenate([row.document_start, np.arange(rest) == 0])
    return Sequences(tokens[None], start[None], target[None])


def _identity(source: Source, survey: Survey) -> CacheIdentity:
    request, tokenizer = source.request, source.tokenizer
    length, k = survey.length, request.k or survey.k
    if k > survey.k:
        raise DataError(f"{k} entries are asked for, but no record has more than {survey.k}.", "Ask for fewer.")
    per_shard = min(max(SHARD_ENTRIES // (length * k), 1), SHARD_SEQUENCES)
    return CacheIdentity(
        TeacherIdentity(content_sha256((*source.train, *source.held_out, *source.described_by)), "imported"),
        TokenizerIdentity(source.vocabulary, models.tokenizer_sha256(tokenizer)),
        DataIdentity(survey.sha256, length, survey.packed, survey.train, survey.held_out),
        CodecIdentity("topk", k=k, shard_sequences=per_shard),
    )


def _provenance(source: Source, survey: Survey) -> Provenance:
    tokenizer, request = source.tokenizer, source.request
    special = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id}
    excerpt = str(tokenizer.decode(survey.excerpt, skip_special_tokens=True))
    return Provenance(
        teacher_name=request.teacher_name or f"imported from {request.format}",
        probes=models.probe(tokenizer, (*models.PROBES, excerpt)),
        special_tokens={name: int(value) for name, value in special.items() if value is not None},
    )
