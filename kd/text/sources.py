"""Sources of text -> one document each: files, folders, globs and datasets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NamedTuple

from kd.addresses import HUB_ID
from kd.config.data import DataConfig, DatasetSpec
from kd.errors import DataError
from kd.progress import Notice
from kd.text.reading.contents import TextFile, ignore_count, name_rows, open_rows
from kd.text.reading.notes import TextNotes
from kd.text.rows import Row, RowWithoutText, drop_absent_fields, read_cell
from kd.text.stored.places import BEGINNING, TextPlace
from kd.text.teacher_side.context import TeacherContext
from kd.text.text_files import (
    choose_format,
    describe_file,
    find_source_files,
    is_saved_dataset,
    list_all_files,
)

#: What is noted of rows that hold no text, and the least of them that may be too many.
MISSING = "rows without text, left out"
_BLANK = "rows of white space alone, left out"
_MANY_MISSING = 100


class FoundDocument(NamedTuple):
    """A document, and where it was found: in words, and as the place from which to read it.

    ``content`` is a string, a ``TextFile``, a ``Chat`` or a ``Completion``. With a context
    ``teacher`` is what the teacher reads: a ``Chat``, a ``Completion``, or a string that comes
    before the text.
    """

    where: str
    content: Any
    place: TextPlace = BEGINNING
    teacher: Any = None


def read_documents(
    sources: Iterable[str | DatasetSpec], field: str, config: DataConfig
) -> Iterator[tuple[str, Any]]:
    """Yield each document of ``sources``, and where it was found in words."""
    return ((found.where, found.content) for found in find_documents(sources, field, config))


def find_documents(
    sources: Iterable[str | DatasetSpec],
    field: str,
    config: DataConfig,
    note: Callable[[int], None] = ignore_count,
    start: TextPlace = BEGINNING,
    notes: TextNotes | None = None,
    context: TeacherContext | None = None,
) -> Iterator[FoundDocument]:
    """Yield the documents of ``sources`` from ``start`` on, with what the teacher reads of them.

    ``note`` is called with the number of bytes of files that were read since the last call. Files
    before ``start`` are not opened, and count as read. ``notes`` receives what is left out.
    """
    notes = TextNotes() if notes is None else notes
    for number, source in enumerate(sources):
        if number < start.source:
            continue
        begin = start if number == start.source else TextPlace(number)
        found = find_source_files(source, split=field.partition(".")[0])
        spec = source if isinstance(source, DatasetSpec) else DatasetSpec(path=source)
        if found is None:
            table = map(drop_absent_fields, open_dataset(spec, config.streaming))
            yield from _read_cells(_OpenedRows(table, spec.path, config, context), begin, notes)
            continue
        for each in found.list_notices():
            notes.add(each, TextPlace(number))
        if not found.files:
            raise found.refuse_nothing(source, f"data.{field}: ")
        kept: list[tuple[int, int | None]] = [(0, None)] * len(found.files)
        if source is spec:
            _require_permitted(spec, found.files)
            if "[" in spec.split:
                kept = _slice_files(spec, found.files, config)
        for index, (file, (first, end)) in enumerate(zip(found.files, kept, strict=True)):
            if index >= begin.file and first != end:
                place = begin if index == begin.file else TextPlace(number, index)
                if choose_format(file, config) == "text":
                    where = f"{file}: row 1"
                    yield apply_context(
                        FoundDocument(where, TextFile(file, note), place), {}, context
                    )
                    continue
                place = place._replace(row=max(place.row, first))
                with closing(open_rows(file, config)) as opened:
                    rows = _OpenedRows(islice(opened, end), str(file), config, context)
                    yield from _read_cells(rows, place, notes)
            note(file.stat().st_size)


def _slice_files(
    spec: DatasetSpec, files: list[Path], config: DataConfig
) -> list[tuple[int, int | None]]:
    """Return of each file the first row that the slice of ``spec`` holds, and the end of them."""
    from datasets import ReadInstruction

    counts = [
        1 if choose_format(file, config) == "text" else _count_rows(file, config) for file in files
    ]
    whole = {spec.split.partition("[")[0]: sum(counts)}
    try:
        (part,) = ReadInstruction.from_spec(spec.split).to_absolute(whole)
    except (ValueError, AssertionError) as error:
        detail = f"the slice {spec.split!r} of {spec.path!r} cannot be taken: {error}."
        raise DataError(detail, "Write it as train[:10%], or train[100:200].") from None
    return [
        (min(max(part.from_ - each, 0), count), min(max(part.to - each, 0), count))
        for each, count in zip(accumulate(counts, initial=0), counts, strict=False)
    ]


def _count_rows(file: Path, config: DataConfig) -> int:
    return sum(1 for _ in name_rows(open_rows(file, config), str(file), "Correct or remove it."))


def open_dataset(spec: DatasetSpec, streaming: bool) -> Iterable[Row]:
    """Open the rows of a dataset. Raises ``DataError`` for one that cannot be loaded."""
    if streaming and "[" in spec.split:
        detail = (
            f"dataset {spec.path!r}: a stream cannot be sliced, but its split is {spec.split!r}."
        )
        raise DataError(detail, "Name the whole split, or set data.streaming to false.")
    folder = Path(spec.path)
    is_local = not HUB_ID.match(spec.path) or (len(folder.parts) > 1 and folder.parent.is_dir())
    # A plain name may be that of a builder or of a dataset of the hub.
    if is_local and "://" not in spec.path and not folder.exists():
        detail = f"dataset {spec.path!r}: there is no folder {str(folder.absolute())!r}."
        raise DataError(detail, "Check the path, and the folder from which it starts.")
    try:
        return _open_rows(spec, streaming)
    except DataError:
        raise
    # The library raises a dozen unrelated classes for "not found", "gated" and "offline".
    except Exception as error:
        raise DataError(
            f"dataset {spec.path!r} (split {spec.split!r}) cannot be loaded: "
            f"{type(error).__name__}: {error}",
            "Check its name and split."
            if Path(spec.path).exists()
            else "Check the id, name and split; for a gated dataset run: hf auth login.",
        ) from error


#: Opens the rows of a dataset; the second argument is whether to stream them.
Opener = Callable[[DatasetSpec, bool], Iterable[Row]]


def open_saved_dataset(spec: DatasetSpec) -> Any:
    """Open the rows of a split, or of a slice of one, that ``save_to_disk`` wrote."""
    from datasets import ReadInstruction, concatenate_datasets

    splits = _load_splits(Path(spec.path))
    sizes = {name: len(rows) for name, rows in splits.items()}
    parts = [
        splits[each.splitname].select(range(each.from_, each.to))
        for each in ReadInstruction.from_spec(spec.split).to_absolute(sizes)
    ]
    return concatenate_datasets(parts)


def _load_splits(folder: Path) -> dict[str, Any]:
    """Load every split of a saved dataset; a split without others is ``train`` too."""
    several = folder / "dataset_dict.json"
    if several.is_file():
        names = json.loads(several.read_text(encoding="utf-8"))["splits"]
        return {name: _load_split(folder / name) for name in names}
    rows = _load_split(folder)
    return {str(rows.split or "train"): rows, "train": rows}


def _load_split(folder: Path) -> Any:
    from datasets import Dataset, concatenate_datasets, load_from_disk

    rows = load_from_disk(folder)
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    # Earlier versions of the library wrote the order of the rows apart; later ones do not read it.
    ordered = [folder / each["filename"] for each in state.get("_indices_data_files") or ()]
    if not ordered:
        return rows
    order = concatenate_datasets([Dataset.from_file(str(file)) for file in ordered])
    return rows.select(order["indices"])


def _load_rows(spec: DatasetSpec, streaming: bool) -> Iterable[Row]:
    from datasets import config, load_dataset

    folder = Path(spec.path)
    if is_saved_dataset(folder):
        return open_saved_dataset(spec)
    copies = Path(config.HF_DATASETS_CACHE)
    return load_dataset(
        spec.path,
        spec.name,
        split=spec.split,
        revision=spec.revision,
        streaming=streaming,
        cache_dir=str(copies / "folders" / name_copy(folder) if folder.is_dir() else copies),
    )


def name_copy(folder: Path) -> str:
    """Return a name for the library's copy of ``folder``, which changes when a file in it does.

    The library names it only by the folder's last name and the patterns of its card.
    """
    content = json.dumps([str(folder.resolve()), list(map(describe_file, list_all_files(folder)))])
    return hashlib.sha256(content.encode()).hexdigest()[:32]


#: Raises ``DataError`` if a dataset's folder or one of its files may not be read.
Permission = Callable[[DatasetSpec, Iterable[Path]], None]


def _permit_all(spec: DatasetSpec, files: Iterable[Path]) -> None:
    """Permit what the user of this process may read."""


_open_rows: Opener = _load_rows
_require_permitted: Permission = _permit_all


@contextmanager
def datasets_opened_by(opener: Opener, require_permitted: Permission) -> Iterator[None]:
    """Until the end of the block, let ``opener`` open every dataset, in all threads.

    ``require_permitted`` is asked about the files of a dataset in a folder before they are opened.
    """
    global _open_rows, _require_permitted
    before = _open_rows, _require_permitted
    _open_rows, _require_permitted = opener, require_permitted
    try:
        yield
    finally:
        _open_rows, _require_permitted = before


def apply_context(
    found: FoundDocument, cells: Row, context: TeacherContext | None
) -> FoundDocument:
    """Return a document of a row with these cells with what its teacher reads."""
    if context is None:
        return found
    content, theirs = context.apply(found.content, cells, found.where)
    return found._replace(content=content, teacher=theirs)


class _OpenedRows(NamedTuple):
    """The rows of a file or dataset, its name, and how they are read."""

    rows: Iterable[Row]
    where: str
    config: DataConfig
    context: TeacherContext | None


def _read_cells(opened: _OpenedRows, start: TextPlace, notes: TextNotes) -> Iterator[FoundDocument]:
    """Yield the documents of ``rows`` from ``start`` on; those before it are only passed over.

    Rows without text are left out. Raises ``DataError`` if there are more of them than others.
    """
    rows, where, config, context = opened
    missing = 0
    found = start.row
    first: RowWithoutText | None = None
    remedy = "Correct or remove it."
    if config.format not in ("auto", "parquet"):
        remedy += f" data.format {config.format} reads JSON Lines or Parquet."
    for number, row in enumerate(name_rows(rows, where, remedy)):
        if number < start.row:
            continue
        place = start if number == start.row else TextPlace(start.source, start.file, number)
        named = f"{where}: row {number + 1}"
        try:
            content = read_cell(row, named, config)
        except RowWithoutText as error:
            missing += 1
            notes.add(Notice(MISSING, 1, named, "Give them a text, or remove them."), place)
            first = first or error
            if missing < max(_MANY_MISSING, found):
                continue
            detail = f"{first.detail} Of {number + 1:,} rows {missing:,} are like that."
            raise DataError(detail, first.remedy) from None
        found += 1
        if isinstance(content, str) and not content.strip():
            notes.add(Notice(_BLANK, 1, named), place)
        yield apply_context(FoundDocument(named, content, place), row, context)
    if first is not None and not found:
        raise first
