"""Import the records of another tool as a sealed cache of profile topk.

Untouched exports of a cache are restored instead: ``kd.exchange.restoring``.

    files -> rows -> checked rows -> parts of one sequence each -> shards

Everything is read twice. The first time checks it all and counts sequences, tokens and entries; the
second time writes, with one shard in memory. Rows are not packed: each becomes a sequence, padded
to the longest. A row that is longer than a given length is cut, and each part becomes a sequence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from cache import manifest
from cache.codec import Codec
from cache.json_object import Json
from cache.profiles.topk import TopReading
from cache.records import Records, Sequences
from cache.rounding import RecordPositions
from cache.writing.writer import CacheWriter
from kd.capture.capturing import find_sealed_cache, summarise_cache
from kd.errors import DataError
from kd.exchange import axolotl, distillkit, parquet, prompt_logprobs
from kd.exchange.foreign_files import find_foreign_files, hash_content
from kd.exchange.restoring import Origin, read_origins, restore_cache
from kd.exchange.rows import Alignment, Row, check_row, resize_row
from kd.exchange.sealing import seal_cache
from kd.models import tokenizers
from kd.models.folder import resolve_model
from kd.models.vocabulary import choose_folder_vocabulary
from kd.progress import SILENT, Monitor
from kd.text.corpus import count_held_out
from kd.text.tokens import choose_pad_id

FORMATS = ("distillkit", "vllm", "axolotl", "parquet")
_SUFFIXES = {
    "distillkit": (".parquet", ".arrow"),
    "vllm": (".jsonl", ".json"),
    "axolotl": (".jsonl", ".json", ".parquet", ".arrow"),
    "parquet": (".parquet",),
}
#: The most entries in a shard, unless a single sequence has more.
SHARD_ENTRIES = 1 << 25
#: The most sequences in a shard.
SHARD_SEQUENCES = 256


@dataclass(frozen=True)
class ImportRequest:
    """The files to import, and the options of the import.

    k                     entries of a record to store; default: as many as the longest record has
    sequence_length       longer rows are cut at this length; default: rows are not cut
    validation_fraction   the share of sequences to hold out, unless files named ``validation*``
                          hold them
    config                DistillKit's configuration; default: the one beside the data
    tolerance             the most by which probabilities of a record may sum above 1; default:
                          rounding errors
    ahead                 the alignment of axolotl's items (``kd.exchange.axolotl``)
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

    @property
    def changes_nothing(self) -> bool:
        """True if no option asks for other records or sequences than those in the files."""
        return self.k is None and self.sequence_length is None and not self.validation_fraction


def import_records(request: ImportRequest, root: Path, monitor: Monitor = SILENT) -> Json:
    """Seal a cache with the records of ``request`` below ``root``, unless it is sealed.

    Untouched exports of a cache become the same cache. Returns its summary. Raises ``DataError``
    if a file, row or record is wrong, before it writes anything.
    """
    source = ImportSource.open(request)
    origins = _read_origins(source, monitor)
    stored = bool(origins) and all(origin.shapes is not None for origin in origins)
    if request.format == "parquet" and request.changes_nothing and stored:
        return restore_cache(origins, root, request.teacher_name, monitor)
    for origin in origins[:1]:
        source = replace(source, kept=origin.manifest.identity.codec.always_keep)
    monitor.emit("stage", stage="import", phase="checking")
    survey = ImportStatistics.of(source, monitor)
    identity = _make_identity(source, survey)
    if (found := find_sealed_cache(root / identity.fingerprint, identity)) is not None:
        return summarise_cache(found, reused=True)
    codec = identity.record_codec()

    def encode(row: Row, number: int) -> tuple[Sequences, Records]:
        padded = _pad_row(row, identity.data.sequence_length, source.tokenizer)
        return padded, _encode_row(row, number, codec)

    def finish(writer: CacheWriter) -> None:
        tokenizer = source.tokenizer
        writer.write_token_map(tokenizers.make_token_map(tokenizer, source.vocabulary).to_arrays())
        excerpt = str(tokenizer.decode(survey.excerpt, skip_special_tokens=True))
        provenance = manifest.Provenance(
            teacher_name=request.teacher_name or f"imported from {request.format}",
            probes=tokenizers.encode_probes(tokenizer, (*tokenizers.PROBE_TEXTS, excerpt)),
            special_tokens=tokenizers.get_special_tokens(tokenizer),
        )
        writer.finish(provenance)

    rows = chain(source.read_sequences(source.train), source.read_sequences(source.held_out))
    return seal_cache(root, identity, rows, encode, finish, monitor)


