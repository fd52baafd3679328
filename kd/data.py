"""text -> tokens -> packed sequences, as three small steps.

    read_documents   files, globs, datasets    -> one text (or chat) per document
    encode           texts                     -> one array of token ids per document
    pack             arrays                    -> Sequences: (S, L) tokens with document boundaries and a target mask

Shapes: S sequences, L tokens per sequence.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import itertools
import json
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from cache.records import Sequences
from kd.config import DataConfig, DatasetSpec
from kd.errors import DataError
from kd.progress import SILENT, Monitor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPORT_SECONDS = 5.0
SUFFIXES = {".txt": "text", ".md": "text", ".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
# What a file that is not what its name says raises: not UTF-8, not gzip, torn, not readable.
_UNREADABLE = (UnicodeDecodeError, OSError, EOFError, zlib.error)


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
        return digest.hexdigest()


def load_corpus(config: DataConfig, tokenizer: PreTrainedTokenizerBase, monitor: Monitor = SILENT) -> Corpus:
    """Read, tokenize and pack what ``config`` names."""
    train = _load(config.train, "train", config, tokenizer, monitor)
    if config.validation:
        validation = _load(config.validation, "validation", config, tokenizer, monitor)
    else:
        train, validation = _hold_out(train, config.held_out_fraction)
    return Corpus(_first(train, config.max_train_samples), _first(validation, config.max_eval_samples))


def _load(
    sources: Iterable[str | DatasetSpec],
    field: str,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    monitor: Monitor,
) -> Sequences:
    documents = encode(read_documents(sources, field, config), tokenizer, config)
    return pack(_reported(documents, field, monitor), config, field, pad_id=_pad_id(tokenizer))


def _reported(documents: Iterator[np.ndarray], field: str, monitor: Monitor) -> Iterator[np.ndarray]:
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
    held_out = max(1, round(len(train) * fraction)) if fraction > 0 else 0
    if held_out >= len(train):
        raise DataError(
            f"data.train gives {len(train)} sequence(s), too few to hold {held_out} out.",
            "Add text, lower data.sequence_length, or set data.validation_fraction to 0.",
        )
    cut = len(train) - held_out
    return train.select(np.arange(cut)), train.select(np.arange(cut, len(train)))


def _first(sequences: Sequences, count: int | None) -> Sequences:
    return sequences if count is None else sequences.select(np.arange(min(count, len(sequences))))


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


def read_documents(sources: Iterable[str | DatasetSpec], field: str, config: DataConfig) -> Iterator[Any]:
    """Yield one document at a time: a string, or a list of messages for ``format: messages``."""
    for source in sources:
        if isinstance(source, DatasetSpec):
            yield from _rows(_open_dataset(source), str(source.path), config)
            continue
        files = find_files(source)
        if not files:
            raise DataError(f"data.{field}: no file matches {source!r}.", "Give a file, a folder or a glob.")
        for file in files:
            yield from _rows(_open_file(file, config), str(file), config)


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

    yield from load_dataset("parquet", data_files=str(path), split="train", streaming=True)


def _open_text(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig")
    return path.open(encoding="utf-8-sig")  # as UTF-8, and a byte order mark is not text


def _open_dataset(spec: DatasetSpec) -> Iterable[dict[str, Any]]:
    from datasets import load_dataset

    try:
        rows: Iterable[dict[str, Any]] = load_dataset(spec.path, spec.name, split=spec.split, revision=spec.revision)
    except Exception as error:  # the library raises a dozen unrelated classes for "not found", "gated", "offline"
        raise DataError(
            f"dataset {spec.path!r} (split {spec.split!r}) cannot be loaded: {type(error).__name__}: {error}",
            "Check the id, name and split; for a gated dataset run: hf auth login.",
        ) from error
    return rows


def _rows(rows: Iterable[dict[str, Any]], where: str, config: DataConfig) -> Iterator[Any]:
    iterator = iter(rows)
    for number in itertools.count(1):
        try:
            row = next(iterator)
        except StopIteration:
            return
        except Exception as error:  # json, gzip, pyarrow: each has classes of its own
            detail = f"{where}: row {number} cannot be read: {type(error).__name__}: {error}"
            raise DataError(detail, "Correct or remove it.") from error
        yield _cell(row, f"{where}: row {number}", config)


def _cell(row: Any, where: str, config: DataConfig) -> Any:
    """The document in a row: a string, or the list of a chat's messages."""
    column, kind = ("messages", list) if config.format == "messages" else (config.text_column, str)
    if not isinstance(row, dict):
        raise DataError(f"{where} is not a JSON object: {str(row)[:40]}.", "Give one object with named columns a row.")
    if row.get(column) is None:
        known = ", ".join(sorted(row))
        raise DataError(f"{where} has no {column!r}; its columns: {known}.", "Set data.text_column.")
    if not isinstance(row[column], kind):
        detail = f"{where}: {column!r} must be a {kind.__name__}, but is a {type(row[column]).__name__}."
        raise DataError(detail, "Convert it, or set data.text_column.")
    return row[column]


