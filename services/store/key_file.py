"""The file of API keys (``KD_API_KEYS_FILE``).

    {"name": "alice", "sha256": "...", "scopes": ["write"], "created_at": "2026-11-21T..."}
    {"revoked": "...", "at": "2026-11-22T12:00:00+00:00"}

A line creates or revokes a key. Lines are only added, at the end and in one write, so that a reader
always sees a whole file, also through a mount of the file alone, and the history is kept. Only the
SHA-256 of a key is stored. A slow hash is not needed, because a key has 256 random bits.

read    see jobs, caches and workers
write   also post and change jobs, and delete caches
admin   also see the jobs and caches of every key
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import stat
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cache.disk import storage_errors, wait_for_lock
from cache.errors import PotstillError

#: Start of every key, by which a log finds and hides it.
PREFIX = "kd_"
#: Each scope includes those before it.
SCOPES = ("read", "write", "admin")
#: Names that a key may have.
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
#: The owner of jobs that were created without keys.
RESERVED = "local"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FORBIDDEN_MODE = stat.S_IWGRP | stat.S_IROTH | stat.S_IWOTH


class KeysError(PotstillError):
    """The file of keys cannot be used, or a key cannot be created or revoked."""

    type = "keys_error"


@dataclass(frozen=True)
class ApiKey:
    """A valid key: its owner's name and its scopes. An owner may have several keys."""

    name: str
    sha256: str
    scopes: tuple[str, ...]
    created_at: str

    @property
    def id(self) -> str:
        """A short id, by which the key can be revoked."""
        return self.sha256[:12]

    def may(self, scope: str) -> bool:
        """Whether the key has ``scope`` or one that includes it."""
        return any(SCOPES.index(held) >= SCOPES.index(scope) for held in self.scopes)


class KeyFile:
    """The keys in a file, which is read again when it has changed. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._seen: tuple[int, ...] = ()
        self._keys: tuple[ApiKey, ...] = ()

    def list_keys(self) -> tuple[ApiKey, ...]:
        """The valid keys.

        Raises ``KeysError`` if the file is missing or damaged, or if others may use it.
        """
        with self._lock:
            state = _read_file_state(self.path)
            if state != self._seen:
                self._keys = read_keys(self.path)
                self._seen = state
            return self._keys

    def find(self, key: str) -> ApiKey | None:
        """Find a key. Unknown keys take as long as known ones."""
        shown = hash_key(key)
        found = None
        for each in self.list_keys():
            if hmac.compare_digest(shown, each.sha256):
                found = each
        return found


def hash_key(key: str) -> str:
    """The SHA-256 of a key, in hex."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """The keys in the file that are not revoked, oldest first."""
    _read_file_state(path)
    try:
        with path.open(encoding="utf-8") as file:
            # Without the lock, half of a line that is being added could be read.
            wait_for_lock(file, shared=True)
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise _make_unreadable_error(path, error) from None
    entries = [
        _parse_entry(path, number, line) for number, line in enumerate(lines, 1) if line.strip()
    ]
    revoked = {entry for entry in entries if isinstance(entry, str)}
    return tuple(
        entry for entry in entries if isinstance(entry, ApiKey) and entry.sha256 not in revoked
    )


def create_key(path: Path, name: str, scopes: Iterable[str]) -> tuple[str, ApiKey]:
    """Create a key and add it to the file. A missing file is created.

    Returns the text of the key, which is stored nowhere.
    """
    wanted = tuple(dict.fromkeys(scopes))
    if not NAME.fullmatch(name) or name == RESERVED:
        raise KeysError(
            f"{name!r} cannot be the name of a key.",
            "Use lower case, digits, dot, dash, underscore.",
        )
    if not wanted or set(wanted) - set(SCOPES):
        raise KeysError(
            f"the scopes {', '.join(wanted) or '(none)'} are unknown.",
            f"Use {', '.join(SCOPES)}.",
        )
    text = PREFIX + secrets.token_urlsafe(32)
    key = ApiKey(name, hash_key(text), wanted, _format_now())
    if path.exists():
        read_keys(path)  # a file with errors gets no more lines
    _append(path, asdict(key))
    return text, key


def revoke_keys(path: Path, name_or_id: str) -> list[ApiKey]:
    """Revoke the key with this id, or every key with this name. Returns them."""
    ended = [key for key in read_keys(path) if name_or_id in (key.name, key.id)]
    if not ended:
        raise KeysError(f"no key in {path} has the name or id {name_or_id!r}.", "See `kd keys ls`.")
    for key in ended:
        _append(path, {"revoked": key.sha256, "at": _format_now()})
    return ended


def _append(path: Path, entry: dict[str, Any]) -> None:
    line = json.dumps(entry).encode() + b"\n"
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            wait_for_lock(handle)
            size = os.fstat(handle).st_size
            torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
            os.write(handle, b"\n" * torn + line)
            os.fsync(handle)
        finally:
            os.close(handle)


def _parse_entry(path: Path, number: int, line: str) -> ApiKey | str:
    """A key, or the digest of a revoked one."""
    try:
        entry = json.loads(line)
        if "revoked" in entry:
            return _require(entry["revoked"], _SHA256)
        name = _require(entry["name"], NAME)
        digest = _require(entry["sha256"], _SHA256)
        scopes = tuple(entry["scopes"])
        if not scopes or set(scopes) - set(SCOPES):
            raise ValueError(f"scopes must be some of {', '.join(SCOPES)}")
        return ApiKey(name, digest, scopes, str(entry.get("created_at", "")))
    except (ValueError, TypeError, KeyError) as error:
        remedy = "Correct or remove the line; until then no key is accepted."
        raise KeysError(
            f"{path}, line {number}: this is not a key ({type(error).__name__}: {error}).", remedy
        ) from None


def _require(value: Any, pattern: re.Pattern[str]) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError(f"a value is not of the form {pattern.pattern}")
    return value


def _read_file_state(path: Path) -> tuple[int, ...]:
    """Values that change with the file. Raises ``KeysError`` if others may read or write it."""
    try:
        found = path.stat()
    except OSError as error:
        raise _make_unreadable_error(path, error) from None
    if found.st_mode & _FORBIDDEN_MODE:
        mode = stat.S_IMODE(found.st_mode)
        raise KeysError(
            f"the mode of {path} is {mode:04o}, so that others may use it.", f"chmod 600 {path}"
        )
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_mode


def _make_unreadable_error(path: Path, error: Exception) -> KeysError:
    reason = getattr(error, "strerror", None) or error
    return KeysError(
        f"the file of API keys {path} cannot be read: {reason}.", "Make one: `kd keys new NAME`."
    )


def _format_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
