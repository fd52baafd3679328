"""What ``datasets`` may read for a confined job: a dataset's own files, and none that it names elsewhere.

A dataset's card (README.md, .huggingface.yaml) says in its ``configs`` which files hold the rows, and the library goes
wherever that leads: to any path of this machine, to any URL. So it is asked three times, each time before the next:

    card      before anything is looked at    a pattern must not lead out of the dataset
    files     before anything is read         what the patterns came to must be the dataset's, and of a plain format
    columns   before the first row            an image or a sound is decoded from whatever file its row names

Imports no torch, and ``datasets`` only where it reads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from kd.config.data import DatasetSpec
from kd.errors import DataError

if TYPE_CHECKING:
    from kd.confinement import Confinement

#: Where a dataset says which files are its own.
CARDS = ("README.md", ".huggingface.yaml")
#: Formats whose files hold their rows and name no other file, and ``cache``: what was copied from the hub before.
PLAIN_FORMATS = {"arrow", "cache", "conll", "csv", "json", "parquet", "text", "xml"}
#: A longer card takes seconds to parse: that is left to the process that reads the dataset.
QUICK_BYTES = 2**18

Reason = tuple[str, str] | None
"""What is wrong, and what to do about it."""

_RELATIVE = "Have the dataset's card name its files by paths relative to its folder, without .. in them."


def open_confined(spec: DatasetSpec, streaming: bool, limits: Confinement) -> Iterable[dict[str, Any]]:
    """The rows of ``spec``, as ``datasets.load_dataset`` gives them; ``DataError`` where they are not its own."""
    from datasets import load_dataset_builder

    _require(spec, _card_of(spec, limits))
    copies = _copies_of(spec)
    builder = load_dataset_builder(spec.path, spec.name, revision=spec.revision, cache_dir=str(copies))
    _require(spec, builder_reason(builder, copies, limits))
    if streaming:
        rows = builder.as_streaming_dataset(split=spec.split)
    else:
        builder.download_and_prepare()
        rows = builder.as_dataset(split=spec.split)
    _require(spec, _columns(rows.features))
    return rows


def _require(spec: DatasetSpec, reason: Reason) -> None:
    if reason is not None:
        raise DataError(f"dataset {spec.path!r} {reason[0]}", reason[1])


def _copies_of(spec: DatasetSpec) -> Path:
    """Where the library keeps its copy: of a folder by the whole path, for it tells them apart by the name alone."""
    from datasets import config

    copies, folder = Path(config.HF_DATASETS_CACHE), Path(spec.path)
    if not folder.is_dir():
        return copies
    return copies / "confined" / hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:32]


# ---------------------------------------------------------------------- the card


def folder_reason(folder: Path, permits: Callable[[Path], bool]) -> Reason:
    """Whether the card of a local dataset leads out of what may be read; None where it is too long to be parsed now."""
    cards = _cards(folder)
    return None if any(file.stat().st_size > QUICK_BYTES for file in cards) else card_reason(cards, permits)


def _cards(folder: Path) -> list[Path]:
    return [file for name in CARDS if (file := folder / name).is_file()]


def card_reason(cards: Iterable[Path], permits: Callable[[Path], bool]) -> Reason:
    """The first pattern of ``cards`` that leads out of the dataset, and not to where ``permits`` allows."""
    for file in cards:
        try:
            patterns = list(_patterns(file))
        except Exception as error:  # yaml's own classes, a wrong type anywhere, a nesting too deep
            return f"has a {file.name} that cannot be read: {type(error).__name__}: {error}", "Correct it."
        for pattern in patterns:
            if leads_out(pattern, permits):
                return f"names {pattern!r} in its {file.name}, which jobs may not read.", _RELATIVE
    return None


def leads_out(pattern: str, permits: Callable[[Path], bool]) -> bool:
    """Whether a pattern of a card is a URL or a chain of them, goes upwards, or is absolute and not permitted."""
    if "://" in pattern or "::" in pattern or ".." in Path(pattern).parts:
        return True
    return Path(pattern).is_absolute() and not permits(Path(pattern))


def _card_of(spec: DatasetSpec, limits: Confinement) -> Reason:
    folder = Path(spec.path)
    if not folder.is_dir():
        return card_reason(_downloaded(spec), lambda _: False)
    cards = _cards(folder)
    turned = [file for file in (folder, *cards) if (file == folder or file.is_symlink()) and not limits.permits(file)]
    return _taken_in(turned[0].name) if turned else card_reason(cards, limits.permits)


def _downloaded(spec: DatasetSpec) -> list[Path]:
    """The cards of a dataset of the hub: what cannot be had now is no card, and the library says why."""
    from huggingface_hub import hf_hub_download

    cards = list[Path]()
    for name in CARDS:
        with suppress(Exception):  # none there, no network, gated, no id at all
            cards.append(Path(hf_hub_download(spec.path, name, repo_type="dataset", revision=spec.revision)))
    return cards


def _patterns(card: Path) -> Iterator[str]:
    """What a card names under ``data_files`` and ``data_dir``, in whatever form."""
    seen = set[int]()
    for config in _configs(card) or ():
        for field in ("data_files", "data_dir"):
            yield from _texts(config.get(field), seen)


def _configs(card: Path) -> Any:
    if card.suffix == ".md":
        from huggingface_hub import DatasetCard

        return DatasetCard.load(card).data.get("configs")
    return (yaml.safe_load(card.read_text(encoding="utf-8")) or {}).get("configs")


def _texts(value: Any, seen: set[int]) -> Iterator[str]:
    """Every text in a tree of lists and mappings, each branch once: an alias of yaml may stand in a thousand places."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list) and id(value) not in seen:
        seen.add(id(value))
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part, seen)


