"""Estimate the sequences and positions of a job's text from the beginnings of some of its files."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from cache.errors import PotstillError
from cache.profiles.sampled import MEASURED_VOCABULARY
from kd.addresses import ModelSource, find_packing, find_suffix
from kd.config.job import JobConfig
from kd.errors import ConfigError, DataError, ModelError, Problem
from kd.models.folder import find_source
from kd.text import text_files
from kd.text.chat.chat import Chat, Completion
from kd.text.corpus import count_held_out, count_kept_held_out, describe_held_out
from kd.text.mixtures import name_source
from kd.text.reading.contents import unpack
from kd.text.rows import COLUMNS, Row, read_cell

#: Bytes of English text per token; used where the tokenizer is not on this machine.
BYTES_PER_TOKEN = 4.0
#: Bytes of text that an estimate reads, over all files together.
SAMPLE_BYTES = 1 << 19
#: The most files that an estimate reads.
SAMPLE_FILES = 16
#: The size of the text in a compressed Parquet file, as a multiple of the size of the file.
PARQUET_EXPANSION = 2.5


@dataclass(frozen=True)
class CaptureSize:
    """The sequences and positions of a capture.

    ``counted`` is true if all text was counted, and false if a sample was. ``held_out`` says which
    sequences are held out, and why.
    """

    train_sequences: int
    validation_sequences: int
    sequence_length: int
    positions: int
    counted: bool
    held_out: str = ""

    @property
    def sequences(self) -> int:
        """The number of sequences in both splits."""
        return self.train_sequences + self.validation_sequences

    @property
    def targets(self) -> float:
        """The mean positions of a sequence."""
        return self.positions / max(self.sequences, 1)


@dataclass(frozen=True)
class TokenCounter:
    """Counts the tokens of a text, with the tokenizer ``inner`` or by ``BYTES_PER_TOKEN``.

    ``size`` is V, the size of the vocabulary.
    """

    size: int
    inner: Any = None

    @classmethod
    def find(cls, source: ModelSource, root: Path) -> TokenCounter:
        """Return a counter with the teacher's tokenizer, if its file is on this machine."""
        folder = find_source(source, root)
        if folder is None or folder.tokenizer_file is None:
            with _blame_teacher():
                size = None if folder is None else folder.vocabulary_size
            return cls(size or MEASURED_VOCABULARY)
        from tokenizers import Tokenizer

        try:
            inner = Tokenizer.from_file(str(folder.tokenizer_file))
        except Exception as error:  # the library has no class of its own for this
            detail = f"its tokenizer.json cannot be read: {error}."
            raise ConfigError.of_field("/teacher/model", detail, "Save the model again.") from None
        return cls(max(inner.get_vocab(with_added_tokens=True).values()) + 1, inner)

    def count(self, text: str) -> int:
        """Return the number of tokens in ``text``."""
        if self.inner is None:
            return math.ceil(len(text.encode()) / BYTES_PER_TOKEN)
        return len(self.inner.encode(text, add_special_tokens=False).ids)


def require_width(source: ModelSource, root: Path) -> int:
    """Return D of the teacher; raises ``ConfigError`` where its config.json is not here."""
    folder = find_source(source, root)
    with _blame_teacher():
        width = None if folder is None else folder.hidden_width
    if width:
        return width
    detail = "the width of its hidden states is not known without its config.json."
    raise ConfigError([Problem("/teacher/model", detail, "Estimate without --fast.")])


@contextmanager
def _blame_teacher() -> Iterator[None]:
    """Turn a ``ModelError`` into a problem of the job's field teacher.model."""
    try:
        yield
    except ModelError as error:
        raise ConfigError([Problem("/teacher/model", error.detail, error.remedy)]) from None


