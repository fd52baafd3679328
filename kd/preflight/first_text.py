"""Find what a run would refuse or change in plain text, by reading its beginning.

The first seconds of reading show a text that is binary or in another encoding, a broken row, a text
that is shorter than a sequence, and special tokens. Of a Parquet file its statistics show how many
rows have no text. Imports no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kd.buckets.inputs import is_stored_name
from kd.capture.estimate.text import TokenCounter
from kd.config.job import JobConfig
from kd.errors import Problem
from kd.preflight.validate import guard_access
from kd.progress import Notice

#: How long the text of a field is read, in seconds.
READ_SECONDS = 1.0
#: Characters for each token of a sequence from which a text is long enough.
_ENOUGH = 16


def find_unusable_text(
    config: JobConfig, root: Path, note: Callable[[Notice], None]
) -> Iterator[Problem]:
    """Find what is wrong with a job's plain text; ``note`` gets what else was found in it.

    Text of a bucket or a hub is not downloaded for this.
    """
    if config.data.has_chats or config.data.format == "prompt_completion":
        return
    has_teacher = config.teacher is not None and config.runs_teacher
    counter = TokenCounter.find(config, root) if has_teacher else TokenCounter(0)
    for field in ("train", "validation"):
        sources = getattr(config.data, field)
        if sources and all(isinstance(each, str) and not is_stored_name(each) for each in sources):
            found = dict[str, Notice]()
            pointer = f"/data/{field}"
            names = tuple(str(root / each) for each in sources)
            yield from guard_access(pointer, _read_a_moment(pointer, names, config, counter, found))
            yield from guard_access(pointer, _count_null_rows(pointer, names, config, found))
            for notice in found.values():
                note(notice)


def _read_a_moment(
    pointer: str,
    sources: tuple[str, ...],
    config: JobConfig,
    counter: TokenCounter,
    found: dict[str, Notice],
) -> Iterator[Problem]:
    from kd.text.packing import refuse_short
    from kd.text.reading.contents import TextFile
    from kd.text.reading.notes import TextNotes
    from kd.text.sources import find_documents

    data = config.data
    field = pointer.rpartition("/")[2]
    end = time.monotonic() + READ_SECONDS
    tokens = characters = 0
    notes = TextNotes()
    for each in find_documents(sources, field, data, notes=notes):
        content = each.content
        for chunk in content.read_chunks() if isinstance(content, TextFile) else [content]:
            characters += len(chunk)
            if characters <= _ENOUGH * data.sequence_length:
                tokens += counter.count(chunk) + 1
            _note_special(chunk, each.where, counter, found)
            if time.monotonic() > end:
                break
        if time.monotonic() > end:
            break
    else:
        is_short = characters <= _ENOUGH * data.sequence_length and tokens < data.sequence_length
        if data.packing and counter.inner is not None and is_short:
            error = refuse_short(field, tokens, data.sequence_length)
            yield Problem(pointer, error.detail, error.remedy)
    for notice in notes.list_notices():
        if "row" in notice.what:  # what folders leave out is named already
            found[notice.what] = notice


def _note_special(text: str, where: str, counter: TokenCounter, found: dict[str, Notice]) -> None:
    """Note the tokens with a meaning of their own that stand in a text."""
    for token in counter.special_tokens:
        if count := text.count(token):
            what = "special tokens in the beginning of the text, read as such"
            known = found.get(what, Notice(what, 0, f"{token!r} in {where}"))
            found[what] = Notice(what, known.count + count, known.example)


def _count_null_rows(
    pointer: str, sources: tuple[str, ...], config: JobConfig, found: dict[str, Notice]
) -> Iterator[Problem]:
    from kd.text.files import choose_format, find_files
    from kd.text.reading.tables import count_null_texts
    from kd.text.sources import MISSING

    known = 0
    for source in sources:
        for file in find_files(source, split=pointer.rpartition("/")[2]).files:
            if choose_format(file, config.data) != "parquet":
                continue
            nulls, rows = count_null_texts(file, config.data)
            if nulls > rows / 2:
                detail = f"{file}: {nulls:,} of {rows:,} rows have no {config.data.text_column!r}."
                yield Problem(pointer, detail, "Give them a text, or set data.text_column.")
            elif nulls:
                known += nulls
                found[MISSING] = Notice(MISSING, known, str(file))
