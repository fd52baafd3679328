"""Files of text: which there are, and in which format.

One rule says which files of a folder, of a pattern, of a bucket and of ``{path: FOLDER}`` are read:

    read       files with an ending of ``SUFFIXES``, in any case; folders that are linked, too
    left out   hidden files and folders (their names begin with . or _), files about the data
               (README, LICENSE, dataset_info.json, a.txt.json beside a.txt), other endings, and the
               files of other splits, if the names tell splits apart

What is left out is counted and named. A file that is named itself is always read. The library
``datasets`` reads the datasets of the hub, those that it saved, and folders that only it
understands (``find_source_files``).
"""

from __future__ import annotations

import fnmatch
import glob
import itertools
import os
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from kd.addresses import SUFFIXES, find_suffix
from kd.buckets.inputs import download_files, is_stored_name, list_stored
from kd.config.data import DataConfig, DatasetSpec
from kd.errors import DataError
from kd.progress import Notice

#: Files of one split that ``save_to_disk`` of ``datasets`` wrote, and the one above several splits.
SAVED_SPLIT = ("state.json", "dataset_info.json")
SAVED_SPLITS = "dataset_dict.json"
#: The files in which a dataset names its files.
CARDS = ("README.md", ".huggingface.yaml")
#: Why something without an ending of text may be left out.
_NO_FILE = "folders and devices"
_HIDDEN = "hidden files and folders"
_OTHER_SPLIT = "files of other splits"
#: What the names of files about the data begin with, and whole names of such files.
_ABOUT = re.compile(r"(readme|licen[cs]e|copying|changelog|contributing|citation)([-_.]|$)")
_ABOUT_NAMES = frozenset(
    ["dataset_info", "dataset_infos", "dataset_dict", "state", "metadata", "manifest", "config",
     "croissant", "tokenizer", "tokenizer_config", "special_tokens_map", "generation_config"]
)  # fmt: skip
#: Words at the begin or the end of a name that tell its split, as ``datasets`` knows them. The
#: numbers of parts may stand after them.
_WORDS = {
    "train": "train|training",
    "validation": "validation|valid|val|dev",
    "test": "test|testing|eval|evaluation",
}
_SPLITS = {
    split: re.compile(rf"(.*[-_.])?({words})([-_.]?\d+([-_.]of[-_.]\d+)?)?|({words})[-_.].*")
    for split, words in _WORDS.items()
}


def _enter(folder: Path) -> bool:
    """Allow every linked folder to be looked into; a caller may give a stricter rule."""
    return True


@dataclass(frozen=True)
class FoundFiles:
    """The files of a source, sorted, and the names of those that are left out, by the reason."""

    files: list[Path] = field(default_factory=list)
    left_out: Mapping[str, list[str]] = field(default_factory=dict)

    def refuse_nothing(self, source: str | DatasetSpec, where: str = "") -> DataError:
        """Return the error for a ``source`` without files; ``where`` stands before it."""
        detail = f"{where}no file matches {source!r}."
        if isinstance(source, DatasetSpec):
            detail = f"{where}{source.path!r} has no file of the split {source.split!r}."
        found = [f"{len(names)} {reason}" for reason, names in self.left_out.items()]
        left_out = f" Left out: {', '.join(found)}." if found else ""
        return DataError(detail + left_out, "Give a file, a folder or a glob.")

    def list_notices(self) -> Iterator[Notice]:
        """Yield what is left out, one notice for each reason."""
        for reason, names in self.left_out.items():
            remedy = "To read such a file, name it itself."
            yield Notice(f"{reason}, left out", len(names), repr(names[0]), remedy)


def find_source_files(
    source: str | DatasetSpec, root: Path = Path(), split: str = "train"
) -> FoundFiles | None:
    """List the files of a source of ``split`` (train or validation); None: ``datasets`` reads it.

    That is so for ids of the hub, for what ``save_to_disk`` wrote, and for folders without a file
    of text, with a card that lists files, or with a name or several splits in the job. A split that
    the job names itself must be there.
    """
    if isinstance(source, str):
        return None if is_saved_dataset(root / source) else find_files(source, root, split)
    folder = root / source.path
    wanted = source.split.partition("[")[0]
    own = source.name is None and wanted in _SPLITS and "+" not in source.split
    if not own or not folder.is_dir() or is_saved_dataset(folder) or _lists_files(folder):
        return None
    found = find_files(source.path, root, wanted, named=True)
    return found if found.files or _OTHER_SPLIT in found.left_out else None


