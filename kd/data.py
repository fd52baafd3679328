"""text -> tokens -> packed sequences, as three small steps.

    read_documents   files, globs, datasets    -> one text (or chat) per document
    encode           texts                     -> Documents: token ids, and in chats which of them are to be learned
    pack             Documents                 -> Sequences: (S, L) tokens with document boundaries and a target mask
    mix              Sequences of each source  -> Sequences of all, in the shares of their weights

All of it is a function of the text and the configuration: what is mixed or streamed names a cache by its tokens too.

Shapes: S sequences, L tokens per sequence, N tokens of one document.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import itertools
import json
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from cache.records import Sequences
from kd.chats import QUIET, Chat, encode_chat
from kd.config.data import DataConfig, DatasetSpec, Sources
from kd.errors import DataError
from kd.progress import SILENT, Monitor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPORT_SECONDS = 5.0
#: Sequences that are packed at once: of a stream, no more than these are read beyond what is asked for.
BLOCK_SEQUENCES = 64
SUFFIXES = {".txt": "text", ".md": "text", ".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
# What a file that is not what its name says raises: not UTF-8, not gzip, torn, not readable.
_UNREADABLE = (UnicodeDecodeError, OSError, EOFError, zlib.error)
_PARQUET_BATCH = 1000


@dataclass(frozen=True)
class Corpus:
    """The packed text of a job; in a cache the training sequences come first, then the held-out ones."""

    train: Sequences
    validation: Sequences

    def sha256(self) -> str:
        """Hash of every token, boundary and mask bit, in order."""
        digest = hashlib.sha256()
        for part in (self.train, self.validation):
            digest.update(np.asarray(part.tokens.shape, np.int64).tobytes())
            for array in (part.tokens.astype("<u4"), part.document_start, part.target_mask):
                digest.update(np.ascontiguousarray(array).tobytes())
            if _once_joined(part).any():
                digest.update(b"isolated")
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Document:
    """The tokens of one text or chat.

    ``ids`` (N,) uint32. ``trained`` (N,) bool: the tokens that are targets, the rest is context; None = all are.
    """

    ids: np.ndarray
    trained: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def split(self, place: int) -> tuple[Document, Document]:
        """The document up to token ``place``, and the rest of it."""
        parts = slice(place), slice(place, None)
        first, rest = (Document(self.ids[i], None if self.trained is None else self.trained[i]) for i in parts)
        return first, rest

    @property
    def targets(self) -> np.ndarray:
        """Whether each token is a target, (N,) bool."""
        return np.ones(len(self), bool) if self.trained is None else self.trained


def load_corpus(config: DataConfig, tokenizer: PreTrainedTokenizerBase, monitor: Monitor = SILENT) -> Corpus:
    """Read, tokenize and pack what ``config`` names; of a stream, no more than it takes."""
    train = _load(config.train, "train", _wanted(config), config, tokenizer, monitor)
    if config.validation:
        validation = _load(config.validation, "validation", config.max_eval_samples, config, tokenizer, monitor)
    else:
        train, validation = _hold_out(train, config.held_out_fraction)
    return Corpus(_first(train, config.max_train_samples), _first(validation, config.max_eval_samples))


def _wanted(config: DataConfig) -> int | None:
    """Training sequences to read, those that will be held out among them; None = all there are.

    Text that ends is held out from its end, and so read to its end.
    """
    kept, fraction = config.max_train_samples, config.held_out_fraction
    if kept is None or fraction == 0:
        return kept
    streamed = config.streaming and _datasets(config.train)
    return next(n for n in itertools.count(kept) if n - held_out_count(n, fraction) >= kept) if streamed else None


def _load(
    sources: Sources,
    field: str,
    wanted: int | None,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    monitor: Monitor,
) -> Sequences:
    """The first ``wanted`` sequences of ``sources``: of one after the other, or of their mixture."""

    def text_of(sources: Sources, field: str) -> Iterator[Sequences]:
        documents = encode(read_documents(sources, field, config), tokenizer, config)
        return packed(_reported(documents, field, monitor), config, field, _pad_id(tokenizer))

    if not _is_mixture(sources, config):
        return Sequences.concatenate(_until(text_of(sources, field), wanted))
    texts = [text_of((source,), f"{field}.{number}") for number, source in enumerate(sources)]
    sequences, ended = mix(texts, list(map(_weight, sources)), wanted)
    if ended is not None:
        what = f"data.{field}.{ended} ({_name(sources[ended])}) has no more text: the mixture ends with it"
        monitor.emit("warning", message=f"{what}, after {len(sequences)} sequences of all sources.")
    return sequences


def _reported(documents: Iterator[Document], field: str, monitor: Monitor) -> Iterator[Document]:
    """Pass documents on, saying now and then how far the reading has come: a silent process is taken for a hung one."""
    tokens, said = 0, time.monotonic()
    for document in documents:
        yield document
        tokens += len(document)
        if time.monotonic() - said > REPORT_SECONDS:
            monitor.emit("stage", phase=f"reading data.{field}: {tokens:,} tokens")
            monitor.check("while reading the text")
            said = time.monotonic()


def _hold_out(train: Sequences, fraction: float) -> tuple[Sequences, Sequences]:
    """Split off the last ``fraction`` of the sequences, at least one: neighbours in a text stay on one side."""
    held_out = held_out_count(len(train), fraction)
    if held_out >= len(train):
        raise DataError(
            f"data.train gives {len(train)} sequence(s), too few to hold {held_out} out.",
            "Add text, lower data.sequence_length, or set data.validation_fraction to 0.",
        )
    cut = len(train) - held_out
    return train.select(np.arange(cut)), train.select(np.arange(cut, len(train)))


def held_out_count(count: int, fraction: float) -> int:
    """How many of ``count`` sequences are held out."""
    return max(1, round(count * fraction)) if fraction > 0 else 0


def _first(sequences: Sequences, count: int | None) -> Sequences:
    return sequences if count is None else sequences.select(np.arange(min(count, len(sequences))))


# ---------------------------------------------------------------------- mixtures


def mix(
    texts: list[Iterator[Sequences]], weights: list[float], wanted: int | None = None
) -> tuple[Sequences, int | None]:
    """``wanted`` sequences of ``texts``, whose shares of the tokens are as ``weights``, from the beginning on.

    The next sequence is always of the text that has given the fewest tokens for its weight (stride scheduling), so
    no share is ever off by more than a sequence. Where that text has no more, the mixture ends, for the shares could
    no longer hold: its number is returned too, else None.
    """
    rows = [_rows(text) for text in texts]
    given, taken = [0.0] * len(rows), list[Sequences]()
    while wanted is None or len(taken) < wanted:
        turn = min(range(len(rows)), key=given.__getitem__)
        if (row := next(rows[turn], None)) is None:
            return Sequences.concatenate(taken), turn
        taken.append(row)
        given[turn] += int(text_lengths(row)[0]) / weights[turn]
    return Sequences.concatenate(taken), None


def _rows(text: Iterable[Sequences]) -> Iterator[Sequences]:
    return (block.select(slice(row, row + 1)) for block in text for row in range(len(block)))


def _until(text: Iterable[Sequences], wanted: int | None) -> Iterator[Sequences]:
    """The blocks of ``text`` up to the one that holds sequence ``wanted``, cut there."""
    for block in text:
        yield _first(block, wanted)
        wanted = None if wanted is None else wanted - len(block)
        if wanted is not None and wanted <= 0:
            return


def _is_mixture(sources: Sources, config: DataConfig) -> bool:
    """Whether shares matter: where a weight is given, and of streams, the first of which would be all that is read."""
    weighed = any(_weight(source) != 1.0 for source in sources)
    return len(sources) > 1 and (weighed or (config.streaming and _datasets(sources)))


def _datasets(sources: Sources) -> bool:
    return any(isinstance(source, DatasetSpec) for source in sources)


def _name(source: str | DatasetSpec) -> str:
    return source if isinstance(source, str) else source.path


def _weight(source: str | DatasetSpec) -> float:
    return source.weight if isinstance(source, DatasetSpec) else 1.0


# ---------------------------------------------------------------------- reading


def find_files(source: str, root: Path = Path()) -> list[Path]:
    """The files that a path, a folder or a glob names, sorted; empty where there are none."""
    path = root / source
    if path.is_file():
        return [path]
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if suffix_of(file) in SUFFIXES and file.is_file())
    return sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())  # noqa: PTH207 (absolute patterns)


def suffix_of(path: Path) -> str:
    """The suffix that tells a file's format; .gz after it is looked through."""
    return Path(path.name.removesuffix(".gz")).suffix