# ---------------------------------------------------------------------- tokens


def encode(documents: Iterable[Any], tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> Iterator[np.ndarray]:
    """Token ids (uint32) of each document; a plain text ends with the end-of-sequence token if there is one."""
    for number, document in enumerate(documents, 1):
        try:
            ids = _ids_of(document, tokenizer, config)
        except Exception as error:  # whatever a chat template raises; TypeError for half a surrogate pair
            raise DataError(
                f"document {number} cannot be tokenized: {type(error).__name__}: {error}",
                "Correct or remove it; messages need a tokenizer with a chat template.",
            ) from error
        if len(ids) > 1:
            yield np.asarray(ids, np.uint32)


def _ids_of(document: Any, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> list[int]:
    if config.format == "messages":
        return list(tokenizer.apply_chat_template(document, tokenize=True, return_dict=False))
    ids = encode_text(document, tokenizer)
    if tokenizer.eos_token_id is not None and ids and ids[-1] != tokenizer.eos_token_id:
        ids.append(tokenizer.eos_token_id)
    return ids


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of ``text``, without the warning for texts longer than the model's context: they are packed."""
    return list(tokenizer(text, verbose=False)["input_ids"]) if text.strip() else []


def _pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Any valid id will do: padding stands in a document of its own and has no target."""
    for candidate in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if candidate is not None:
            return int(candidate)
    return 0


# ---------------------------------------------------------------------- packing


def pack(documents: Iterable[np.ndarray], config: DataConfig, field: str = "train", pad_id: int = 0) -> Sequences:
    """Lay documents end to end and cut them into (S, L); what is left over is padded, nothing is dropped.

    A document that is cut goes on in the next sequence as a piece of its own. Position t has a target
    where t + 1 lies in the same piece. With ``packing: false`` each document begins a new sequence.
    """
    length = config.sequence_length
    pieces = list(documents)
    _require_text(pieces, config, field)
    if not config.packing:
        pieces = [_padded(piece, length) for piece in pieces]
    start = _padded(np.concatenate([_first_only(len(piece)) for piece in pieces]), length, fill=False).reshape(
        -1, length
    )
    tokens = _padded(np.concatenate(pieces), length).reshape(-1, length)
    real = tokens != _PAD
    start[:, 1:] |= real[:, :-1] & ~real[:, 1:]  # padding is a document of its own
    start[:, 0] = True
    target = np.zeros_like(start)
    target[:, :-1] = real[:, 1:] & ~start[:, 1:]
    return Sequences(tokens=np.where(real, tokens, np.uint32(pad_id)), document_start=start, target_mask=target)


_PAD = np.uint32(2**32 - 1)


def _first_only(size: int) -> np.ndarray:
    start = np.zeros(size, bool)
    start[0] = True
    return start


def _padded(array: np.ndarray, length: int, fill: int | np.uint32 | bool = _PAD) -> np.ndarray:
    """``array`` with ``fill`` added up to a multiple of ``length``."""
    return np.concatenate([array, np.full(-len(array) % length, fill, array.dtype)])


def _require_text(pieces: list[np.ndarray], config: DataConfig, field: str) -> None:
    tokens = sum(map(len, pieces))
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
