"""Check that a job names only folders, models and hosts that it may use.

    path       must resolve, with links followed, into one of ``roots``; must not be hidden there,
               nor be one of ``denied``
    home       only run folders and caches that the job's owner may read; the rest belongs to the
               service
    model      must be on the operator's list, if there is one
    URL        must name one of ``hosts``; its address must be public, or be on the list itself
    dataset    must consist of its own files; other files that its card names are not read
               (dataset_files.py)

The service checks this at POST, and again when a stage begins, because a link may have changed in
between. ``kd run`` has no ``Confinement`` and checks none of it. Imports no torch.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from urllib.parse import urlsplit

from kd.addresses import resolve_public_address
from kd.buckets.inputs import is_stored_name
from kd.config.job import JobConfig
from kd.errors import ConfigError, DataError, Problem
from kd.preflight.dataset_files import (
    Reason,
    check_dataset_folder,
    open_confined,
    require_permitted,
)
from kd.preflight.limits import Confinement
from kd.preflight.named_paths import (
    NamedResource,
    find_plain_prefix,
    is_task_file,
    list_named_resources,
)
from kd.text.sources import datasets_opened_by
from kd.text.text_files import find_files, is_saved_dataset, list_all_files

#: Names for which ``datasets`` uses a builder of its own, which searches for files itself; one of
#: them
#: reads pickles.
BUILDERS = {
    "arrow", "audiofolder", "conll", "csv", "eval", "fasta", "fastq", "genbank", "harbor", "hdf5",
    "iceberg", "imagefolder", "json", "lance", "meshfolder", "mmcif", "niftifolder", "pandas",
    "parquet", "pdb", "pdffolder", "text", "tsfile", "videofolder", "vortex", "webdataset", "xml",
}  # fmt: skip


#: Patterns of text that a job of the service may have.
MOST_PATTERNS = 64


@contextmanager
def confined_datasets(limits: Confinement | None) -> Iterator[None]:
    """Until the end of the block, let datasets include only files that ``limits`` permits.

    None permits all files.
    """
    if limits is None or limits.free_datasets:
        yield
        return
    opener = partial(open_confined, limits=limits)
    with datasets_opened_by(opener, partial(require_permitted, limits=limits)):
        yield


def find_confinement_problems(config: JobConfig, root: Path, limits: Confinement) -> list[Problem]:
    """List everything that ``config`` names but may not use; relative paths start at ``root``."""
    named = list(list_named_resources(config))
    texts = {each.name for each in named if each.kind == "text"}
    if sum(map(glob.has_magic, texts)) > MOST_PATTERNS:
        detail = f"the job has more than {MOST_PATTERNS} patterns, each of which is looked up."
        return [Problem("/data/train", detail, "Name the folders of the text.")]
    # What comes again is looked up once.
    first = {(each.kind, each.name, each.pointer.rpartition("/")[0]): each for each in named[::-1]}
    refused = (_find_refusals(each, root, limits) for each in reversed(first.values()))
    found = list(chain.from_iterable(refused))
    if config.cache.store not in (None, limits.store):
        own = limits.store or "the folder caches of KD_HOME"
        detail = f"a job of this service keeps its cache in {own}, not in {config.cache.store}."
        remedy = "Remove cache.store, or use `kd run`."
        found.append(Problem("/cache/store", detail, remedy))
    for field, name in config.cache.named.items():
        if not limits.may_read_cache(name):
            found.append(describe_missing_cache(name, limits.home, field))
    teacher = config.served_teacher
    if teacher is not None and teacher.url is not None:
        found += _check_url("/teacher/url", teacher.url, limits)
    return found


# ---------------------------------------------------------------------- names of files and models

#: The remedy for every name outside the permitted folders.
_OUTSIDE = "Put it below KD_ROOT, or have the operator add its folder to KD_DATA_ROOTS."
#: The same for a bucket.
_OUTSIDE_STORES = "Put it below KD_STORE, or have the operator add its address to KD_DATA_STORES."


def _find_refusals(each: NamedResource, root: Path, limits: Confinement) -> Iterator[Problem]:
    """Find the first problem of a name; the disk is read only after the name's place is allowed."""
    # A task without a file is part of lm-eval, which is installed by the operator.
    if each.kind == "task" and not is_task_file(each):
        return
    stored = is_stored_name(each.name)
    if "://" in each.name and not stored:
        yield from _check_url(each.pointer, each.name, limits)
    elif (reason := _find_reason(each, stored, root, limits)) is not None:
        yield Problem(each.pointer, *reason)


def _find_reason(each: NamedResource, stored: bool, root: Path, limits: Confinement) -> Reason:
    # Credentials of a bucket are not the job's own.
    if stored and not limits.permits_url(each.name):
        return f"{each.name!r} lies outside the buckets that jobs may read.", _OUTSIDE_STORES
    if not stored and not limits.permits(root / find_plain_prefix(each)):
        return f"{each.name!r} lies outside the folders that jobs may read.", _OUTSIDE
    if stored and each.kind != "model":
        return None
    try:
        return _CHECKS[each.kind](each, root, limits)
    except DataError as error:
        return error.detail, error.remedy
    except (OSError, ValueError) as error:  # ValueError: a byte that no path may have
        remedy = "Check its name, and the mode and owner of its folders."
        return f"{each.name!r} cannot be read: {error}.", remedy