def format_of(path: Path, config: DataConfig) -> str:
    """The format to read ``path`` in: the configured one, or by suffix."""
    if config.format != "auto":
        return config.format
    try:
        return SUFFIXES[suffix_of(path)]
    except KeyError:
        raise DataError(
            f"{path}: cannot tell the format from the suffix {suffix_of(path)!r}.",
            f"Use one of {', '.join(SUFFIXES)}, or set data.format.",
        ) from None


def read_documents(sources: Iterable[str | DatasetSpec], field: str, config: DataConfig) -> Iterator[tuple[str, Any]]:
    """Yield where each document stands, and the document: a string, or the messages for ``format: messages``."""
    for source in sources:
        if isinstance(source, DatasetSpec):
            yield from _cells(_open_dataset(source, config.streaming), source.path, config)
            continue
        files = find_files(source)
        if not files:
            raise DataError(f"data.{field}: no file matches {source!r}.", "Give a file, a folder or a glob.")
        for file in files:
            yield from _cells(_open_file(file, config), str(file), config)


def _open_file(path: Path, config: DataConfig) -> Iterable[dict[str, Any]]:
    kind = format_of(path, config)
    if kind == "text":  # a file is a document
        return [{config.text_column: _read_text(path)}]
    return _parquet_rows(path) if "parquet" in (kind, suffix_of(path)[1:]) else _json_rows(path)


