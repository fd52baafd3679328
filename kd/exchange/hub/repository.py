"""A repository of a Hugging Face hub, and what the errors of huggingface_hub mean for a user.

The address of the hub is HF_ENDPOINT, and the token is the one that huggingface_hub finds:
HF_TOKEN, or what ``hf auth login`` stored. No message here contains it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from huggingface_hub import HfApi, constants, errors, get_token
from huggingface_hub.utils._validators import validate_repo_id
from huggingface_hub.utils.tqdm import disable_progress_bars

from cache.json_object import Json
from kd.errors import HubError

RepositoryType = Literal["model", "dataset"]
#: What a command does to a repository.
Right = Literal["read", "write to"]
#: Files that a hub adds itself.
OWN_FILES = (".gitattributes",)
#: All errors of a connection: those of the HTTP library of the installed huggingface_hub, and the
#: system's.
_CONNECTION_ERRORS: tuple[type[Exception], ...] = (
    errors.HfHubHTTPError.__mro__[1],
    ConnectionError,
)
#: huggingface_hub raises the last two for what the hub answered, and for a file that was not sent.
_ERRORS: tuple[type[Exception], ...] = (
    *_CONNECTION_ERRORS,
    errors.LocalEntryNotFoundError,
    RuntimeError,
    ValueError,
)
_AGAIN = "Run the same command again: what has arrived is not sent again."
#: What a refusal says that is about space, in the words of the hub.
_SPACE_WORDS = ("quota", "storage", "limit")


@dataclass(frozen=True)
class Repository:
    """A repository: ``owner/name``, what it is, and a branch, tag or commit."""

    name: str
    type: RepositoryType
    revision: str

    def __str__(self) -> str:
        return f"{self.type} {self.name} ({self.revision})"

    @property
    def address(self) -> dict[str, Any]:
        """The arguments that name it in a call of huggingface_hub, without the revision."""
        return {"repo_id": self.name, "repo_type": self.type}

    def summarise(self, commit: str, sizes: Mapping[str, int], **more: Any) -> Json:
        """Return what a command prints: the repository, its commit, and how much it holds."""
        about = {"repository": self.name, "type": self.type, "revision": self.revision}
        counts = {"files": len(sizes), "bytes": sum(sizes.values())}
        return {**about, "commit": commit, **more, **counts}


def connect(name: str, right: Right) -> HfApi:
    """Return a client of the hub, which may be asked about the repository ``name``.

    Raises ``HubError`` if no repository can have this name, if this machine must not use the hub,
    or if there is no token to write with.
    """
    try:
        validate_repo_id(name)
        _owner, _ = name.split("/")
    except ValueError as error:
        remedy = "Names look like owner/name: letters, digits, '-', '_' and '.', at most 96."
        raise HubError(f"{name!r} is not the name of a repository.", remedy) from error
    if constants.HF_HUB_OFFLINE:
        remedy = "Unset HF_HUB_OFFLINE, then run again."
        raise HubError("HF_HUB_OFFLINE forbids the way to the hub.", remedy)
    if right == "write to" and get_token() is None:
        raise HubError(f"There is no token for {constants.ENDPOINT}.", _ask_for_token(name, right))
    return HfApi()


def hide_bars() -> None:
    """Let huggingface_hub show no progress bars."""
    disable_progress_bars()


def _ask_for_token(name: str, right: Right) -> str:
    return f"Run `hf auth login`, or set HF_TOKEN to a token that may {right} {name}."


@contextmanager
def hub_errors(place: Repository, right: Right) -> Iterator[None]:
    """Raise ``HubError`` for errors of huggingface_hub; errors of the disk pass unchanged."""
    try:
        yield
    except _ERRORS as error:
        answered = isinstance(error, errors.HfHubHTTPError)
        sent = isinstance(error.__cause__, _CONNECTION_ERRORS) and not answered
        raise _explain(error.__cause__ if sent else error, place, right) from error


def _explain(error: BaseException | None, place: Repository, right: Right) -> HubError:
    """Say what an error of huggingface_hub means, and what to do about it."""
    hub, log_in = constants.ENDPOINT, _ask_for_token(place.name, right)
    match error:
        case errors.GatedRepoError():
            what = f"Access to {place} must be granted."
            return HubError(what, f"Ask for it on its page at {hub}. {log_in}")
        case errors.RevisionNotFoundError():
            what = f"{place.name} has no revision {place.revision!r}."
            return HubError(what, "Give a branch, a tag or a commit that it has.")
        case errors.RepositoryNotFoundError():
            what = (
                f"There is no {place.type} {place.name} at {hub}, or it is private and the token "
                "may not see it."
            )
            return HubError(what, f"Check the name and the type. {log_in}")
        case errors.HfHubHTTPError():
            status, said = error.response.status_code, error.server_message or "no reason given"
        case RuntimeError() | ValueError():
            status, said = 0, str(error).strip().rpartition("\n")[2]
        case _:
            what = f"The connection to {hub} failed: {type(error).__name__}."
            return HubError(what, f"Check the network and HF_ENDPOINT. {_AGAIN}")
    answer = f"The hub answered {status or 'with an error'} about {place.name}: {said}"
    if status in (409, 412):
        remedy = "Find out who else writes to it, then run the same command again."
        return HubError(f"{place} changed while it was written to. {answer}", remedy)
    if status in (402, 413, 507) or any(word in said.lower() for word in _SPACE_WORDS):
        return HubError(answer, f"Free space on the hub or raise its quota. {_AGAIN}")
    return HubError(answer, log_in if status in (401, 403) else f"Wait a little. {_AGAIN}")