# ---------------------------------------------------------------------- exports of caches


def _read_origins(source: ImportSource, monitor: Monitor) -> list[Origin]:
    """Read the caches that Parquet files were exported from; empty if another program wrote them.

    Raises ``TokenizerMismatch`` if the tokenizer is not that of these caches. Notes rules of it
    that differ.
    """
    files = (*source.train, *source.held_out)
    if not all(path.name.endswith(".parquet") for path in files):
        return []
    origins = read_origins(files)
    for origin in origins[:1]:
        known = origin.manifest.identity.tokenizer
        size = known.vocabulary_size
        probes = origin.manifest.provenance.probes
        expected = tokenizers.KnownTokenizer(
            "the export's", size, probes, known.sha256, origin.token_map
        )
        tokenizers.require_same_tokenizer(
            source.tokenizer, expected, "The given", note=monitor.note
        )
    return origins


# ---------------------------------------------------------------------- reading


@dataclass(frozen=True)
class ImportSource:
    """The files of a request, with the reader of their format; ``vocabulary`` is V.

    ``kept`` are the ids that the cache which the files were exported from keeps in every record.
    """

    request: ImportRequest
    tokenizer: PreTrainedTokenizerBase
    vocabulary: int
    train: tuple[Path, ...]
    held_out: tuple[Path, ...]
    read: Callable[[Path], Iterator[Row]]
    described_by: tuple[Path, ...] = ()
    kept: tuple[int, ...] = ()

    @classmethod
    def open(cls, request: ImportRequest) -> ImportSource:
        """Find the files and load the tokenizer; raises ``DataError`` or ``ModelError``."""
        if request.format not in FORMATS:
            detail = f"There is no format {request.format!r}."
            raise DataError(detail, f"Use one of {', '.join(FORMATS)}.")
        train, held_out = find_foreign_files(request.paths, _SUFFIXES[request.format])
        if held_out and request.validation_fraction:
            found = f"{held_out[0]} holds held-out sequences"
            what = f"{found}, and a validation fraction is given too."
            raise DataError(what, "Leave out one of them.")
        folder = resolve_model(str(request.tokenizer), weights=None)
        tokenizer = tokenizers.load_tokenizer(folder)
        config = request.config or (train + held_out)[0].parent / distillkit.CONFIG
        return cls(
            request=request,
            tokenizer=tokenizer,
            vocabulary=choose_folder_vocabulary(tokenizer, folder),
            train=tuple(train),
            held_out=tuple(held_out),
            read=_choose_reader(request, tokenizer, config),
            described_by=(config,) if request.format == "distillkit" else (),
        )

    def read_sequences(self, files: tuple[Path, ...]) -> Iterator[Row]:
        """Yield the rows of ``files``, checked and cut at the request's length.

        Skip rows without a record.
        """
        remedies = _find_remedies(self.request)
        for row in chain.from_iterable(map(self.read, files)):
            row = replace(row, kept=self.kept)
            sound = check_row(row, self.vocabulary, self.request.tolerance, remedies)
            for part in _cut_row(sound, self.request.sequence_length):
                if len(part.positions):
                    yield part


def _choose_reader(
    request: ImportRequest, tokenizer: PreTrainedTokenizerBase, config: Path
) -> Callable[[Path], Iterator[Row]]:
    match request.format:
        case "distillkit":
            compression = distillkit.Compression.read(config)
            return lambda path: distillkit.read_rows(path, compression)
        case "vllm":
            return prompt_logprobs.read_rows
        case "axolotl":
            return lambda path: axolotl.read_rows(path, tokenizer, request.ahead)
        case _:
            return parquet.read_rows


def _cut_row(row: Row, length: int | None) -> Iterator[Row]:
    """Cut ``row`` into parts of ``length`` tokens.

    The last token of a part has no record: the token that follows it is in the next part.
    """
    length = length or len(row.tokens)
    for first in range(0, len(row.tokens), max(length, 1)):
        stop = min(first + length, len(row.tokens))
        part = row.keep((row.positions >= first) & (row.positions < stop - 1))
        start = row.document_start[first:stop].copy()
        # A part begins a document, so that nothing attends across the cut.
        start[:1] = True
        yield replace(
            part,
            tokens=row.tokens[first:stop],
            document_start=start,
            positions=part.positions - first,
        )