def _lists_files(folder: Path) -> bool:
    """Return whether the card of a dataset lists its files."""
    for card in (folder / name for name in CARDS):
        try:
            content = card.read_bytes() if card.is_file() else b""
        except OSError as error:
            raise refuse_unreadable(error) from None
        # The header of a README stands between two lines of dashes.
        is_plain = card.suffix == ".md" and not content.lstrip().startswith(b"---")
        header = content.partition(b"\n---")[0] if card.suffix == ".md" else content
        if b"configs" in header and not is_plain:
            return True
    return False


def find_files(
    source: str,
    root: Path = Path(),
    split: str = "train",
    enter: Callable[[Path], bool] = _enter,
    named: bool = False,
) -> FoundFiles:
    """List the files of ``split`` that a path, folder or pattern names.

    A saved dataset has none: its files cannot be read one by one. Those of a bucket are downloaded.
    ``named``: the job names the split (train, validation or test), and no other is read for it.
    ``enter`` says of a folder that is linked whether to look into it. Raises ``DataError`` for what
    cannot be looked at, such as a folder without permission or a link to nowhere.
    """
    if is_stored_name(source):
        names, left_out = list_stored_texts(source, split)
        folder = download_files(source, names)
        return FoundFiles([folder / name for name in names], left_out)
    path = root / source
    try:
        if path.is_file():
            return FoundFiles([path])
        if is_saved_dataset(path):
            return FoundFiles()
        base, parts = (path, ["**"]) if path.is_dir() else _split_pattern(path)
        found = dict(_expand(base, parts, enter))
    except OSError as error:
        raise refuse_unreadable(error) from None
    below = {path.relative_to(base).as_posix(): found[path] for path in sorted(found)}
    chosen, left_out = _choose(below, split, named)
    return FoundFiles([base / name for name in chosen], left_out)


def list_all_files(folder: Path) -> list[Path]:
    """List the files of a dataset's folder, sorted; hidden folders are not looked into."""
    try:
        found = _expand(folder, ["**"], _enter) if folder.is_dir() else ()
        return sorted(path for path, is_file in found if is_file)
    except OSError as error:
        raise refuse_unreadable(error) from None


def describe_file(file: Path) -> list[str | int]:
    """Return the paths and numbers by which a file is known: they change when its bytes do."""
    about = file.stat()
    times = (about.st_mtime_ns, about.st_ctime_ns)
    return [str(file.absolute()), str(file.resolve()), about.st_size, about.st_ino, *times]


def refuse_unreadable(error: OSError) -> DataError:
    """Return the error for a file or folder that cannot be looked at."""
    return DataError(
        f"{error.filename} may not be read: {error.strerror}.",
        f"Check its mode and owner, and those of its folders, for the user {os.geteuid()} who "
        "reads it.",
    )


def list_stored_texts(url: str, split: str = "train") -> tuple[list[str], dict[str, list[str]]]:
    """List the files of text at the URL of a bucket, sorted: that object, or those below it.

    Also returns what is left out, by the reason.
    """
    found = sorted(list_stored(url).objects)
    if len(found) == 1 and found[0] == url.rstrip("/").rpartition("/")[2]:
        return found, {}
    return _choose(dict.fromkeys(found, True), split)


def is_saved_dataset(folder: Path) -> bool:
    """Return whether ``save_to_disk`` of ``datasets`` wrote ``folder``: one split, or several."""
    one = [folder / name for name in SAVED_SPLIT]
    return (folder / SAVED_SPLITS).is_file() or all(map(Path.is_file, one))


def choose_format(path: Path, config: DataConfig) -> str:
    """Return the format in which to read ``path``: the configured one, or by its suffix."""
    if config.format != "auto":
        return config.format
    try:
        return SUFFIXES[find_suffix(path)]
    except KeyError:
        detail = f"{path}: cannot tell the format from the suffix {find_suffix(path)!r}."
        raise DataError(detail, f"Use one of {', '.join(SUFFIXES)}, or set data.format.") from None


# ---------------------------------------------------------------------- which are read


def _choose(
    names: Mapping[str, bool], split: str, named: bool = False
) -> tuple[list[str], dict[str, list[str]]]:
    """Choose the names to read, and return the others by the reason; False: it is no file."""
    left_out = defaultdict[str, list[str]](list)
    splits = dict[str, str]()
    for name, is_file in names.items():
        hidden = any(map(_is_hidden, PurePath(name).parts))
        if reason := _HIDDEN if hidden else _find_reason(name, names) if is_file else _NO_FILE:
            left_out[reason].append(name)
        else:
            splits[name] = _find_split(name)
    kept = _choose_splits(set(splits.values()), split, named)
    if others := [name for name, found in splits.items() if found not in kept]:
        left_out[_OTHER_SPLIT] = others
    return [name for name, found in splits.items() if found in kept], dict(left_out)