def _check_model(each: NamedResource, root: Path, limits: Confinement) -> Reason:
    if not limits.allows_model(each.name, each.revision, root):
        which = f"{each.name!r}" + (f" at revision {each.revision}" if each.revision else "")
        return f"{which} is not on the operator's list of models.", "GET /models shows the list."
    if is_stored_name(each.name):
        return None
    # Libraries join both to the model's folder, so that .. would leave it.
    if _leads_out(each.revision) or _leads_out(each.file):
        return "the revision or file leads out of the model's folder.", "Give a plain name."
    folder = root / each.name
    if each.file is not None and not limits.permits(folder / each.file):
        return f"{each.file!r} leads out of the folders that jobs may read.", _OUTSIDE
    files = list(folder.iterdir()) if folder.is_dir() else []
    files += folder.glob("additional_chat_templates/*")
    return _check_links(each.name, files, limits)


def _check_dataset(each: NamedResource, root: Path, limits: Confinement) -> Reason:
    if each.name in BUILDERS:
        remedy = "Name the files themselves, or a dataset's id or folder."
        return f"{each.name!r} is a format, not a dataset.", remedy
    if _leads_out(each.revision):
        return "the revision leads out of the dataset.", "Give a branch, tag or commit."
    folder = (root / each.name).resolve()
    linked = _check_links(each.name, folder.rglob("*"), limits)
    if linked is not None or limits.free_datasets:
        return linked
    # Links are followed where the files are read, also one behind another.
    shown = (file for file in list_all_files(folder) if not file.name.startswith("."))
    if (outside := limits.find_first_outside(shown)) is not None:
        return f"{each.name!r} includes {outside.name!r}, which jobs may not read.", _OUTSIDE
    named_outside = check_dataset_folder(folder, limits.permits)
    return named_outside and (f"the dataset {each.name!r} {named_outside[0]}", named_outside[1])


def _check_text(each: NamedResource, root: Path, limits: Confinement) -> Reason:
    if is_saved_dataset(root / each.name):
        return _check_dataset(each, root, limits)
    # Each ** visits every folder below it, so that two of them could take hours.
    parts = Path(each.name).parts
    if glob.has_magic(each.name) and (".." in parts or parts.count("**") > 1):
        what = f"the pattern {each.name!r} contains .. or more than one **."
        return what, "Give a simpler pattern."
    linked = list[Path]()
    split = each.pointer.split("/")[2]

    def enter(folder: Path) -> bool:
        if not limits.permits(folder):
            linked.append(folder)
        return not linked

    found = find_files(each.name, root, split, enter).files
    if (outside := next(iter(linked), None) or limits.find_first_outside(found)) is not None:
        return f"{each.name!r} includes {outside.name!r}, which jobs may not read.", _OUTSIDE
    return None


def _check_task(each: NamedResource, root: Path, limits: Confinement) -> Reason:
    if not limits.remote_code:
        what = f"the file {each.name!r} can run code, which the operator does not allow."
        return what, "Name a task of lm-eval."
    return _check_links(each.name, (root / each.name).parent.iterdir(), limits)


_CHECKS: dict[str, Callable[[NamedResource, Path, Confinement], Reason]] = {
    "model": _check_model,
    "dataset": _check_dataset,
    "text": _check_text,
    "task": _check_task,
}


def _leads_out(name: str | None) -> bool:
    return name is not None and (
        name.startswith(("/", "~")) or ".." in Path(name).parts or "\0" in name
    )


def _check_links(name: str, files: Iterable[Path], limits: Confinement) -> Reason:
    """Find a link to a forbidden file in a folder, or a folder of the service itself."""
    # A folder that contains the service's own folders would expose them.
    service = {limits.home, *limits.denied}
    for file in files:
        if (file.is_symlink() and not limits.permits(file)) or file in service:
            return f"{name!r} includes {file.name!r}, which jobs may not read.", _OUTSIDE
    return None


def describe_missing_cache(name: str, home: Path, field: str = "fingerprint") -> Problem:
    """Describe a missing cache; a cache of another owner gets the same words."""
    detail = f"there is no sealed cache {name!r} below {home}."
    return Problem(f"/cache/{field}", detail, "See `kd cache ls`.")


# ---------------------------------------------------------------------- addresses


#: The ports of URLs that name none.
_PORTS = {"http": 80, "https": 443}


def _check_url(pointer: str, url: str, limits: Confinement) -> Iterator[Problem]:
    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS.get(parts.scheme)
        resolve_public_address(parts.hostname or "", limits.hosts, port)
    except ConfigError as error:
        yield from (Problem(pointer, each.detail, each.remedy) for each in error.problems)
    except ValueError as error:  # it is no URL
        detail = f"{url!r} is not a URL: {error}."
        yield Problem(pointer, detail, "Give a URL of the form https://host/path.")
