"""Read the beginning of a job's text as the run does: what would be refused, left out or changed?

Of rows the first are looked at, the last, and some between. Of chats and completions it shows what
is learned: some rows, the learned tokens marked. Of a Parquet file its statistics show how many
rows have no text. Imports no torch, unless chats need a tokenizer without a tokenizer.json.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING

from cache.errors import PotstillError
from cache.json_object import Json
from kd.buckets.inputs import is_stored_name
from kd.config.data import DataConfig, DatasetSpec
from kd.config.job import JobConfig
from kd.errors import ConfigError, DataError, Problem
from kd.models.folder import ModelFolder, find_source
from kd.preflight.named_paths import point_at_teacher
from kd.preflight.validate import guard_access
from kd.progress import Notice
from kd.text.mixtures import name_source
from kd.text.packing import Document, refuse_short
from kd.text.reading.contents import TextFile
from kd.text.reading.notes import TextNotes
from kd.text.reading.tables import count_null_texts
from kd.text.rows import COLUMNS, RowWithoutText, read_cell
from kd.text.sources import MISSING, FoundDocument, apply_context, find_documents
from kd.text.stored.places import TextPlace
from kd.text.teacher_side.context import TeacherContext
from kd.text.text_files import choose_format, find_source_files
from kd.text.tokens import DocumentEncoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Texts that are shown of each source.
_SHOWN = 3
#: Characters of a piece of a text that is shown.
_LONGEST = 400
#: Rows of each file whose form is looked at: a form that holds for these holds for most.
_FIRST_ROWS = 100
#: Rows at the beginning of a source that are all tokenized.
_FIRST = 200
#: How long the text of a source is tokenized, in seconds.
_SECONDS = 1.0
#: Bytes at the end of a longer file among which its last row is.
_END_BYTES = 1 << 20


@dataclass(frozen=True)
class RowPiece:
    """A part of a text, and whether its tokens are learned."""

    text: str
    learned: bool


@dataclass(frozen=True)
class LearnedRow:
    """A text that is made of a row, in pieces; ``where`` names the row."""

    where: str
    pieces: list[RowPiece]

    @classmethod
    def decode(cls, where: str, text: Document, tokenizer: PreTrainedTokenizerBase) -> LearnedRow:
        """Return the text of tokens; the middle of a long piece is left out."""
        pieces = list[RowPiece]()
        tokens = zip(text.targets.tolist(), text.ids.tolist(), strict=True)
        for is_learned, run in groupby(tokens, lambda each: each[0]):
            said = str(tokenizer.decode([token for _, token in run]))
            if len(said) > _LONGEST:
                said = f"{said[: _LONGEST // 2]} … {said[-_LONGEST // 2 :]}"
            pieces.append(RowPiece(said, is_learned))
        return cls(where, pieces)

    def to_json(self) -> Json:
        """Return the row as an answer of the API has it."""
        return asdict(self)


#: Receives the rows that are shown.
Show = Callable[[LearnedRow], None]


def hide_row(row: LearnedRow) -> None:
    """Show nothing: nobody asked for it."""


@dataclass
class _FieldLength:
    """The tokens of a field that were read, and whether they are all that it has."""

    tokens: int = 0
    whole: bool = True


def find_row_problems(
    config: JobConfig, root: Path, note: Callable[[Notice], None], show: Show
) -> Iterator[Problem]:
    """Find what a run would refuse in its text; show what it learns of chats and completions.

    ``note`` gets what else is found. Text of a bucket or a hub is not downloaded for this.
    """
    data = config.data
    try:
        tokenizer = _load_tokenizer(config, root)
    except ConfigError as error:
        yield from error.problems
        return
    notes = TextNotes()
    context = TeacherContext.of(config)
    numbers = itertools.count()
    shown = show if data.format in COLUMNS else hide_row
    for field, receive in (("train", shown), ("validation", hide_row)):
        seen = _FieldLength()
        for number, source in enumerate(getattr(data, field)):
            if is_stored_name(name_source(source)):
                seen.whole = False
                continue
            noting = notes.of_text(next(numbers))
            look = _Look(root, field, data, tokenizer, noting, receive, seen, context)
            pointer = f"/data/{field}/{number}"
            yield from guard_access(pointer, look.find_problems(pointer, source))
        is_short = seen.whole and 0 < seen.tokens < data.sequence_length
        if is_short and data.packing and context is None and data.format not in COLUMNS:
            short = refuse_short(field, seen.tokens, data.sequence_length)
            if data.packing is True:
                yield Problem(f"/data/{field}", short.detail, short.remedy)
            else:  # the models decide whether documents share rows
                what = f"tokens of data.{field}, too few for rows that documents share"
                note(Notice(what, seen.tokens, f"one of {data.sequence_length}", short.remedy))
    for notice in notes.list_notices():
        note(notice)


def _load_tokenizer(config: JobConfig, root: Path) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer that reads the text, if its file is on this machine."""
    teacher = config.teacher_files
    student = config.student
    folder = None
    if teacher is not None and not (teacher.trust_remote_code or teacher.gguf_file):
        pointer = point_at_teacher(teacher)
        folder = find_source(teacher, root)
    elif teacher is None and not config.needs_cache and student and student.own_tokenizer:
        pointer = "/student/model" if student.model else "/student/init/tokenizer"
        folder = ModelFolder.find(student.own_tokenizer, root, student.revision)
    if folder is None or not folder.has_tokenizer:
        return None
    if folder.tokenizer_file is None:
        return _load_python_tokenizer(folder, pointer) if config.data.format in COLUMNS else None
    from transformers import PreTrainedTokenizerFast

    try:
        tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(folder.path)
    except Exception as error:  # the library has no class of its own for this
        detail = f"its tokenizer.json cannot be read: {error}."
        raise ConfigError.of_field(pointer, detail, "Save the model again.") from None
    return tokenizer


