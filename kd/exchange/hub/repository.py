"""A repository of a Hugging Face hub: its files, and what its errors mean for a user.

The address of the hub is HF_ENDPOINT, and the token is the one that huggingface_hub finds:
HF_TOKEN, or what ``hf auth login`` stored. No message here contains it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils._validators import validate_repo_id
from huggingface_hub.utils.sha import git_hash
from huggingface_hub.utils.tqdm import disable_progress_bars

from cache.disk import hash_file
from kd.errors import HubError

RepositoryType = Literal["model", "dataset"]
#: Files that a hub adds itself.
OWN_FILES = (".gitattributes",)
#: The base of all errors of a connection in the HTTP library of the installed huggingface_hub.
_CONNECTION_ERROR: type[Exception] = HfHubHTTPError.__mro__[1]
_AGAIN = "Run the same command again: what has arrived is not sent again."
_LOG_IN = "Run `hf auth login`, or set HF_TOKEN to a token that may {right} {name}."
#: What a refusal says that is about space, in the words of the hub.
_SPACE_WORDS = ("quota", "storage", "limit")
#: The longest name of a file or folder, in bytes, and characters that none has.
_LONGEST_NAME = 255
_STRANGE = re.compile(r"[\\\0\n\r\ud800-\udfff]")


@dataclass(frozen=True)
class Repository:
    """A repository: ``owner/name``, what it is, and a branch, tag or commit."""

    name: str
    type: RepositoryType
    revision: str = constants.DEFAULT_REVISION

    def __post_init__(self) -> None:
        try:
            validate_repo_id(self.name)
        except HFValidationError as error:
            raise _make_name_error(self.name) from error
        if "/" not in self.name:
            raise _make_name_error(self.name)

    def __str__(self) -> str:
        return f"{self.type} {self.name} ({self.revision})"

    @property
    def url(self) -> str:
        """The address of its page."""
        prefix = "" if self.type == "model" else f"{self.type}s/"
        return f"{constants.ENDPOINT}/{prefix}{self.name}"


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository: bytes, git's hash of it, and its sha256 if it is stored as LFS."""

    size: int
    blob: str
    sha256: str | None

    def is_equal(self, content: Path | bytes) -> bool:
        """Whether a file, or its bytes, are the same."""
        if (content.stat().st_size if isinstance(content, Path) else len(content)) != self.size:
            return False
        if self.sha256 is None:
            return _hash_blob(content) == self.blob
        if isinstance(content, Path):
            return hash_file(content) == self.sha256
        return hashlib.sha256(content).hexdigest() == self.sha256


def connect() -> HfApi:
    """Return a client of the hub. Raises ``HubError`` where this machine must not use it."""
    if constants.HF_HUB_OFFLINE:
        raise HubError(
            "HF_HUB_OFFLINE forbids the way to the hub.", "Unset HF_HUB_OFFLINE, then run again."
        )
    disable_progress_bars()  # the events of the run show progress
    return HfApi()


def require_token(repository: Repository) -> None:
    """Raise ``HubError`` if there is no token to write with."""
    if get_token() is None:
        raise HubError(
            f"There is no token for {constants.ENDPOINT}.",
            _LOG_IN.format(right="write to", name=repository.name),
        )


def find_commit(api: HfApi, repository: Repository) -> str:
    """Return the commit that the revision of ``repository`` names now."""
    found = api.repo_info(
        repository.name, repo_type=repository.type, revision=repository.revision
    ).sha
    if found is None:
        raise HubError(f"{repository} has no commit.", "Push to it first.")
    return found