def _read_text(path: Path) -> str:
    try:
        with _open_text(path) as file:
            return file.read()
    except _UNREADABLE as error:
        raise DataError(f"{path} is not UTF-8 text: {error}.", "Convert it, or set data.format.") from None


def _json_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file that holds one JSON object a line, or a JSON array of them."""
    with _open_text(path) as file:
        is_array = file.read(1) == "["
        file.seek(0)
        yield from json.load(file) if is_array else (json.loads(line) for line in file if line.strip())


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    from datasets import load_dataset

    # Without a batch size the reader takes that of the first row group, and fails where it is 0.
    rows = iter(load_dataset("parquet", data_files=str(path), split="train", streaming=True, batch_size=_PARQUET_BATCH))
    try:
        yield next(rows)
    except StopIteration:
        raise DataError(f"{path} holds no rows.", "Remove it, or check how it was written.") from None
    yield from rows


def _open_text(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig")
    return path.open(encoding="utf-8-sig")  # as UTF-8, and a byte order mark is not text


def _open_dataset(spec: DatasetSpec, streaming: bool) -> Iterable[dict[str, Any]]:
    if streaming and "[" in spec.split:
        detail = f"dataset {spec.path!r}: a stream cannot be sliced, but its split is {spec.split!r}."
        raise DataError(detail, "Name the whole split, or set data.streaming to false.")
    try:
        return _open_rows(spec, streaming)
    except DataError:
        raise
    except Exception as error:  # the library raises a dozen unrelated classes for "not found", "gated", "offline"
        raise DataError(
            f"dataset {spec.path!r} (split {spec.split!r}) cannot be loaded: {type(error).__name__}: {error}",
            "Check the id, name and split; for a gated dataset run: hf auth login.",
        ) from error


Opener = Callable[[DatasetSpec, bool], Iterable[dict[str, Any]]]
"""The rows of a dataset, streamed or not."""


def _load_rows(spec: DatasetSpec, streaming: bool) -> Iterable[dict[str, Any]]:
    from datasets import load_dataset

    rows: Iterable[dict[str, Any]] = load_dataset(
        spec.path, spec.name, split=spec.split, revision=spec.revision, streaming=streaming
    )
    return rows


_open_rows: Opener = _load_rows


@contextmanager
def datasets_opened_by(opener: Opener) -> Iterator[None]:
    """Until the end of the block, ``opener`` opens every dataset that this process reads, in whichever thread."""
    global _open_rows  # noqa: PLW0603  one process, one job
    before, _open_rows = _open_rows, opener
    try:
        yield
    finally:
        _open_rows = before


def _cells(rows: Iterable[dict[str, Any]], where: str, config: DataConfig) -> Iterator[tuple[str, Any]]:
    iterator = iter(rows)
    for number in itertools.count(1):
        try:
            row = next(iterator)
        except StopIteration:
            return
        except DataError:
            raise
        except Exception as error:  # json, gzip, pyarrow: each has classes of its own
            detail = f"{where}: row {number} cannot be read: {type(error).__name__}: {error}"
            raise DataError(detail, "Correct or remove it.") from error
        place = f"{where}: row {number}"
        yield place, _cell(row, place, config)


def _cell(row: Any, where: str, config: DataConfig) -> Any:
    """The document in a row: a string, or a chat."""
    column, kind = ("messages", list) if config.format == "messages" else (config.text_column, str)
    if not isinstance(row, dict):
        raise DataError(f"{where} is not a JSON object: {str(row)[:40]}.", "Give one object with named columns a row.")
    if row.get(column) is None:
        known = ", ".join(sorted(row))
        raise DataError(f"{where} has no {column!r}; its columns: {known}.", _right_column(row, config))
    if not isinstance(row[column], kind):
        detail = f"{where}: {column!r} must be a {kind.__name__}, but is a {type(row[column]).__name__}."
        raise DataError(detail, f"Convert it. {_right_column(row, config)}")
    return Chat.of(row, where) if config.format == "messages" else row[column]


def _right_column(row: dict[str, Any], config: DataConfig) -> str:
    """What to do about a row whose document is not where ``config`` looks for it: it may be a chat."""
    chat = "A chat is a list of {role, content} under messages: rename the column, and its keys if they are others."
    if config.format == "messages":
        return chat
    if isinstance(row.get("messages"), list):
        return "Set data.format: messages."
    if isinstance(row.get("conversations"), list):  # as ShareGPT has them
        return f"Set data.format: messages. {chat}"
    return "Set data.text_column."


# ---------------------------------------------------------------------- tokens


def encode(
    documents: Iterable[tuple[str, Any]], tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> Iterator[Document]:
    """The tokens of each (place, text or chat); a plain text ends with the end-of-sequence token if there is one."""
    for place, content in documents:
        try:
            document = _document(content, place, tokenizer, config)
        except DataError:
            raise
        except Exception as error:  # whatever a chat template raises; TypeError for half a surrogate pair
            raise DataError(
                f"{place} cannot be tokenized: {type(error).__name__}: {error}",
                "Correct or remove it; messages need a tokenizer with a chat template.",
            ) from error
        if len(document) > 1:
            yield document


def _document(content: Any, place: str, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> Document:
    if config.format == "messages":
        return Document(*encode_chat(content, place, tokenizer, config.assistant_only_loss))
    ids = encode_text(content, tokenizer)
    if tokenizer.eos_token_id is not None and ids and ids[-1] != tokenizer.eos_token_id:
        ids.append(tokenizer.eos_token_id)
    return Document(np.asarray(ids, np.uint32))


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of ``text``."""
    return list(tokenizer(text, **QUIET)["input_ids"]) if text.strip() else []