# ---------------------------------------------------------------------- the files


def builder_reason(builder: Any, copies: Path, limits: Confinement) -> Reason:
    """What is wrong with what a ``datasets.DatasetBuilder`` is about to read, and with where it would keep a copy."""
    if builder.name not in PLAIN_FORMATS:
        known = ", ".join(sorted(PLAIN_FORMATS - {"cache"}))
        return f"is of the format {builder.name!r}, whose files may name others.", f"Convert it to one of {known}."
    if builder.name == "cache" and "/" not in (builder.repo_id or ""):
        return "is not on the hub, and a copy of another of its name may not be read.", "Give an id with its owner."
    if not Path(builder.cache_dir).resolve().is_relative_to(copies.resolve()):
        return "has a configuration or version that leads out of the library's cache.", "Give plain names in its card."
    files = [file for split in (builder.config.data_files or {}).values() for file in split]
    if (file := foreign_file(files, builder.repo_id, limits)) is not None:
        return _taken_in(file)
    return None


def _taken_in(file: str) -> Reason:
    return f"takes in {file!r}, which jobs may not read.", _RELATIVE


def foreign_file(files: list[str], repo_id: str | None, limits: Confinement) -> str | None:
    """The first file that is not of the dataset ``repo_id`` of the hub, or not one that jobs may read where it is None.

    A URL, or a chain of them, is never a job's to read: a name may lead to another host from one moment to the next.
    """
    if repo_id is not None:
        base = f"hf://datasets/{repo_id}@"
        own = (each.startswith(base) and not leads_out(each.removeprefix(base), lambda _: False) for each in files)
        return next((each for each, is_own in zip(files, own, strict=True) if not is_own), None)
    if (remote := next((each for each in files if "://" in each or "::" in each), None)) is not None:
        return remote
    outside = limits.first_outside(map(Path, files))
    return None if outside is None else str(outside)


# ---------------------------------------------------------------------- the columns


def _columns(features: Any) -> Reason:
    named = [name for name, feature in (features or {}).items() if opens_files(feature)]
    if not named:
        return None
    return f"has the column {named[0]!r}, which is decoded from files that its rows name.", "Leave that column out."


def opens_files(feature: Any) -> bool:
    """Whether a column, or a part of it, is an image, a sound or the like: bytes, or the path of a file."""
    if isinstance(feature, dict):
        return any(map(opens_files, feature.values()))
    if isinstance(feature, list | tuple):
        return any(map(opens_files, feature))
    if (inner := getattr(feature, "feature", None)) is not None:
        return opens_files(inner)
    return hasattr(feature, "decode_example") and "path" in str(feature.pa_type)
