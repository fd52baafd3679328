"""Push a student or a cache to a hub, or into a folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import HfApi, constants
from safetensors import SafetensorError, safe_open

from cache.checking.verify import find_extras, verify_cache
from cache.disk import list_file_sizes
from cache.errors import CacheCorrupt
from cache.json_object import Json
from cache.reading.usage import held
from cache.remote.address import is_mirror
from cache.shards.names import MANIFEST
from cache.store import read_manifest
from kd.errors import HubError, ModelError
from kd.exchange.hub.cache_card import CARD, render_cache_card
from kd.exchange.hub.repository import OWN_FILES, Repository, RepositoryType, connect, hub_errors
from kd.files import PROVENANCE, hide_folders, read_json, whole_folder, write_text
from kd.models.folder import STUDENT_FILES, ModelFolder

#: The end of a message about a folder or a repository that holds neither a student nor a cache.
LACKS = f"it has no {MANIFEST}, {' or '.join(STUDENT_FILES)}."
_WEIGHTS = ".safetensors"
#: Weights of a student that was there before would be loaded beside those of the new one, and its
#: chat templates in place of none. Those that are sent stay.
_STALE = ["*.safetensors", "*.safetensors.index.json", "*.jinja"]


def push(
    folder: Path,
    name: str,
    revision: str | None,
    private: bool | None,
    tell: Callable[[str], object],
) -> Json:
    """Push the student or the cache in ``folder`` to the repository ``name``; return a summary.

    If the repository does not exist, it is made: a private one, unless ``private`` is False. True
    also refuses a public one that is there. ``tell`` gets a word before each long step; the bars
    are those of huggingface_hub, which also continues an interrupted push. Raises ``HubError``, and
    ``ModelError`` or ``CacheCorrupt`` for damage.
    """
    api = connect(name, "write to")
    tell("verifying")
    with _laid_out(folder) as (files, kind, sizes):
        place = Repository(name, kind, revision or constants.DEFAULT_REVISION)
        with hub_errors(place, "write to"):
            url = _make_repository(api, place, private)
            head = api.repo_info(**place.address, revision=place.revision).sha
            if kind == "dataset":
                _require_ours(api, place, files, sizes)
            tell("sending")
            made = api.upload_folder(
                **place.address,
                revision=place.revision,
                folder_path=files,
                commit_message="Push with Potstill",
                parent_commit=head,  # another writer is noticed
                delete_patterns=_STALE if kind == "model" else None,
            )
        return place.summarise(made.oid, sizes, url=url)


def push_to_folder(folder: Path, target: Path | None) -> Json:
    """Write into the new folder ``target`` what a push would send; None = only list it.

    Raises ``HubError`` if the folder exists, and for damage what ``push`` raises.
    """
    if target is not None and target.exists():
        raise HubError(f"{target} exists.", "Name a folder that does not exist yet.")
    with _laid_out(folder) as (files, kind, sizes):
        if target is not None:
            with whole_folder(target) as place:
                shutil.copytree(files, place, copy_function=shutil.copyfile, dirs_exist_ok=True)
        return {"type": kind, "bytes": sum(sizes.values()), "files": sizes}


def find_problems(folder: Path) -> list[str]:
    """Return a line for each file of a student or a cache that is missing or damaged.

    Each byte of a cache is compared with its manifest. A student must have the files that its index
    names, and each file of weights the size that its header tells.
    """
    if (folder / MANIFEST).is_file():
        return verify_cache(folder)
    parts = ModelFolder(folder).list_read_files()
    problems = [f"{part.name} is missing" for part in parts if not part.is_file()]
    for name in list_file_sizes(folder):
        if name.endswith(_WEIGHTS):
            try:
                with safe_open(os.fspath(folder / name), framework="numpy"):
                    pass
            except (SafetensorError, OSError) as error:
                problems.append(f"{name}: {error}")
    return problems


@contextmanager
def _laid_out(folder: Path) -> Iterator[tuple[Path, RepositoryType, dict[str, int]]]:
    """Yield a folder with links to the files to push, their repository's type, and their bytes.

    It holds a copy of a student's job without the folders of this machine. The card of a cache is a
    file there, which the cache's own folder must not hold. Raises
    ``HubError`` if ``folder`` is neither a student nor a cache, and ``ModelError`` or
    ``CacheCorrupt`` if it is damaged.
    """
    if is_mirror(folder):
        remedy = "Copy its folder out of the bucket with the bucket's own tools, and push the copy."
        raise HubError(f"The cache {folder.name} is in a bucket.", remedy)
    is_cache = (folder / MANIFEST).is_file()
    if not is_cache and not any((folder / name).is_file() for name in STUDENT_FILES):
        remedy = "Name a run, the folder of a student, or a cache of `kd cache ls`."
        raise HubError(f"{folder} is neither a student nor a complete cache: {LACKS}", remedy)
    with held(folder), TemporaryDirectory() as place:
        files = Path(place)
        for name in _list_files(folder, is_cache):
            (files / name).parent.mkdir(parents=True, exist_ok=True)
            (files / name).symlink_to(folder / name)
        if is_cache:
            card = render_cache_card(folder, read_manifest(folder))
            (files / CARD).write_text(card, encoding="utf-8")
        elif (known := read_json(folder / PROVENANCE)) is not None:
            text = (folder / PROVENANCE).read_text(encoding="utf-8")
            write_text(files / PROVENANCE, hide_folders(text, known))
        sizes = {name: (files / name).stat().st_size for name in list_file_sizes(files)}
        yield files, "dataset" if is_cache else "model", sizes


def _list_files(folder: Path, is_cache: bool) -> set[str]:
    """Name the files of a cache, or those of a student that are not hidden.

    Raises ``CacheCorrupt`` or ``ModelError`` if they are damaged.
    """
    names = set(list_file_sizes(folder))
    if not is_cache:
        names = {name for name in names if "/." not in f"/{name}"}
        if not any(name.endswith(_WEIGHTS) for name in names):
            what = f"{folder} holds no weights: no file ends in {_WEIGHTS}."
            raise ModelError(what, "Name a student whose training has finished.")
    if problems := find_problems(folder):
        what = f"{folder} is damaged and was not pushed: {'; '.join(problems[:3])}."
        if not is_cache:
            raise ModelError(what, "Save the student again: run its job again.")
        remedy = "Run its job again: it captures the damaged shards again. Then push."
        raise CacheCorrupt(what, remedy)
    return names - set(find_extras(folder)) if is_cache else names


def _make_repository(api: HfApi, place: Repository, private: bool | None) -> str:
    """Make the repository and the branch unless they are there; return the address of its page."""
    kept_private = private is not False
    url = api.create_repo(place.name, repo_type=place.type, private=kept_private, exist_ok=True)
    if private and not api.repo_info(place.name, repo_type=place.type).private:
        remedy = f"Make it private at {url}/settings, or push to another repository."
        raise HubError(f"{place.name} is public, and --private was asked for.", remedy)
    if place.revision != constants.DEFAULT_REVISION:
        api.create_branch(place.name, branch=place.revision, repo_type=place.type, exist_ok=True)
    return str(url)


def _require_ours(api: HfApi, place: Repository, files: Path, names: Collection[str]) -> None:
    """Raise ``HubError`` if the repository holds something else than the cache in ``files``.

    Such files would make the pulled cache an unsound one, and nothing of others is removed.
    """
    there = set(api.list_repo_files(**place.address, revision=place.revision)) - set(OWN_FILES)
    found = ""
    if others := sorted(there - set(names)):
        found = f"files that are not of this cache, such as {', '.join(others[:3])}"
    elif MANIFEST in there:
        known = api.hf_hub_download(**place.address, revision=place.revision, filename=MANIFEST)
        fingerprint = read_manifest(Path(known).parent).identity.fingerprint
        if fingerprint != read_manifest(files).identity.fingerprint:
            found = f"the cache {fingerprint}"
    if found:
        remedy = "Push to a repository of its own: one repository holds one cache."
        raise HubError(f"{place} holds {found}.", remedy)
