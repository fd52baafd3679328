"""Models and text that are in memory -> files below the data folder, named by their content.

    models/{digest}/       a loaded model and its tokenizer, as a student is saved
    data/{digest}.jsonl    documents: a list, or a ``datasets.Dataset``

So the same model or text gives the same path, and the job of a call is the one that a YAML file
with these paths describes.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from cache import disk
from kd.addresses import SUFFIXES, find_suffix
from kd.config.data import DatasetSpec
from kd.errors import ConfigError, Problem
from kd.python.bars import library_bars_hidden
from kd.text.rows import COLUMNS

#: A job of a call or a section of it, by the names of a job file; ``parse_config`` reads it.
Section = dict[str, Any]
#: The default data folder, as for the command ``kd``: KD_HOME, or this one in the current folder.
DEFAULT_HOME = "potstill-data"
#: Digits of a digest in a name.
_DIGITS = 32
_MODEL_REMEDY = "Give a name, a folder, or a pair of a loaded model and its tokenizer."
_TEXT_REMEDY = (
    "Give a path, a glob, a list of texts, a list of rows such as {'messages': [...]}, or a "
    "datasets.Dataset."
)


def find_home(home: str | os.PathLike[str] | None = None) -> Path:
    """Return the data folder: ``home``, or KD_HOME, or ./potstill-data."""
    return Path(home or os.environ.get("KD_HOME") or DEFAULT_HOME).expanduser().resolve()


def _refuse(pointer: str, detail: str, remedy: str) -> NoReturn:
    raise ConfigError([Problem(pointer, detail, remedy)])


# ---------------------------------------------------------------------- models


@dataclass(frozen=True)
class ModelSaver:
    """Turns the models of a call into sections of a job.

    Loaded models go into a folder below ``home``, with ``tokenizer`` where they come without one.
    """

    home: Path
    tokenizer: Any = None

    def describe(self, model: Any, role: str) -> Section:
        """Return the section ``role``, teacher or student; a mapping is the section itself."""
        if not isinstance(model, Mapping):
            return {"model": self.name(model, role)}
        if model.get("model") is None:
            return dict(model)
        return {**model, "model": self.name(model["model"], role)}

    def name(self, model: Any, role: str) -> str:
        """Return the name or the folder of ``model``; a loaded one is saved first."""
        if isinstance(model, str | os.PathLike):
            return os.fspath(model)
        tokenizer = self.tokenizer
        if isinstance(model, tuple) and len(model) == 2:
            model, tokenizer = model
        self._require_loaded(model, tokenizer, f"/{role}/model")
        return str(keep_model(model, tokenizer, self.home, role))

    def _require_loaded(self, model: Any, tokenizer: Any, pointer: str) -> None:
        """Raise ``ConfigError`` where ``model`` is no model of transformers with a tokenizer."""
        library = sys.modules.get("transformers")
        if library is None or not isinstance(model, library.PreTrainedModel):
            kind = type(model).__name__
            merge = " For adapters of peft: merge_and_unload() first." if "Peft" in kind else ""
            _refuse(pointer, f"a model cannot be of type {kind}.", _MODEL_REMEDY + merge)
        if not hasattr(tokenizer, "save_pretrained"):
            detail = "a loaded model needs its tokenizer, but none is given."
            _refuse(pointer, detail, "Pass tokenizer=..., or the pair (model, tokenizer).")


def keep_model(model: Any, tokenizer: Any, home: Path, role: str) -> Path:
    """Save ``model`` and ``tokenizer`` below ``home`` and return the folder, named by its files."""
    from kd.models.saving import save_model  # it imports torch

    # The files of a teacher name its caches: what is added for other readers would change that.
    save = type(model).save_pretrained if role == "teacher" else save_model
    models = home / "models"
    with disk.storage_errors(models):
        disk.make_folder(models)
        temporary = Path(tempfile.mkdtemp(prefix=disk.TEMPORARY_PREFIX, dir=models))
        try:
            with library_bars_hidden():
                save(model, temporary)
                tokenizer.save_pretrained(temporary)
            digest = hashlib.sha256()
            for path in sorted(each for each in temporary.rglob("*") if each.is_file()):
                digest.update(str(path.relative_to(temporary)).encode())
                digest.update(bytes.fromhex(disk.hash_file(path)))
            folder = models / digest.hexdigest()[:_DIGITS]
            if folder.is_dir():
                os.utime(folder)  # the rules of retention count from the last call that saved it
            else:
                disk.publish_folder(temporary, folder)
        finally:
            disk.remove_path(temporary)
    return folder


# ---------------------------------------------------------------------- text


@dataclass(frozen=True)
class Text:
    """Sources as ``data.train`` has them, and their format where the rows show it."""

    sources: Any
    format: str | None = None


def describe_data(data: Any, validation: Any, home: Path) -> Section:
    """Return the section ``data`` of a call.

    ``data`` is the training text in any form, or a mapping: the section itself, whose ``train`` and
    ``validation`` may have any form too.
    """
    _require_no_splits(data, "/data/train")
    section: Section = {"train": data}
    if isinstance(data, Mapping) and "path" not in data:
        section = dict(data)
    if validation is not None:
        section["validation"] = validation
    formats = set[str]()
    for field in ("train", "validation"):
        if section.get(field) is not None:
            text = describe_text(section[field], f"/data/{field}", home)
            section[field] = text.sources
            formats |= {text.format} if text.format else set()
    if len(formats) > 1:
        detail = f"train and validation have rows of two formats: {', '.join(sorted(formats))}."
        _refuse("/data/format", detail, "Give rows of one format.")
    return {"format": formats.pop(), **section} if formats else section


def describe_text(text: Any, pointer: str, home: Path) -> Text:
    """Return the sources of ``text``; what is in memory is written below ``home`` first.

    A list of strings holds documents, unless every string names a file.
    """
    if isinstance(text, str | os.PathLike):
        name = os.fspath(text)
        if "\n" in name:
            _refuse(pointer, "a single string is a path, but got text.", "Put the text in a list.")
        return Text(name)
    _require_no_splits(text, pointer)
    if isinstance(text, Mapping | DatasetSpec):
        return Text(text)
    if (columns := _list_columns(text, pointer)) is not None:
        return Text(_write_rows(text, home), _find_format(columns))
    if not isinstance(text, list | tuple | Iterator):
        _refuse(pointer, f"text cannot be of type {type(text).__name__}.", _TEXT_REMEDY)
    items = list(text)
    if not items:
        _refuse(pointer, "the list is empty.", _TEXT_REMEDY)
    return _describe_items(items, pointer, home)


def _describe_items(items: list[Any], pointer: str, home: Path) -> Text:
    if all(map(_is_source, items)):
        return Text([item if isinstance(item, Mapping) else os.fspath(item) for item in items])
    if all(isinstance(item, str) for item in items):
        if any(map(_is_source, items)):
            detail = "some strings of the list name files, and others are text."
            _refuse(pointer, detail, "Use pathlib.Path for files, or {'text': ...} for documents.")
        return Text(_write_rows(({"text": item} for item in items), home))
    if all(isinstance(item, Mapping) for item in items):
        return Text(_write_rows(items, home), _find_format(items[0].keys()))
    kinds = sorted({type(item).__name__ for item in items})
    _refuse(pointer, f"a list cannot hold these together: {', '.join(kinds)}.", _TEXT_REMEDY)


def _is_source(item: Any) -> bool:
    """Whether ``item`` names a file, a folder or a dataset, and is no document itself."""
    if isinstance(item, Mapping):
        return "path" in item and item.keys() <= DatasetSpec.model_fields.keys()
    if isinstance(item, os.PathLike):
        return True
    if not isinstance(item, str) or any(map(str.isspace, item)):
        return False
    return find_suffix(Path(item)) in SUFFIXES


def _require_no_splits(text: Any, pointer: str) -> None:
    """Raise ``ConfigError`` for several splits of a dataset: which one is meant is not known."""
    library = sys.modules.get("datasets")
    if library is not None and isinstance(text, library.DatasetDict | library.IterableDatasetDict):
        _refuse(pointer, f"it holds the splits {', '.join(text)}.", "Give one: data['train'].")


def _list_columns(text: Any, pointer: str) -> list[str] | None:
    """Return the columns of a ``datasets.Dataset``; None for anything else."""
    library = sys.modules.get("datasets")  # whoever has such an object has imported it
    if library is None:
        return None
    if isinstance(text, library.Dataset):
        return list(text.column_names)
    if isinstance(text, library.IterableDataset):
        remedy = "Give {'path': ...} with data.streaming, or list(data.take(1000))."
        _refuse(pointer, "a stream need not end.", remedy)
    return None


def _find_format(columns: Iterable[str]) -> str | None:
    """Return the format that reads rows of these columns; None for plain text."""
    found = set(columns)
    if "text" in found:
        return None
    return next((name for name, needed in COLUMNS.items() if found >= set(needed)), None)


def _write_rows(rows: Iterable[Mapping[str, Any]], home: Path) -> str:
    """Write one JSON object a line below ``home``; return the path, named by the content."""
    folder = home / "data"
    digest = hashlib.sha256()
    with disk.storage_errors(folder):
        disk.make_folder(folder)
        handle, name = tempfile.mkstemp(prefix=disk.TEMPORARY_PREFIX, dir=folder)
        try:
            with os.fdopen(handle, "wb") as file:
                for row in rows:
                    # What JSON lacks, such as an image, is no text: the row keeps null for it.
                    line = json.dumps(row, ensure_ascii=False, default=lambda _: None) + "\n"
                    # Half of a surrogate pair has no UTF-8 form; the run says which row is wrong.
                    data = line.encode("utf-8", "surrogatepass")
                    digest.update(data)
                    file.write(data)
            path = folder / f"{digest.hexdigest()[:_DIGITS]}.jsonl"
            Path(name).replace(path)
        finally:
            disk.remove_path(Path(name))
    return str(path)