def _load_python_tokenizer(folder: ModelFolder, pointer: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer that Python computes, which may not tell what a token holds."""
    from kd.models.tokenizers import load_tokenizer

    try:
        return load_tokenizer(folder.path)
    except PotstillError as error:
        raise ConfigError.of_field(pointer, error.detail, error.remedy) from None


@dataclass(frozen=True)
class _Look:
    """Reads the beginning of a source; ``seen`` counts its tokens."""

    root: Path
    field: str
    data: DataConfig
    tokenizer: PreTrainedTokenizerBase | None
    notes: TextNotes
    show: Show
    seen: _FieldLength
    context: TeacherContext | None

    def find_problems(self, pointer: str, source: str | DatasetSpec) -> Iterator[Problem]:
        """Find the rows that are refused; the first is named, and the others counted."""
        listed = find_source_files(source, self.root, self.field)
        if listed is None and isinstance(source, DatasetSpec):
            self.seen.whole = False
            return
        saved = listed is None
        files = [self.root / name_source(source)] if listed is None else listed.files
        errors = list[PotstillError]()
        rows = shown = 0
        until = time.monotonic() + _SECONDS
        try:
            for number, file in enumerate(files):
                kind = "dataset" if saved else choose_format(file, self.data)
                if kind == "parquet" and self.data.format not in COLUMNS:
                    self._note_nulls(number, file)
                if kind != "text":
                    list(islice(self._find((file,)), _FIRST_ROWS))
            for found in self._sample(files, until):
                rows += 1
                try:
                    for text in self._read(found, until):
                        self.seen.tokens += len(text)
                        if self.tokenizer is not None and shown < _SHOWN:
                            shown += 1
                            self._show_text(found.where, text, self.tokenizer)
                except PotstillError as error:
                    errors.append(error)
        except PotstillError as error:
            errors.append(error)
        if errors:
            self.seen.whole = False
            count = f" Of {rows} rows that were looked at {len(errors)} are refused."
            yield Problem(pointer, errors[0].detail + (count if rows else ""), errors[0].remedy)

    def _show_text(self, where: str, text: Document, tokenizer: PreTrainedTokenizerBase) -> None:
        self.show(LearnedRow.decode(where, text, tokenizer))
        if text.prompt is not None:
            named = f"{where}, as the teacher reads it"
            self.show(LearnedRow.decode(named, text.as_teacher_reads(), tokenizer))

    def _find(
        self, files: Iterable[Path], notes: TextNotes | None = None
    ) -> Iterator[FoundDocument]:
        """Find the documents of files; their places are named from the root of the job."""
        names = tuple(map(str, files))
        reading = (self.field, self.data)
        for found in find_documents(names, *reading, notes=notes, context=self.context):
            yield found._replace(where=found.where.removeprefix(f"{self.root}/"))

    def _sample(self, files: list[Path], until: float) -> Iterator[FoundDocument]:
        """Yield the first rows, rows 256, 512, ... and the last of what can be read in time."""
        last = None
        for number, found in enumerate(self._find(files, self.notes), 1):
            last = found
            if number <= _FIRST or number & (number - 1) == 0:
                yield found
                last = None
            else:
                self.seen.whole = False
            if time.monotonic() > until:
                self.seen.whole = False
                name = str(files[-1]).removeprefix(f"{self.root}/")
                yield from _read_last(files[-1], name, self.data, self.context)
                return
        if last is not None:
            yield last

    def _read(self, found: FoundDocument, until: float) -> Iterator[Document]:
        """Yield the texts of a document as a run learns them, as far as there is time."""
        parts: Iterable[Document | str] = ()
        if self.tokenizer is not None:
            parts = self._encoder.encode_one(found)
        elif isinstance(found.content, TextFile):
            parts = found.content.read_chunks()
        for part in parts:
            if isinstance(part, Document):
                yield part
            if time.monotonic() > until:
                self.seen.whole = False
                return

    @cached_property
    def _encoder(self) -> DocumentEncoder:
        assert self.tokenizer is not None
        return DocumentEncoder(self.tokenizer, self.data, notes=self.notes, context=self.context)

    def _note_nulls(self, number: int, file: Path) -> None:
        """Note the rows without a text that a Parquet file tells of; refuse a file of little else.

        ``number`` is that of the file in its source.
        """
        nulls, rows = count_null_texts(file, self.data)
        if nulls > rows / 2:
            detail = f"{file}: {nulls:,} of {rows:,} rows have no {self.data.text_column!r}."
            raise DataError(detail, "Give them a text, or set data.text_column.")
        if nulls:
            end = TextPlace(number, row=rows)  # no row before it is counted again
            self.notes.add(Notice(MISSING, nulls, str(file)), end)


def _read_last(
    file: Path, name: str, data: DataConfig, context: TeacherContext | None
) -> Iterator[FoundDocument]:
    """Yield the last row of a file, called ``name``, whose rows are lines.

    Nothing is yielded of a file that ends otherwise, nor of a row that a run leaves out.
    """
    if file.suffix.lower() != ".jsonl" or choose_format(file, data) == "text":
        return
    with file.open("rb") as raw:
        begin = max(file.stat().st_size - _END_BYTES, 0)
        raw.seek(begin)
        before, _, line = raw.read().strip().rpartition(b"\n")
    # A row longer than what was read, no row, or the end of an array.
    if (begin and not before) or not line or line.endswith(b"]"):
        return
    where = f"{name}: the last row"
    try:
        cells = json.loads(line)
        yield apply_context(FoundDocument(where, read_cell(cells, where, data)), cells, context)
    except RowWithoutText:
        return
    except ValueError as error:
        raise DataError(f"{where} cannot be read: {error}.", "Correct or remove it.") from error