def _pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Any valid id will do: padding stands in a document of its own and has no target."""
    for candidate in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if candidate is not None:
            return int(candidate)
    return 0


# ---------------------------------------------------------------------- packing


def pack(documents: Iterable[Document], config: DataConfig, field: str = "train", pad_id: int = 0) -> Sequences:
    """Lay documents end to end and cut them into (S, L); what is left over is padded.

    A document that is cut goes on in the next sequence as a piece of its own. Position t has a target where t + 1
    lies in the same piece and is trained. Nothing is dropped but, of chats, sequences without any target.
    """
    return Sequences.concatenate(packed(documents, config, field, pad_id))


def packed(
    documents: Iterable[Document], config: DataConfig, field: str = "train", pad_id: int = 0
) -> Iterator[Sequences]:
    """What ``pack`` gives, in blocks: a block takes no more documents than fill it."""
    found = False
    for number, block in enumerate(_blocks(documents, config)):
        if number == 0:  # a full block, or all the text there is
            _require_text(block, config, field)
        sequences = _with_targets(block, _packed(block, config, pad_id))
        found |= len(sequences) > 0
        if len(sequences):
            yield sequences
    if not found:
        raise DataError(
            f"data.{field}: every token of the assistant's begins a sequence, where nothing predicts it.",
            "Raise data.sequence_length.",
        )


def _blocks(documents: Iterable[Document], config: DataConfig) -> Iterator[list[Document]]:
    """Documents that fill ``BLOCK_SEQUENCES`` sequences or more, with nothing left over but by the last of them."""
    held, tokens, enough = list[Document](), 0, BLOCK_SEQUENCES * config.sequence_length
    begun = False
    for document in documents:
        held.append(document)
        tokens += len(document)
        if tokens >= enough:
            spare = tokens % config.sequence_length if config.packing else 0
            held[-1], rest = document.split(len(document) - spare)
            yield held
            held, tokens, begun = [rest] if spare else [], spare, True
    if held or not begun:
        yield held


def _packed(documents: list[Document], config: DataConfig, pad_id: int) -> Sequences:
    tokens = _laid([each.ids for each in documents], config, _PAD)
    start = _laid([_first_only(len(each)) for each in documents], config)
    real, target = tokens != _PAD, np.zeros_like(start)
    start[:, 1:] |= real[:, :-1] & ~real[:, 1:]  # padding is a document of its own
    start[:, 0] = True
    target[:, :-1] = _laid([each.targets for each in documents], config)[:, 1:] & ~start[:, 1:]
    return Sequences(np.where(real, tokens, np.uint32(pad_id)), document_start=start, target_mask=target)


def _with_targets(documents: list[Document], sequences: Sequences) -> Sequences:
    """Of chats, those that have a target: the others would cost a pass and teach nothing."""
    whole = all(each.trained is None for each in documents)
    return sequences if whole else sequences.select(sequences.target_mask.any(axis=1))


def _laid(parts: list[np.ndarray], config: DataConfig, fill: np.uint32 | bool = False) -> np.ndarray:
    """``parts`` end to end as (S, L), with ``fill`` after the last, or after each without packing."""
    if not config.packing:
        parts = [_padded(part, config.sequence_length, fill) for part in parts]
    return _padded(np.concatenate(parts), config.sequence_length, fill).reshape(-1, config.sequence_length)


_PAD = np.uint32(2**32 - 1)


def _first_only(size: int) -> np.ndarray:
    start = np.zeros(size, bool)
    start[0] = True
    return start


def _padded(array: np.ndarray, length: int, fill: np.uint32 | bool) -> np.ndarray:
    """``array`` with ``fill`` added up to a multiple of ``length``."""
    return np.concatenate([array, np.full(-len(array) % length, fill, array.dtype)])


def _require_text(documents: list[Document], config: DataConfig, field: str) -> None:
    tokens = sum(map(len, documents))
    if tokens == 0:
        raise DataError(f"data.{field} holds no text.", "Check the files and data.text_column.")
    if config.packing and tokens < config.sequence_length:
        raise DataError(
            f"data.{field} holds {tokens} tokens, fewer than one sequence of {config.sequence_length}.",
            "Add text or lower data.sequence_length.",
        )


def position_ids(document_start: np.ndarray) -> np.ndarray:
    """Positions (S, L) that restart at every document boundary; attention masks are built from them."""
    index = np.arange(document_start.shape[1])
    return index - np.maximum.accumulate(np.where(document_start, index, 0), axis=1)


def needs_isolation(positions: np.ndarray, target_mask: np.ndarray) -> np.ndarray:
    """Whether a row has a target with another document before it, (S,), which plain causal attention would see.

    ``positions`` (S, L) are those of ``position_ids``. A lone token or padding before no target does not count.
    """
    needs: np.ndarray = ((positions != np.arange(positions.shape[1])) & target_mask).any(axis=1)
    return needs


def _once_joined(sequences: Sequences) -> np.ndarray:
    """Rows (S,) whose documents attention did not keep apart once: caches of that time must not be taken for these."""
    start, target = sequences.document_start, sequences.target_mask
    return needs_isolation(position_ids(start), target) & ~(start & target)[:, 1:].any(axis=1)


def text_lengths(sequences: Sequences) -> np.ndarray:
    """Tokens of each sequence up to the last that is predicted, (S,): what follows is padding, or teaches nothing."""
    places = np.arange(2, sequences.length + 2)  # a target at t predicts t + 1: t + 2 tokens
    return np.max(np.where(sequences.target_mask, places, 0), axis=1)
