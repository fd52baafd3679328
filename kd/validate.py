"""What can be known to be wrong with a job before any model is loaded. Imports no torch: the API asks it at POST."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from kd.config.job import JobConfig
from kd.confinement import Confinement, confinement_problems, no_such_cache
from kd.data import SUFFIXES, find_files, suffix_of
from kd.errors import Problem
from kd.search.space import space_problems

HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?\Z")
FREE_BYTES = 64 * 2**20
_PLAIN_TEXT = 2**16


def check_inputs(config: JobConfig, root: Path, home: Path, limits: Confinement | None = None) -> list[Problem]:
    """Every problem of a search's space, and every one that the file system shows.

    Relative paths are taken from ``root``, output goes below ``home``. Where the job names what ``limits`` do not
    grant, nothing that it names is looked at; None = everything is granted.
    """
    if limits is not None and (refused := confinement_problems(config, root, limits)):
        return [*space_problems(config), *refused]
    files = [*_models(config, root), *_texts(config, root), *_sealed(config, home)]
    return [*space_problems(config), *files, *_allowed("", _storage(home))]


def remote_code_allowed() -> bool:
    """Whether the operator lets jobs run Python that comes with a model (KD_TRUST_REMOTE_CODE)."""
    return os.environ.get("KD_TRUST_REMOTE_CODE", "").lower() in {"1", "true", "yes", "on"}


# ---------------------------------------------------------------------- models


def _models(config: JobConfig, root: Path) -> Iterator[Problem]:
    teacher, student = config.teacher, config.student
    if teacher is not None and teacher.tokenizer is not None:
        yield from _allowed("/teacher/tokenizer", _tokenizer("/teacher/tokenizer", teacher.tokenizer, root))
    elif teacher is not None and _teacher_is_run(config):
        yield from _allowed("/teacher/model", _model("/teacher/model", teacher.model, root, teacher.gguf_file))
        if teacher.trust_remote_code and not remote_code_allowed():
            yield Problem(
                "/teacher/trust_remote_code", "the operator does not allow it.", "Set KD_TRUST_REMOTE_CODE=1."
            )
    if student is not None and student.model is not None:
        yield from _allowed("/student/model", _model("/student/model", student.model, root))
    tokenizer = student.init.tokenizer if student is not None and student.init is not None else None
    if tokenizer is not None:
        yield from _allowed("/student/init/tokenizer", _tokenizer("/student/init/tokenizer", tokenizer, root))
    yield from _allowed("/data/sequence_length", _contexts(config, root))


def _contexts(config: JobConfig, root: Path) -> Iterator[Problem]:
    """Models that see fewer tokens than a sequence has, by their config.json: loading them would tell it late."""
    if config.cache.fingerprint is not None:
        return
    named = [config.teacher.model] if config.teacher is not None and _teacher_is_run(config) else []
    named += [config.student.model] if config.student is not None and config.student.model is not None else []
    for model in named:
        context = _context(root / model / "config.json")
        if context is not None and config.data.sequence_length > context:
            detail = f"{model!r} has a context of {context} tokens, but got {config.data.sequence_length}."
            yield Problem("/data/sequence_length", detail, f"Set it to {context} or less.")


def _context(file: Path) -> int | None:
    """Tokens that a model sees; None where its file does not say."""
    try:
        shape = json.loads(file.read_bytes())
        context = shape.get("max_position_embeddings") or shape.get("n_positions")
    except (OSError, ValueError, AttributeError):  # on the hub, a GGUF file alone, or nothing that can be loaded
        return None
    return context if isinstance(context, int) else None


def _teacher_is_run(config: JobConfig) -> bool:
    """Whether the teacher's weights are read: to be captured, to be cut into a student, or to be compared with."""
    cut_out = config.student is not None and config.student.from_teacher is not None
    return cut_out or config.evaluation.teacher or (config.needs_cache and config.cache.fingerprint is None)


def _allowed(pointer: str, problems: Iterator[Problem]) -> Iterator[Problem]:
    """``problems``, or that looking for them is not possible."""
    try:
        yield from problems
    except PermissionError as error:
        yield Problem(pointer, f"{error.filename} may not be looked at.", "Check the mode and owner of its folders.")
    except (OSError, ValueError) as error:  # a name too long, a loop of links, a byte that no path may have
        yield Problem(pointer, f"it cannot be looked at: {error}.", "Check how it is written.")


def _tokenizer(pointer: str, name: str, root: Path) -> Iterator[Problem]:
    if not (root / name).is_dir() and not HUB_ID.match(name):
        yield Problem(pointer, f"no folder {name!r}.", _from(root))


