"""The file of API keys (``KD_API_KEYS_FILE``): what it says, and how it grows. Knows nothing of HTTP.

    {"name": "alice", "sha256": "...", "scopes": ["write"], "created_at": "2026-11-21T12:00:00+00:00"}
    {"revoked": "...", "at": "2026-11-22T12:00:00+00:00"}

A line is a key or the end of one. Lines are only ever added, at the end and in one write: who reads meanwhile sees a
whole file, also through a mount of that one file, and what was revoked when stays on record. Of a key only the SHA-256
is kept; with 256 random bits in it there is nothing to guess, and so no need for a slow hash.

read      look at jobs, caches and workers       write   also post and change jobs, and delete caches
admin     also see the jobs and caches of every key
"""

from __future__ import annotations

import fcntl
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

from cache.disk import storage_errors
from cache.errors import PotstillError

PREFIX = "kd_"
SCOPES = ("read", "write", "admin")  #: each holds those before it
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
RESERVED = "local"  #: who made the jobs of a time without keys
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FORBIDDEN_MODE = stat.S_IWGRP | stat.S_IROTH | stat.S_IWOTH


class KeysError(PotstillError):
    """The file of keys cannot be used, or a key cannot be made or revoked."""

    type = "keys_error"


@dataclass(frozen=True)
class ApiKey:
    """A key that holds: whose it is, and what it may do. Several keys of one name are one owner's."""

    name: str
    sha256: str
    scopes: tuple[str, ...]
    created_at: str

    @property
    def id(self) -> str:
        """By which it is revoked."""
        return self.sha256[:12]

    def may(self, scope: str) -> bool:
        """Whether the key holds ``scope`` or one above it."""
        return any(SCOPES.index(held) >= SCOPES.index(scope) for held in self.scopes)


class KeyFile:
    """The keys in a file, read again whenever it has changed. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._seen: tuple[int, ...] = ()
        self._keys: tuple[ApiKey, ...] = ()

    def keys(self) -> tuple[ApiKey, ...]:
        """The keys that hold now; raises ``KeysError`` where the file is gone, open to others or not in order."""
        with self._lock:
            state = _state(self.path)
            if state != self._seen:
                self._keys, self._seen = read_keys(self.path), state
            return self._keys

    def find(self, key: str) -> ApiKey | None:
        """Whose key this is. Takes as long for one that nobody has as for any other."""
        shown, found = digest_of(key), None
        for each in self.keys():
            if hmac.compare_digest(shown, each.sha256):
                found = each
        return found


def digest_of(key: str) -> str:
    """The SHA-256 of a key, in hex."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """The keys in the file that were not revoked, oldest first."""
    _state(path)
    try:
        with path.open(encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH)  # else half of a line that is being added may be seen
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from None
    entries = [_entry(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    revoked = {entry for entry in entries if isinstance(entry, str)}
    return tuple(entry for entry in entries if isinstance(entry, ApiKey) and entry.sha256 not in revoked)


def new_key(path: Path, name: str, scopes: Iterable[str]) -> tuple[str, ApiKey]:
    """Make a key and add it to the file, which is made where there is none; only the returned text can be shown."""
    wanted = tuple(dict.fromkeys(scopes))
    if not NAME.fullmatch(name) or name == RESERVED:
        raise KeysError(f"{name!r} cannot be the name of a key.", "Use lower case, digits, dot, dash, underscore.")
    if not wanted or set(wanted) - set(SCOPES):
        raise KeysError(f"the scopes {', '.join(wanted) or '(none)'} are not known.", f"Use {', '.join(SCOPES)}.")
    text = PREFIX + secrets.token_urlsafe(32)
    key = ApiKey(name, digest_of(text), wanted, _now())
    if path.exists():
        read_keys(path)  # nothing is added to what cannot be read
    _append(path, asdict(key))
    return text, key


def revoke(path: Path, name_or_id: str) -> list[ApiKey]:
    """End the key with that id, or every key of that name; returns them."""
    ended = [key for key in read_keys(path) if name_or_id in (key.name, key.id)]
    if not ended:
        raise KeysError(f"no key in {path} has the name or id {name_or_id!r}.", "See `kd keys ls`.")
    for key in ended:
        _append(path, {"revoked": key.sha256, "at": _now()})
    return ended


def _append(path: Path, entry: dict[str, Any]) -> None:
    line = json.dumps(entry).encode() + b"\n"
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            size = os.fstat(handle).st_size
            torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
            os.write(handle, b"\n" * torn + line)
            os.fsync(handle)
        finally:
            os.close(handle)


def _entry(path: Path, number: int, line: str) -> ApiKey | str:
    """A key, or the digest of one that was revoked."""
    try:
        entry = json.loads(line)
        if "revoked" in entry:
            return _require(entry["revoked"], _SHA256)
        name, digest = _require(entry["name"], NAME), _require(entry["sha256"], _SHA256)
        scopes = tuple(entry["scopes"])
        if not scopes or set(scopes) - set(SCOPES):
            raise ValueError(f"scopes must be some of {', '.join(SCOPES)}")
        return ApiKey(name, digest, scopes, str(entry.get("created_at", "")))
    except (ValueError, TypeError, KeyError) as error:
        remedy = "Mend or remove the line; until then nobody is let in."
        raise KeysError(f"{path}, line {number}: no key ({type(error).__name__}: {error}).", remedy) from None


def _require(value: Any, pattern: re.Pattern[str]) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError(f"a value is not of the form {pattern.pattern}")
    return value


def _state(path: Path) -> tuple[int, ...]:
    """What changes whenever the file does; raises ``KeysError`` where others may read or write it."""
    try:
        found = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from None
    if found.st_mode & _FORBIDDEN_MODE:
        mode = stat.S_IMODE(found.st_mode)
        raise KeysError(f"the mode of {path} is {mode:04o}, so that others may use it.", f"chmod 600 {path}")
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_mode


def _unreadable(path: Path, error: Exception) -> KeysError:
    reason = getattr(error, "strerror", None) or error
    return KeysError(f"the file of API keys {path} cannot be read: {reason}.", "Make one: `kd keys new NAME`.")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