def _find_reason(name: str, names: Mapping[str, bool]) -> str:
    """Say why the file ``name`` is left out; nothing if it is not."""
    path = PurePath(name)
    about = path.stem.lower()
    if find_suffix(path) not in SUFFIXES:
        return "files without an ending of text"
    beside = find_suffix(PurePath(about)) in SUFFIXES and str(path.with_suffix("")) in names
    told = about in _ABOUT_NAMES or _ABOUT.match(about) is not None
    return "files about the data" if beside or told else ""


def _is_hidden(name: str) -> bool:
    return name.startswith((".", "_"))


def _find_split(name: str) -> str:
    """Return the split that a part of a name tells; nothing if none does."""
    *folders, file = PurePath(name).parts
    for part in (file.partition(".")[0], *reversed(folders)):
        for split, pattern in _SPLITS.items():
            if pattern.fullmatch(part.lower()):
                return split
    return ""


def _choose_splits(found: set[str], split: str, named: bool) -> set[str]:
    """Choose which of the splits that names tell (nothing: none) are read as ``split``."""
    if len(found) < 2 and not named:
        return found
    if split == "train":
        return found - {"validation", "test"}
    if named:
        return found & {split}
    held_out = [each for each in ("validation", "test") if each in found]
    return {held_out[0]} if held_out else found - {"train"}


# ---------------------------------------------------------------------- folders and patterns


def _split_pattern(path: Path) -> tuple[Path, list[str]]:
    """Split a pattern into the folder above it and the parts that are matched."""
    fixed = list(itertools.takewhile(lambda part: not glob.has_magic(part), path.parts[:-1]))
    return Path(*fixed), list(path.parts[len(fixed) :])


def _expand(
    folder: Path, parts: list[str], enter: Callable[[Path], bool], deep: bool = False
) -> Iterator[tuple[Path, bool]]:
    """Yield what ``parts`` of a pattern match in ``folder``, and whether it is a file.

    ``deep``: whether the folders in it are visited too.
    """
    part, *rest = parts
    if part == "**":
        for each in _list_folders(folder, enter):
            yield from _expand(each, rest or [""], enter, deep=True)
        return
    for entry in _list(folder, part):
        path = Path(entry)
        if entry.is_dir():
            if rest and (not entry.is_symlink() or enter(path)):
                yield from _expand(path, rest, enter)
            elif not rest and (not deep or _is_hidden(entry.name)):
                yield path, False
        elif not rest:
            yield path, _require_target(path, entry.is_file())


def _list(folder: Path, part: str) -> list[os.DirEntry[str] | Path]:
    """List what in ``folder`` has a name that matches ``part``, all if that is empty."""
    if part and not glob.has_magic(part):
        return [folder / part] if os.path.lexists(folder / part) else []
    try:
        with os.scandir(folder) as found:
            entries = list(found)
    except (FileNotFoundError, NotADirectoryError):
        return []
    if not part:
        return list(entries)
    return [
        each
        for each in entries
        if fnmatch.fnmatchcase(each.name, part)
        and (part.startswith(".") or not each.name.startswith("."))
    ]


def _list_folders(folder: Path, enter: Callable[[Path], bool]) -> Iterator[Path]:
    """Yield a folder and those below it, each once; linked ones come after the others."""
    seen = set[tuple[int, int]]()
    waiting = deque([folder])
    while waiting:
        each = waiting.pop()
        about = each.stat()
        if (about.st_dev, about.st_ino) in seen:
            continue
        seen.add((about.st_dev, about.st_ino))
        yield each
        for entry in _list(each, ""):
            if _is_hidden(entry.name) or not entry.is_dir():
                continue
            if not entry.is_symlink():
                waiting.append(Path(entry))
            elif enter(Path(entry)):
                waiting.appendleft(Path(entry))


def _require_target(path: Path, is_file: bool) -> bool:
    """Pass on whether ``path`` is a file; refuse a link to nowhere that would be read."""
    wanted = find_suffix(path) in ("", *SUFFIXES) and not _is_hidden(path.name)
    if wanted and not is_file and path.is_symlink() and not path.exists():
        target = str(path.readlink())
        detail = f"{path} is a link to {target!r}, where nothing is."
        raise DataError(detail, "Correct or remove the link.")
    return is_file