@dataclass(frozen=True)
class _TextSize:
    """The tokens of a text, those that are learned, its documents, and sequences without packing.

    Numbers are fractional, because a sample is scaled up to the whole text.
    """

    tokens: float = 0.0
    learned: float = 0.0
    documents: float = 0.0
    unpacked: float = 0.0

    def __add__(self, other: _TextSize) -> _TextSize:
        return _TextSize(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    def scale(self, factor: float) -> _TextSize:
        return _TextSize(*(each * factor for each in astuple(self)))


def estimate_capture_size(config: JobConfig, root: Path, tokenizer: TokenCounter) -> CaptureSize:
    """Estimate the sequences and positions of both splits of a job's text."""
    data = config.data
    sampler = _TextSampler(config, root, tokenizer)
    train = sampler.estimate("train")
    held_out = sampler.estimate("validation") if data.validation else train
    count, count_held = (
        max(math.ceil(each.tokens / data.sequence_length if data.packing else each.unpacked), 1)
        for each in (train, held_out)
    )
    held = count_held if data.validation else count_held_out(count, data.held_out_fraction)
    kept = min(count if data.validation else count - held, data.max_train_samples or count)
    kept_held = count_kept_held_out(held, kept, data)
    positions = _count_positions(train, count) * kept
    positions += _count_positions(held_out, count_held) * kept_held
    return CaptureSize(
        kept,
        kept_held,
        data.sequence_length,
        math.ceil(positions),
        counted=False,
        held_out=describe_held_out(kept_held, kept, data),
    )


def _count_positions(text: _TextSize, sequences: int) -> float:
    """Return the targets per sequence.

    Every learned token is one, except the first of each document and of each sequence.
    """
    share = text.learned / max(text.tokens, 1.0)
    return max((text.tokens - text.documents - sequences) * share / sequences, 0.0)


@dataclass(frozen=True)
class _TextSampler:
    """Estimates the size of a text from the beginnings of some of its files."""

    config: JobConfig
    root: Path
    tokenizer: TokenCounter

    def estimate(self, field: str) -> _TextSize:
        """Estimate the size of ``data.train`` or ``data.validation``."""
        sources = getattr(self.config.data, field)
        for number, source in enumerate(sources):
            name = name_source(source)
            if not isinstance(source, str) or text_files.is_saved_dataset(self.root / name):
                detail = f"the size of dataset {name!r} is not known without reading it."
                where = f"/data/{field}/{number}"
                raise ConfigError.of_field(where, detail, "Estimate without --fast.")
        # A source that comes again is looked for once, and counted as often as it comes.
        found = {
            source: text_files.find_files(source, self.root, field)
            for source in dict.fromkeys(sources)
        }
        files = [file for source in sources for file in found[source].files]
        if not files:
            raise DataError(
                f"data.{field}: no file matches {sources}.", "Give a file, a folder or a glob."
            )
        different = list(dict.fromkeys(files))
        chosen = different[:: max(len(different) // SAMPLE_FILES, 1)]
        read = _TextSize()
        for file in chosen:
            try:
                read += self._measure_file(file, SAMPLE_BYTES // len(chosen))
            except PotstillError:
                raise
            # json, gzip, pyarrow and rows of another kind raise classes with no common base.
            except Exception as error:
                kind = f"data.format {self.config.data.format}"
                detail = f"{file} cannot be read as {kind}: {type(error).__name__}: {error}."
                raise DataError(detail, "Correct it, or set data.format.") from error
        whole, part = (sum(file.stat().st_size for file in each) for each in (files, chosen))
        return read.scale(whole / max(part, 1))

    def _measure_file(self, path: Path, limit: int) -> _TextSize:
        kind = text_files.choose_format(path, self.config.data)
        if "parquet" in (kind, find_suffix(path)[1:]):
            tokens = path.stat().st_size * PARQUET_EXPANSION / BYTES_PER_TOKEN
            return self._measure_documents(tokens, tokens, max(tokens / 512, 1.0))
        data, share = _read_beginning(path, limit)
        if kind == "text":
            tokens = self.tokenizer.count(data.decode("utf-8", "ignore")) / share
            return self._measure_documents(tokens, tokens, 1.0)
        read = _TextSize()
        for number, row in enumerate(_parse_rows(data), 1):
            read += self._measure_row(row, f"{path}: row {number}")
        return read.scale(1 / share)

    def _measure_row(self, row: Row, place: str) -> _TextSize:
        data = self.config.data
        count = self.tokenizer.count
        content = read_cell(row, place, data) if data.format in COLUMNS else None
        if isinstance(content, Completion):
            parts = [(count(content.prompt), False), (count(content.completion) + 1, True)]
        elif isinstance(content, Chat):
            # A chat template adds about 4 tokens to each message.
            parts = [
                (count(str(each.get("content") or "")) + 4, content.is_learned(number))
                for number, each in enumerate(content.messages)
            ]
        else:
            parts = [(count(str(row.get(data.text_column) or "")) + 1, True)]
        learned = sum(size for size, own in parts if own or not data.assistant_only_loss)
        return self._measure_documents(sum(size for size, _ in parts), learned, 1.0)

    def _measure_documents(self, tokens: float, learned: float, count: float) -> _TextSize:
        unpacked = count * math.ceil(tokens / count / self.config.data.sequence_length)
        return _TextSize(tokens, learned, count, unpacked)


def _read_beginning(path: Path, limit: int) -> tuple[bytes, float]:
    """Return the first ``limit`` bytes, decompressed, and their share of the file."""
    with path.open("rb") as raw, unpack(path, raw) as file:
        data = file.read(limit)
        whole = not file.read(1)
    if whole:
        return data, 1.0
    # How many bytes of a packed file were read is not known: compress them again to find out.
    packing = find_packing(path)
    read = limit
    if packing == ".gz":
        read = len(zlib.compress(data))
    elif packing == ".zst":
        import pyarrow  # an extra, which ``unpack`` has asked for

        read = pyarrow.compress(data, codec="zstd").size
    return data, read / path.stat().st_size


def _parse_rows(data: bytes) -> Iterator[Row]:
    """Yield the objects of JSON lines or of a JSON array, up to the first incomplete one."""
    text = data.decode("utf-8-sig", "ignore")
    decoder = json.JSONDecoder()
    place = 0
    while (start := text.find("{", place)) >= 0:
        try:
            row, place = decoder.raw_decode(text, start)
        except ValueError:
            return
        yield row