def _find_remedies(request: ImportRequest) -> dict[str, str]:
    """Return what to do about records that are off by one, as ``Alignment.require`` takes it.

    A key is the token that the records of position t turned out to belong to, where t + 1 is right.
    Only records of axolotl come in both forms.
    """
    if request.format != "axolotl":
        return {}
    if request.ahead:
        return {"t": "Import them without --ahead."}
    return {"t + 2": "Import them with --ahead."}


@dataclass
class ImportStatistics:
    """The results of the first reading: counts of sequences, the largest sizes, and a hash of the
    text.
    """

    train: int = 0
    held_out: int = 0
    length: int = 0
    k: int = 0
    packed: bool = False
    excerpt: list[int] = field(default_factory=list)
    sha256: str = ""

    @classmethod
    def of(cls, source: ImportSource, monitor: Monitor) -> ImportStatistics:
        """Read and check all of ``source``.

        Raises ``DataError`` if there is no training sequence.
        """
        survey = cls()
        digest = hashlib.sha256()
        alignment = Alignment()
        remedies = _find_remedies(source.request)
        for files in (source.train, source.held_out):
            for row in source.read_sequences(files):
                survey.train += files is source.train
                survey.held_out += files is not source.train
                survey.length = max(survey.length, len(row.tokens))
                survey.k = max(survey.k, row.ids.shape[1])
                survey.packed = survey.packed or bool(row.document_start[1:].any())
                survey.excerpt = survey.excerpt or row.tokens[:256].tolist()
                alignment.add(row, remedies)
                tokens, positions = (each.astype("<u4") for each in (row.tokens, row.positions))
                # Lengths are hashed too, so that the borders of arrays count.
                for array in (tokens, row.document_start, positions):
                    size = len(array).to_bytes(8, "little")
                    digest.update(size + np.ascontiguousarray(array).tobytes())
                monitor.check("while checking the records")
        survey.sha256 = digest.hexdigest()
        alignment.require(map(str, source.request.paths), remedies)
        moved = count_held_out(survey.train, source.request.validation_fraction)
        survey.train -= moved
        survey.held_out += moved
        if survey.train < 1:
            paths = ", ".join(map(str, source.request.paths))
            detail = f"{paths}: no sequence with a record to train on."
            raise DataError(detail, "Check the path and the format, or hold out fewer.")
        return survey


# ---------------------------------------------------------------------- writing


def _encode_row(row: Row, number: int, codec: Codec) -> Records:
    row = resize_row(row, codec.k)
    assert row.residual is not None
    places = RecordPositions(np.full(len(row.positions), number), row.positions)
    reading = TopReading(
        known_logprobs=row.gold[:, None],
        entropy=np.full(len(row.positions), np.nan) if row.entropy is None else row.entropy,
        ids=row.ids,
        logprobs=row.logprobs,
        residual=row.residual,
    )
    return codec.encode(reading, places)


def _pad_row(row: Row, length: int, tokenizer: PreTrainedTokenizerBase) -> Sequences:
    """Turn ``row`` into one sequence of ``length`` tokens; its padding is a separate document."""
    rest = length - len(row.tokens)
    target = np.zeros(length, bool)
    target[row.positions] = True
    tokens = np.concatenate([row.tokens, np.full(rest, choose_pad_id(tokenizer))]).astype(np.uint32)
    start = np.concatenate([row.document_start, np.arange(rest) == 0])
    return Sequences(tokens[None], start[None], target[None])


def _make_identity(source: ImportSource, survey: ImportStatistics) -> manifest.CacheIdentity:
    length = survey.length
    k = source.request.k or survey.k
    if k > survey.k:
        detail = f"k is {k}, but no record has more than {survey.k} entries."
        raise DataError(detail, "Set a smaller k.")
    # Every shard of a cache has the same number of sequences, chosen to bound the memory.
    per_shard = min(max(SHARD_ENTRIES // (length * k), 1), SHARD_SEQUENCES)
    return manifest.CacheIdentity(
        manifest.TeacherIdentity(
            hash_content((*source.train, *source.held_out, *source.described_by)),
            tokenizers.IMPORTED,
        ),
        manifest.TokenizerIdentity(source.vocabulary, tokenizers.hash_tokenizer(source.tokenizer)),
        manifest.DataIdentity(survey.sha256, length, survey.packed, survey.train, survey.held_out),
        manifest.CodecIdentity("topk", k=k, shard_sequences=per_shard),
    )
