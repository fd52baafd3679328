"""Check the files that a job names, and the disk, before any model is loaded. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from cache.disk import find_existing
from cache.errors import CacheError, StoreError
from cache.manifest import CacheIdentity, list_differences
from cache.remote.bucket import StoredObject
from kd.addresses import HUB_ID
from kd.buckets.inputs import describe_nothing, is_stored_name, list_stored, may_read_buckets
from kd.capture.codec_identity import EARLIER_RECORDS, make_codec_identity
from kd.config.data import DataConfig, DatasetSpec
from kd.config.job import JobConfig
from kd.errors import DataError, ModelError, Problem
from kd.files import Disk, find_caches
from kd.models.folder import ModelFolder, locate_model
from kd.preflight.confinement import describe_missing_cache
from kd.progress import Notice, ignore_notice
from kd.text.mixtures import name_source
from kd.text.text_files import FoundFiles, choose_format, find_source_files, list_stored_texts

#: Bytes that the disk of the data folder must have left.
FREE_BYTES = 64 * 2**20
#: Larger files are assumed to hold text, and are not read.
_PLAIN_TEXT = 2**16


# ---------------------------------------------------------------------- models


def find_student_problems(config: JobConfig, root: Path) -> Iterator[Problem]:
    """Find a missing or incomplete model or tokenizer of the student, and a context too short."""
    student = config.student
    if student is None:
        return
    if student.model is not None:
        pointer = "/student/model"
        yield from guard_access(pointer, check_model(pointer, student.model, root))
        own = ModelFolder(locate_model(student.model, root))
        require = ModelFolder.require_trainable_weights
        yield from guard_access(pointer, ask_folder(pointer, own, require))
        # A sealed cache fixes the length of its sequences.
        if config.cache.fingerprint is None:
            found = check_context(student.model, config.data.sequence_length, root)
            yield from guard_access("/data/sequence_length", found)
    if student.init is not None and student.init.tokenizer is not None:
        pointer = "/student/init/tokenizer"
        yield from guard_access(pointer, check_tokenizer(pointer, student.init.tokenizer, root))


def check_context(
    model: str, length: int, root: Path, pointer: str = "/data/sequence_length"
) -> Iterator[Problem]:
    """Find that the context of a model is shorter than ``length`` tokens."""
    folder = ModelFolder(locate_model(model, root))
    context = None
    with suppress(OSError, ModelError):  # loading the model will report it
        context = folder.context
    if context is not None and length > context:
        detail = f"{model!r} has a context of {context} tokens, but got {length}."
        yield Problem(pointer, detail, f"Set it to {context} or less.")


def guard_access(pointer: str, problems: Iterator[Problem]) -> Iterator[Problem]:
    """Pass on ``problems``; if the files cannot be looked at, yield that as a problem."""
    try:
        yield from problems
    except PermissionError as error:
        detail = f"{error.filename} may not be read."
        yield Problem(pointer, detail, "Check the mode and owner of its folders.")
    except (DataError, StoreError) as error:
        yield Problem(pointer, error.detail, error.remedy)
    # A name too long, a loop of links, or a byte that no path may have.
    except (OSError, ValueError) as error:
        yield Problem(pointer, f"it cannot be read: {error}.", "Check how it is written.")


def check_tokenizer(pointer: str, name: str, root: Path) -> Iterator[Problem]:
    """Find that the folder of a tokenizer is missing or cannot be used."""
    if is_stored_name(name):
        yield from _check_stored(pointer, name)
    elif not (root / name).is_dir() and not HUB_ID.match(name):
        yield Problem(pointer, f"no folder {name!r}.", _explain_root(root))
    else:
        yield from _refuse(pointer, ModelFolder(root / name).require_own_files)


def _refuse(pointer: str, require: Callable[[], None]) -> Iterator[Problem]:
    """Find what ``require`` raises as ``ModelError``."""
    try:
        require()
    except ModelError as error:
        yield Problem(pointer, error.detail, error.remedy)


def check_model(
    pointer: str, model: str, root: Path, gguf_file: str | None = None
) -> Iterator[Problem]:
    """Find that the files of a model are missing or cannot be used."""
    folder = root / model
    if is_stored_name(model):
        stored = yield from _check_stored(pointer, model)
        if stored:
            yield from _check_names(pointer, model, root, stored, gguf_file)
    elif folder.is_file():
        remedy = "Give its folder; a GGUF file is named by teacher.gguf_file."
        yield Problem(pointer, f"{model!r} is a file.", remedy)
    elif not folder.is_dir():
        detail = f"no folder {model!r}, and it does not have the form of a hub id."
        missing = not HUB_ID.match(model)
        if not missing and os.environ.get("HF_HUB_OFFLINE") == "1":
            detail = (
                f"{model!r} is not a local folder, and the hub is offline and has no local copy of "
                "it."
            )
            copy = ModelFolder.find(model, root)
            missing = copy is None or not copy.has_config
        if missing:
            yield Problem(pointer, detail, _explain_root(root))
    else:
        names = [path.name for path in folder.iterdir()]
        if gguf_file is not None and (folder / gguf_file).is_file():
            names.append(gguf_file)
        yield from _check_names(pointer, model, root, names, gguf_file)


def _check_names(
    pointer: str, model: str, root: Path, names: Collection[str], gguf_file: str | None
) -> Iterator[Problem]:
    """Find what the files of a model lack, by their ``names``, and a model that cannot be used."""
    ggufs = sorted(name for name in names if name.endswith(".gguf"))
    if gguf_file is not None:
        if gguf_file not in names:
            there = f"There are: {', '.join(ggufs)}." if ggufs else "There is no *.gguf in it."
            yield Problem("/teacher/gguf_file", f"{model}/{gguf_file} does not exist.", there)
            return
        found = ModelFolder(locate_model(model, root))
        yield from _refuse("/teacher/gguf_file", partial(found.require_own_files, gguf_file))
        return
    suggested = f"Set teacher.gguf_file: {' or '.join(ggufs)}." if ggufs else ""
    if ggufs and pointer == "/student/model":
        suggested = (
            "A student must be the folder of a Hugging Face model with safetensors: GGUF is for "
            "teachers only."
        )
    if "config.json" not in names:
        remedy = suggested or "Give the folder of a Hugging Face model."
        yield Problem(pointer, f"{model!r} holds no config.json.", remedy)
    elif not any("/" not in name and name.endswith(".safetensors") for name in names):
        remedy = suggested or "Convert its weights to safetensors."
        yield Problem(pointer, f"{model!r} holds no *.safetensors weights.", remedy)
    else:
        # Of a model in a bucket this downloads the small files.
        found = ModelFolder(locate_model(model, root))
        yield from _refuse(pointer, found.require_own_files)
        yield from ask_folder(pointer, found, ModelFolder.require_decoder)


def _check_stored(pointer: str, url: str) -> Generator[Problem, None, Mapping[str, StoredObject]]:
    """Find that nothing lies at the URL of a bucket; return what does, if buckets may be read."""
    if not may_read_buckets():
        return {}
    stored = list_stored(url).objects
    if not stored:
        yield Problem(pointer, *describe_nothing(url))
    return stored


def ask_folder(
    pointer: str, folder: ModelFolder, require: Callable[[ModelFolder], None]
) -> Iterator[Problem]:
    """Find what ``require`` refuses of a model, as far as its config.json can be read."""
    is_readable = False
    with suppress(OSError, ModelError):  # loading the model will report it
        is_readable = bool(folder.config)
    if is_readable:
        yield from _refuse(pointer, partial(require, folder))


def _explain_root(root: Path) -> str:
    return f"Check the path: relative ones are taken from {root.resolve()}."


# ---------------------------------------------------------------------- sealed caches


def find_cache_problems(config: JobConfig, home: Path) -> Iterator[Problem]:
    """Find that a sealed cache which the job names is not in ``home``, or cannot serve its loss."""
    name = config.cache.fingerprint
    if name is None or not config.needs_cache:
        return
    identity = yield from _read_identity(config, home, name, "fingerprint")
    if identity is not None and config.train is not None:
        yield from config.loss.list_unserved(identity.record_codec())


def _read_identity(
    config: JobConfig, home: Path, name: str, field: str
) -> Generator[Problem, None, CacheIdentity | None]:
    """Return the identity of the cache ``name``; find that it cannot be read."""
    folder = find_caches(home, config.cache.store) / name
    # Only now, because it imports zarr.
    from cache.store import has_manifest, read_manifest

    try:
        if has_manifest(folder):
            return read_manifest(folder).identity
        yield describe_missing_cache(name, home, field)
    except CacheError as error:
        yield Problem(f"/cache/{field}", error.detail, error.remedy)
    return None


def find_extension_problems(config: JobConfig, home: Path) -> Iterator[Problem]:
    """Find that the cache which the job extends is not in ``home``, or has other settings.

    Teacher, tokenizer and text are compared when the capture begins, which reads them.
    """
    name = config.cache.extends
    if name is None or not config.captures:
        return
    known = yield from _read_identity(config, home, name, "extends")
    if known is None:
        return
    if config.cache.rules.dithered and not known.codec.clusters:
        detail = f"the cache {name}: {EARLIER_RECORDS}"
        yield Problem("/cache/extends", detail, "Remove cache.extends to capture all of the text.")
        return
    own = known.codec
    if config.keeps_entropies and (why := known.record_codec().why_unweighted()):
        remedy = "Remove cache.extends to capture all of the text with its entropies."
        yield Problem("/cache/extends", f"the cache {name}: {why}.", remedy)
        return
    # The codec's version depends on the teacher's precision too, which only loading shows.
    # Tables of the dither and entropies are those of the cache.
    codec = make_codec_identity(config.cache, own.entropies, "", own.clusters, own.fitted)
    codec = replace(codec, version=own.version)
    asked = config.data
    packing = known.data.packing if asked.packing == "auto" else asked.packing
    data = replace(known.data, sequence_length=asked.sequence_length, packing=packing)
    for difference in list_differences(replace(known, codec=codec, data=data), known):
        detail = f"the cache {name} has another setting: {difference}."
        remedy = "Set it as in that cache, or remove cache.extends to capture all of the text."
        yield Problem("/cache/extends", detail, remedy)


# ---------------------------------------------------------------------- text


def find_text_problems(
    config: JobConfig, root: Path, note: Callable[[Notice], None] = ignore_notice
) -> Iterator[Problem]:
    """Find text files that are missing, empty, unreadable, or of an unknown format.

    ``note`` receives what a folder or a pattern leaves out.
    """
    for field in ("train", "validation"):
        looked_at = set[str | DatasetSpec]()
        for number, source in enumerate(getattr(config.data, field)):
            # A path that comes again, so that its text is read again, is looked at once.
            if source not in looked_at:
                looked_at.add(source)
                pointer = f"/data/{field}/{number}"
                check = _check_source(pointer, source, field, root, config.data, note)
                yield from guard_access(pointer, check)


def _check_source(
    pointer: str,
    source: str | DatasetSpec,
    field: str,
    root: Path,
    data: DataConfig,
    note: Callable[[Notice], None],
) -> Iterator[Problem]:
    """Find what is wrong with a source by names and sizes; no text of a bucket is downloaded."""
    name = name_source(source)
    if isinstance(source, str) and is_stored_name(source):
        stored = yield from _check_stored(pointer, source)
        if not stored:
            return
        names, left_out = list_stored_texts(source, field)
        found = FoundFiles(list(map(Path, names)), left_out)
        has_text = any(stored[each].bytes for each in names)
    else:
        listed = find_source_files(source, root, field)
        if listed is None:
            return
        found = listed
        if not found.files:
            yield Problem(pointer, found.refuse_nothing(source).detail, _explain_root(root))
            return
        # One file with text is enough: a folder may hold empty ones.
        has_text = any(map(_has_text, found.files))
        for file in found.files:
            if not os.access(file, os.R_OK):
                detail = f"{file.name!r} cannot be read."
                yield Problem(pointer, detail, "Check its mode and owner.")
    for notice in found.list_notices():
        note(notice)
    if not has_text:
        yield Problem(pointer, f"{name!r} holds no text.", "Give a file with text in it.")
    for file in found.files:
        choose_format(file, data)


def _has_text(path: Path) -> bool:
    """Whether ``path`` holds anything but white space; a large file is not read."""
    size = path.stat().st_size
    if not 0 < size <= _PLAIN_TEXT:
        return size > 0
    return not os.access(path, os.R_OK) or bool(path.read_bytes().strip())


# ---------------------------------------------------------------------- disk


def find_disk_problems(home: Path, store: str | None) -> Iterator[Problem]:
    """Find that the data folder or that of the caches cannot be written, or has no room left."""
    yield from guard_access("", _check_storage(home, "data folder", "KD_HOME"))
    caches = find_caches(home, store)
    if not caches.is_relative_to(home):
        setting = "cache.store" if store else "KD_STORE"
        yield from guard_access("", _check_storage(caches, "folder of the caches", setting))


def _check_storage(folder: Path, what: str, setting: str) -> Iterator[Problem]:
    # The folder is made later, so the nearest folder that exists is checked.
    existing = find_existing(folder)
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        remedy = f"Check its owner and mode, or set {setting}."
        yield Problem("", f"the {what} {folder} cannot be written.", remedy)
    elif lacking := Disk.of(folder).find_shortage(FREE_BYTES):
        remedy = f"Free space, or set {setting} to another disk."
        yield Problem("", f"the disk of {folder} has {lacking}.", remedy)
