"""Find what a run would refuse in its first seconds, by opening the files that a job names.

    models       on this machine, or known to the hub
    tensors      in the files of a model on this machine, all that its configuration asks for
    tokenizers   there, and the student's is the teacher's, or that of the sealed cache

``kd validate`` and ``kd run`` look this far. The API does not: two tokenizers take seconds to load,
and the hub may not answer. Imports torch where a model is on this machine, or where two tokenizers
have to be compared.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from cache.errors import CacheError, PotstillError
from kd.addresses import HUB_ID
from kd.config.job import JobConfig
from kd.errors import Problem
from kd.files import find_caches
from kd.models.folder import TOKENIZER_REMEDY, ModelFolder, find_source, locate_model
from kd.preflight.named_paths import NamedResource, list_named_resources
from kd.preflight.stored_models import find_tensor_problems
from kd.progress import Notice, ignore_notice

#: How long the hub may take to answer, in seconds.
HUB_SECONDS = 5.0


def find_first_problems(
    config: JobConfig, root: Path, home: Path, note: Callable[[Notice], None] = ignore_notice
) -> Iterator[Problem]:
    """Find what opening the job's files shows; call it only if their names have no problem.

    ``note`` receives what is no problem, but worth knowing.
    """
    models = [each for each in list_named_resources(config) if each.kind == "model"]
    missing = [problem for each in models for problem in _check_folder(each, root)]
    yield from missing
    if not missing:
        find = partial(_find_folder, root)
        yield from find_tensor_problems(config, config.active_teacher is not None, find, note)
        yield from _check_same_tokenizer(config, root, home, note)


# ---------------------------------------------------------------------- models


def _check_folder(each: NamedResource, root: Path) -> Iterator[Problem]:
    folder = ModelFolder(locate_model(each.name, root))
    if folder.path.is_dir():
        if each.file is None and not (folder.has_tokenizer or folder.gguf_files):
            detail = f"{each.name!r} holds no tokenizer."
            yield Problem(each.pointer, detail, TOKENIZER_REMEDY)
    elif HUB_ID.match(each.name) and _find_folder(root, each) is None:
        yield from _ask_hub(each)


def _find_folder(root: Path, each: NamedResource) -> ModelFolder | None:
    return ModelFolder.find(each.name, root, each.revision)


def _ask_hub(each: NamedResource) -> Iterator[Problem]:
    """Find that the hub has no model of this name, or does not answer."""
    if os.environ.get("HF_HUB_OFFLINE") == "1":  # kd.preflight.validate has said so
        return
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    what = f"there is no folder {each.name!r}"
    remedy = "Check the path, and the folder from which it starts."
    try:
        HfApi().model_info(each.name, revision=each.revision, timeout=HUB_SECONDS)
    except GatedRepoError:  # it exists; loading it will say what is missing
        return
    except RepositoryNotFoundError:
        yield Problem(each.pointer, f"{what}, and the hub has no model of that name.", remedy)
    # No network, a proxy and a time-out each raise a class of their own, with no common base.
    except Exception as error:
        detail = f"{what}, and the hub does not answer ({type(error).__name__})."
        yield Problem(each.pointer, detail, f"{remedy} A model of the hub must be downloaded.")


# ---------------------------------------------------------------------- tokenizers


def _check_same_tokenizer(
    config: JobConfig, root: Path, home: Path, note: Callable[[Notice], None]
) -> Iterator[Problem]:
    """Find that the student's own tokenizer is not the one of the records."""
    student = config.student
    if student is None or not config.needs_cache or config.loss.tokenizers != "same":
        return
    own = student.own_tokenizer
    pointer = "/student/model" if student.model else "/student/init/tokenizer"
    folder = None if own is None else ModelFolder.find(own, root, student.revision)
    if folder is None or (_is_copy(folder, config, root) and config.cache.fingerprint is None):
        return
    try:
        _require_same_tokenizer(folder.path, config, root, home, note)
    except PotstillError as error:
        yield Problem(pointer, error.detail, error.remedy)


def _is_copy(folder: ModelFolder, config: JobConfig, root: Path) -> bool:
    """Whether the student's tokenizer.json has the bytes of the teacher's: the usual case."""
    source = config.teacher_files
    teacher = None if source is None else find_source(source, root)
    if teacher is None or teacher.tokenizer_file is None or folder.tokenizer_file is None:
        return False
    return teacher.tokenizer_file.read_bytes() == folder.tokenizer_file.read_bytes()


def _require_same_tokenizer(
    own: Path, config: JobConfig, root: Path, home: Path, note: Callable[[Notice], None]
) -> None:
    from cache.store import open_cache
    from kd.models import tokenizers, vocabulary
    from kd.models.tokenizing.rules import sample_texts

    if config.cache.fingerprint is not None:
        with suppress(CacheError):  # find_cache_problems has said what is wrong with it
            store = open_cache(find_caches(home, config.cache.store) / config.cache.fingerprint)
            known = tokenizers.KnownTokenizer.of_cache(store)
            tokenizers.require_same_tokenizer(tokenizers.load_tokenizer(own), known, note=note)
        return
    source = config.teacher_files
    teacher = None if source is None or source.trust_remote_code else find_source(source, root)
    if source is None or teacher is None:
        return
    theirs = tokenizers.load_tokenizer(teacher.path, source.gguf_file)
    size = vocabulary.choose_source_vocabulary(theirs, source, teacher.path)
    known = tokenizers.KnownTokenizer.of(theirs, size, "the teacher's")
    texts = sample_texts(config.data, root)
    tokenizers.require_same_tokenizer(tokenizers.load_tokenizer(own), known, texts=texts, note=note)
