"""Show what a job learns of its chats: some rows as the run reads them, the learned tokens marked.

The first rows are looked at, the last, and some between. Imports no torch where the tokenizer has a
tokenizer.json.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cache.errors import PotstillError
from kd.buckets.inputs import is_stored_name
from kd.config.job import JobConfig
from kd.errors import DataError, Problem
from kd.models.folder import ModelFolder
from kd.preflight.validate import guard_access
from kd.progress import Notice
from kd.text.reading.notes import TextNotes
from kd.text.rows import COLUMNS, read_cell
from kd.text.sources import FoundDocument, find_documents

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kd.text.chats import EncodedChat

#: Texts that are shown of each source, and characters of a piece of one.
_SHOWN, _LONGEST = 3, 400
#: Rows at the beginning that are all looked at.
_FIRST = 200
#: How long the rows of a source are read, in seconds, and bytes at the end of a longer file.
_SECONDS, _END_BYTES = 1.0, 1 << 20


@dataclass(frozen=True)
class LearnedRow:
    """A text that is made of a row, in pieces: {text, learned}; ``where`` names the row."""

    where: str
    pieces: list[dict[str, Any]]

    @classmethod
    def decode(
        cls, where: str, encoded: EncodedChat, tokenizer: PreTrainedTokenizerBase
    ) -> LearnedRow:
        """Return the text of tokens; the middle of a long piece is left out."""
        ids, trained = encoded
        learned = [True] * len(ids) if trained is None else trained.tolist()
        pieces = list[dict[str, Any]]()
        for is_learned, run in groupby(
            zip(learned, ids.tolist(), strict=True), lambda each: each[0]
        ):
            text = tokenizer.decode([token for _, token in run])
            if len(text) > _LONGEST:
                text = f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 2 :]}"
            pieces.append({"text": text, "learned": is_learned})
        return cls(where, pieces)

    def to_json(self) -> dict[str, Any]:
        """Return the row as an answer of the API has it."""
        return asdict(self)


#: Receives the rows that are shown.
Show = Callable[[LearnedRow], None]


def hide_row(row: LearnedRow) -> None:
    """Show nothing: nobody asked for it."""


def find_row_problems(
    config: JobConfig, root: Path, note: Callable[[Notice], None], show: Show
) -> Iterator[Problem]:
    """Find rows of chats and completions that a run would refuse; show what it learns of others."""
    folder = _find_tokenizer(config, root) if config.data.format in COLUMNS else None
    if folder is None or folder.tokenizer_file is None:
        return
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder.path)
    notes = TextNotes()
    for field, receive in (("train", show), ("validation", hide_row)):
        for number, source in enumerate(getattr(config.data, field)):
            if isinstance(source, str) and not is_stored_name(source):
                pointer = f"/data/{field}/{number}"
                sample = (
                    each._replace(where=each.where.removeprefix(f"{root}/"))
                    for each in _sample(str(root / source), field, config)
                )
                found = _look(pointer, sample, tokenizer, config, notes, receive)
                yield from guard_access(pointer, found)
    for notice in notes.list_notices():
        note(notice)


def _find_tokenizer(config: JobConfig, root: Path) -> ModelFolder | None:
    """Find the folder of the tokenizer that reads the rows, if it is on this machine."""
    teacher, student = config.teacher, config.student
    if config.needs_cache and (teacher is None or teacher.trust_remote_code or teacher.gguf_file):
        return None
    if teacher is not None:
        return ModelFolder.find(teacher.tokenizer or teacher.model, root, teacher.revision)
    own = student and (student.model or (student.init and student.init.tokenizer))
    return ModelFolder.find(own, root, student.revision) if student and own else None


def _look(
    pointer: str,
    sample: Iterator[FoundDocument],
    tokenizer: PreTrainedTokenizerBase,
    config: JobConfig,
    notes: TextNotes,
    show: Show,
) -> Iterator[Problem]:
    """Find the rows of a sample that are refused; the first is named, and the others counted."""
    from kd.text.chats import encode_row

    errors, seen, shown = list[PotstillError](), 0, 0
    try:
        for found in sample:
            seen += 1
            try:
                texts = encode_row(found, tokenizer, config.data, notes)
            except PotstillError as error:
                errors.append(error)
                continue
            for encoded in texts[: _SHOWN - shown]:
                shown += 1
                show(LearnedRow.decode(found.where, encoded, tokenizer))
    except PotstillError as error:
        errors.append(error)
    if errors:
        count = f" Of {seen} rows that were looked at {len(errors)} are refused." if seen else ""
        yield Problem(pointer, errors[0].detail + count, errors[0].remedy)


def _sample(source: str, field: str, config: JobConfig) -> Iterator[FoundDocument]:
    """Yield the first rows, rows 256, 512, ... and the last of what can be read in a second."""
    until = time.monotonic() + _SECONDS
    last = None
    for number, found in enumerate(find_documents((source,), field, config.data), 1):
        last = found
        if number <= _FIRST or number & (number - 1) == 0:
            yield found
            last = None
        if time.monotonic() > until:
            yield from _read_last(Path(source), config)
            return
    if last is not None:
        yield last


def _read_last(file: Path, config: JobConfig) -> Iterator[FoundDocument]:
    """Yield the last row of a file whose rows are lines."""
    if file.suffix.lower() != ".jsonl":
        return
    with file.open("rb") as raw:
        raw.seek(max(file.stat().st_size - _END_BYTES, 0))
        line = raw.read().strip().rpartition(b"\n")[2]
    where = f"{file}: the last row"
    try:
        yield FoundDocument(where, read_cell(json.loads(line), where, config.data))
    except ValueError as error:
        raise DataError(f"{where} cannot be read: {error}.", "Correct or remove it.") from error
