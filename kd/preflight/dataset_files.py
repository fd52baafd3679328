"""Let ``datasets`` read only a dataset's own files for a confined job.

The ``configs`` of a dataset's card (README.md, .huggingface.yaml) name the files with the rows. The
library follows these names to any path of this machine and to any URL. So there are three checks:

    card      before any look-up          no pattern may lead out of the dataset
    files     before anything is read     the files found must be the dataset's, in a plain format
    columns   before the first row        no image or sound, which is decoded from a file that a row
                                          names

Imports no torch, and ``datasets`` only to read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from kd.config.data import DatasetSpec
from kd.errors import DataError
from kd.text.rows import Row
from kd.text.sources import name_copy, open_saved_dataset
from kd.text.text_files import CARDS, is_saved_dataset

if TYPE_CHECKING:
    from kd.preflight.limits import Confinement

#: Formats whose files name no other file, and ``cache``, which is an earlier copy from the hub.
PLAIN_FORMATS = {"arrow", "cache", "conll", "csv", "json", "parquet", "text", "xml"}
#: Longer cards take seconds to parse; the process that reads the dataset checks them.
QUICK_BYTES = 2**18

#: A problem and its remedy; None if there is no problem.
Reason = tuple[str, str] | None

_RELATIVE = (
    "Have the dataset's card name its files by paths relative to its folder, without .. in them."
)


def open_confined(spec: DatasetSpec, streaming: bool, limits: Confinement) -> Iterable[Row]:
    """Open the rows of ``spec`` as ``datasets.load_dataset`` does.

    Raises ``DataError`` if they are not in the dataset's own files.
    """
    from datasets import config, load_dataset_builder

    if is_saved_dataset(Path(spec.path)):
        return _open_saved(spec, limits)
    _require(spec, _check_own_cards(spec, limits))
    # The library's copy of a folder has a place of its own.
    copies, folder = Path(config.HF_DATASETS_CACHE), Path(spec.path)
    if folder.is_dir():
        copies = copies / "confined" / name_copy(folder)
    builder = load_dataset_builder(
        spec.path, spec.name, revision=spec.revision, cache_dir=str(copies)
    )
    _require(spec, check_builder(builder, copies, limits))
    if streaming:
        rows = builder.as_streaming_dataset(split=spec.split)
    else:
        builder.download_and_prepare()
        rows = builder.as_dataset(split=spec.split)
    _require(spec, _check_columns(rows.features))
    return rows


def _open_saved(spec: DatasetSpec, limits: Confinement) -> Iterable[Row]:
    folder = Path(spec.path)
    outside = limits.find_first_outside([folder, *folder.rglob("*")])
    _require(spec, None if outside is None else _refuse_file(outside.name))
    _require(spec, check_saved_names(folder))
    rows = open_saved_dataset(spec)
    _require(spec, _check_columns(rows.features))
    return rows


def check_saved_names(folder: Path) -> Reason:
    """Find the first file or split that a saved dataset names outside its own folder."""
    for file in sorted(folder.rglob("*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        named = [str(each) for each in content.get("splits") or () if isinstance(each, str)]
        for field in ("_data_files", "_indices_data_files"):
            named += [str(each.get("filename")) for each in content.get(field) or ()]
        for name in named:
            if leads_out(name, lambda _: False):
                return f"names {name!r} in its {file.name}, which jobs may not read.", _RELATIVE
    return None


def require_permitted(spec: DatasetSpec, files: Iterable[Path], limits: Confinement) -> None:
    """Raise ``DataError`` if a card of ``spec`` or one of its ``files`` leads out of it."""
    _require(spec, _check_own_cards(spec, limits))
    outside = limits.find_first_outside(files)
    _require(spec, None if outside is None else _refuse_file(outside.name))


def _require(spec: DatasetSpec, reason: Reason) -> None:
    if reason is not None:
        raise DataError(f"dataset {spec.path!r} {reason[0]}", reason[1])


# ---------------------------------------------------------------------- the card


def check_dataset_folder(folder: Path, permits: Callable[[Path], bool]) -> Reason:
    """Check that the card of a local dataset names only permitted files; skip a very long card."""
    cards = _find_cards(folder)
    if any(file.stat().st_size > QUICK_BYTES for file in cards):
        return None
    return check_cards(cards, permits)


def _find_cards(folder: Path) -> list[Path]:
    return [file for name in CARDS if (file := folder / name).is_file()]


def check_cards(cards: Iterable[Path], permits: Callable[[Path], bool]) -> Reason:
    """Find the first pattern of ``cards`` that leads out of the dataset to a forbidden place."""
    for file in cards:
        try:
            patterns = list(_list_patterns(file))
        except Exception as error:  # errors of yaml, a wrong type, or too deep a nesting
            what = f"has a {file.name} that cannot be read: {type(error).__name__}: {error}"
            return what, "Correct it."
        for pattern in patterns:
            if leads_out(pattern, permits):
                return f"names {pattern!r} in its {file.name}, which jobs may not read.", _RELATIVE
    return None


def leads_out(pattern: str, permits: Callable[[Path], bool]) -> bool:
    """Whether a pattern of a card is a URL or a chain of them, has .., or is a forbidden path."""
    if "://" in pattern or "::" in pattern or ".." in Path(pattern).parts:
        return True
    return Path(pattern).is_absolute() and not permits(Path(pattern))


def _check_own_cards(spec: DatasetSpec, limits: Confinement) -> Reason:
    folder = Path(spec.path)
    if not folder.is_dir():
        return check_cards(_download_cards(spec), lambda _: False)
    cards = _find_cards(folder)
    # A link may have changed since the job was taken.
    for file in (folder, *filter(Path.is_symlink, cards)):
        if not limits.permits(file):
            return _refuse_file(file.name)
    return check_cards(cards, limits.permits)


def _download_cards(spec: DatasetSpec) -> list[Path]:
    """Download the cards of a dataset of the hub; skip any that fail, which the library reports."""
    from huggingface_hub import hf_hub_download

    cards = list[Path]()
    for name in CARDS:
        with suppress(Exception):  # none there, no network, gated, no id at all
            card = hf_hub_download(spec.path, name, repo_type="dataset", revision=spec.revision)
            cards.append(Path(card))
    return cards


def _list_patterns(card: Path) -> Iterator[str]:
    """Yield every text under ``data_files`` and ``data_dir`` of a card."""
    seen = set[int]()
    if card.suffix == ".md":
        from huggingface_hub import DatasetCard

        configs = DatasetCard.load(card).data.get("configs")
    else:
        configs = (yaml.safe_load(card.read_text(encoding="utf-8")) or {}).get("configs")
    for config in configs or ():
        for field in ("data_files", "data_dir"):
            yield from _collect_texts(config.get(field), seen)


def _collect_texts(value: Any, seen: set[int]) -> Iterator[str]:
    """Yield every text in a tree of lists and mappings.

    Each branch is visited once, because an alias of YAML may repeat it thousands of times.
    """
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list) and id(value) not in seen:
        seen.add(id(value))
        for part in value.values() if isinstance(value, dict) else value:
            yield from _collect_texts(part, seen)


# ---------------------------------------------------------------------- the files


def check_builder(builder: Any, copies: Path, limits: Confinement) -> Reason:
    """Check what a ``datasets.DatasetBuilder`` is about to read, and where it would keep a copy."""
    if builder.name not in PLAIN_FORMATS:
        known = ", ".join(sorted(PLAIN_FORMATS - {"cache"}))
        what = f"is of the format {builder.name!r}, whose files may name others."
        return what, f"Convert it to one of {known}."
    # Without an owner the id is a folder's last name, which another job's dataset may share.
    if builder.name == "cache" and "/" not in (builder.repo_id or ""):
        what = "is not on the hub, and a copy of another dataset with its name may not be read."
        return what, "Give an id with its owner."
    if not Path(builder.cache_dir).resolve().is_relative_to(copies.resolve()):
        what = "has a configuration or version that leads out of the library's cache."
        return what, "Give plain names in its card."
    files = [file for split in (builder.config.data_files or {}).values() for file in split]
    file = find_foreign_file(files, builder.repo_id, limits)
    return None if file is None else _refuse_file(file)


def _refuse_file(file: str) -> Reason:
    return f"includes {file!r}, which jobs may not read.", _RELATIVE


def find_foreign_file(files: list[str], repo_id: str | None, limits: Confinement) -> str | None:
    """Find the first file outside the dataset ``repo_id`` of the hub.

    If ``repo_id`` is None, find the first file that jobs may not read.

    A job may never read a URL or a chain of them, because a name may lead to another host at any
    moment.
    """
    if repo_id is not None:
        # The library resolves files of the hub to such URLs, with the revision after the @.
        base = f"hf://datasets/{repo_id}@"
        for each in files:
            inner = each.removeprefix(base)
            if inner == each or leads_out(inner, lambda _: False):
                return each
        return None
    if remote := [each for each in files if "://" in each or "::" in each]:
        return remote[0]
    outside = limits.find_first_outside(map(Path, files))
    return None if outside is None else str(outside)


# ---------------------------------------------------------------------- the columns


def _check_columns(features: Any) -> Reason:
    named = [name for name, feature in (features or {}).items() if opens_files(feature)]
    if not named:
        return None
    what = f"has the column {named[0]!r}, which is decoded from files that the rows name."
    return what, "Remove that column."


def opens_files(feature: Any) -> bool:
    """Whether a column, or a part of it, may hold paths of files: an image, a sound or the like."""
    if isinstance(feature, dict | list | tuple):
        return any(map(opens_files, feature.values() if isinstance(feature, dict) else feature))
    # A list of a fixed type wraps the type of its items.
    if (inner := getattr(feature, "feature", None)) is not None:
        return opens_files(inner)
    return hasattr(feature, "decode_example") and "path" in str(feature.pa_type)