def _model(pointer: str, model: str, root: Path, gguf_file: str | None = None) -> Iterator[Problem]:
    folder = root / model
    if folder.is_file():
        yield Problem(pointer, f"{model!r} is a file.", "Give its folder; a GGUF file is named by teacher.gguf_file.")
    elif not folder.is_dir():
        if not HUB_ID.match(model):
            yield Problem(pointer, f"no folder {model!r}, and it is not of the form of a hub id.", _from(root))
        elif os.environ.get("HF_HUB_OFFLINE") == "1" and not _in_hub_cache(model):
            yield Problem(
                pointer, f"{model!r} is no local folder, and the hub is offline without a copy of it.", _from(root)
            )
    elif gguf_file is not None:
        if not (folder / gguf_file).is_file():
            yield Problem("/teacher/gguf_file", f"{folder / gguf_file} does not exist.", _listing(folder, "*.gguf"))
    elif not (folder / "config.json").is_file():
        remedy = _by_gguf(pointer, folder) or "Give the folder of a Hugging Face model."
        yield Problem(pointer, f"{model!r} holds no config.json.", remedy)
    elif not any(folder.glob("*.safetensors")):
        remedy = _by_gguf(pointer, folder) or "Convert its weights to safetensors."
        yield Problem(pointer, f"{model!r} holds no *.safetensors weights.", remedy)


def _by_gguf(pointer: str, folder: Path) -> str:
    """What to do where a folder that cannot be loaded as it is holds GGUF files; nothing where it holds none."""
    names = sorted(path.name for path in folder.glob("*.gguf"))
    if names and pointer == "/student/model":
        return "A student must be the folder of a Hugging Face model with safetensors: GGUF is for teachers only."
    return f"Set teacher.gguf_file: {' or '.join(names)}." if names else ""


def _in_hub_cache(model: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(model, "config.json"), str)


def _from(root: Path) -> str:
    return f"Relative paths are taken from {root.resolve()}."


def _listing(folder: Path, pattern: str) -> str:
    names = sorted(path.name for path in folder.glob(pattern))
    return f"There are: {', '.join(names)}." if names else f"There is no {pattern} in it."


# ---------------------------------------------------------------------- a cache that the job names


def _sealed(config: JobConfig, home: Path) -> Iterator[Problem]:
    name = config.cache.fingerprint
    if name is not None and config.needs_cache and not (home / "caches" / name / "manifest.json").is_file():
        yield no_such_cache(name, home)


# ---------------------------------------------------------------------- text


def _texts(config: JobConfig, root: Path) -> Iterator[Problem]:
    for field, sources in (("train", config.data.train), ("validation", config.data.validation)):
        for number, source in enumerate(sources):
            if isinstance(source, str):
                pointer = f"/data/{field}/{number}"
                yield from _allowed(pointer, _source(pointer, source, root, config.data.format))


def _source(pointer: str, source: str, root: Path, format: str) -> Iterator[Problem]:
    files = find_files(source, root)
    if not files:
        yield Problem(pointer, f"no file matches {source!r}.", _from(root))
        return
    if not any(map(_has_text, files)):
        yield Problem(pointer, f"{source!r} holds no text.", "Give a file with text in it.")
    strange = [file.name for file in files if suffix_of(file) not in SUFFIXES]
    if format == "auto" and strange:
        yield Problem(
            pointer,
            f"cannot tell the format of {strange[0]!r} from its suffix.",
            f"Use {', '.join(SUFFIXES)}, or set data.format.",
        )
    for file in files:
        if not os.access(file, os.R_OK):
            yield Problem(pointer, f"{file.name!r} cannot be read.", "Check its mode and owner.")


def _has_text(path: Path) -> bool:
    """Whether ``path`` holds anything but white space; large files are believed."""
    size = path.stat().st_size
    return size > _PLAIN_TEXT or (size > 0 and (not os.access(path, os.R_OK) or bool(path.read_bytes().strip())))


# ---------------------------------------------------------------------- disk


def _storage(home: Path) -> Iterator[Problem]:
    existing = next(folder for folder in (home, *home.resolve().parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield Problem("", f"the data folder {home} cannot be written.", "Check its owner and mode, or set KD_HOME.")
    elif (free := shutil.disk_usage(existing).free) < FREE_BYTES:
        yield Problem(
            "", f"the disk of {home} has {free / 2**20:.0f} MiB left.", "Free space, or set KD_HOME to another disk."
        )