def list_remote_files(api: HfApi, repository: Repository, commit: str) -> dict[str, RemoteFile]:
    """List the files of ``repository`` at ``commit`` by name, without those of the hub itself.

    Raises ``HubError`` for a name that leads out of the folder of a download, or that is hidden,
    too long or none of a file.
    """
    entries = api.list_repo_tree(
        repository.name, recursive=True, revision=commit, repo_type=repository.type
    )
    files = {}
    for entry in entries:
        if not isinstance(entry, RepoFile) or entry.path in OWN_FILES:
            continue
        path = PurePosixPath(entry.path)
        hidden = any(part.startswith(".") for part in path.parts[:-1])
        if hidden or path.is_absolute() or not all(map(_is_plain, path.parts)):
            shown = entry.path if len(entry.path) <= _LONGEST_NAME else entry.path[:60] + "..."
            raise HubError(
                f"{repository} has a file with the name {shown!r}, which no model or cache has.",
                "Use another, or download it with the hub's own tools.",
            )
        sha256 = None if entry.lfs is None else entry.lfs.sha256
        files[entry.path] = RemoteFile(entry.size, entry.blob_id, sha256)
    return files


def _is_plain(part: str) -> bool:
    """Whether a folder or a file may have this name."""
    fits = len(part.encode(errors="replace")) <= _LONGEST_NAME
    return fits and part != ".." and not _STRANGE.search(part)


def _hash_blob(content: Path | bytes) -> str:
    """Return git's hash of a file; those that the hub keeps in git are small."""
    return git_hash(content.read_bytes() if isinstance(content, Path) else content)


# ---------------------------------------------------------------------- errors


@contextmanager
def hub_errors(repository: Repository, right: str) -> Iterator[None]:
    """Raise ``HubError`` for errors of the hub; ``right`` is "read" or "write to"."""
    try:
        yield
    except (
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        _CONNECTION_ERROR,
        ConnectionError,
    ) as error:
        raise _explain(error, repository, right) from error
    except (RuntimeError, ValueError) as error:
        # huggingface_hub wraps what went wrong while it sent a file.
        cause = error.__cause__
        if cause is not None and isinstance(cause, (_CONNECTION_ERROR, ConnectionError)):
            raise _explain(cause, repository, right) from error
        if "LFS batch API returned errors" not in str(error):
            raise
        raise _refuse(repository, right, None, str(error).splitlines()[-1]) from error


def _make_name_error(name: str) -> HubError:
    return HubError(
        f"{name!r} is not the name of a repository.",
        "Names look like owner/name: letters, digits, '-', '_' and '.', at most 96.",
    )


def _explain(error: BaseException, repository: Repository, right: str) -> HubError:
    """Say what an error of huggingface_hub means, and what to do about it."""
    log_in = _LOG_IN.format(right=right, name=repository.name)
    if isinstance(error, GatedRepoError):
        return HubError(
            f"Access to {repository} must be granted.", f"Ask for it at {repository.url}. {log_in}"
        )
    if isinstance(error, RevisionNotFoundError):
        return HubError(
            f"{repository.name} has no revision {repository.revision!r}.",
            "Give a branch, a tag or a commit that it has.",
        )
    if isinstance(error, RepositoryNotFoundError):
        return HubError(
            f"There is no {repository.type} {repository.name} at {constants.ENDPOINT}, "
            "or it is private and the token may not see it.",
            f"Check the name and the type. {log_in}",
        )
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        said = error.server_message or "no reason given"
        return _refuse(repository, right, error.response.status_code, said)
    cause = error.__cause__
    if isinstance(error, LocalEntryNotFoundError) and isinstance(cause, _CONNECTION_ERROR):
        return _explain(cause, repository, right)
    return HubError(
        f"The connection to {constants.ENDPOINT} failed: {type(error).__name__}.",
        f"Check the network and HF_ENDPOINT. {_AGAIN}",
    )


def _refuse(repository: Repository, right: str, status: int | None, said: str) -> HubError:
    """The error for an answer of the hub with ``status``, whose message is ``said``."""
    answer = f"The hub answered {status or 'with an error'} about {repository.name}: {said}"
    if status in (409, 412):
        return HubError(
            f"{repository} changed while it was written to. {answer}",
            "Find out who else writes to it, then run the same command again.",
        )
    if status in (402, 413, 507) or any(word in said.lower() for word in _SPACE_WORDS):
        return HubError(answer, f"Free space on the hub or raise its quota. {_AGAIN}")
    if status in (401, 403):
        return HubError(answer, _LOG_IN.format(right=right, name=repository.name))
    return HubError(answer, f"Wait a little. {_AGAIN}")
