"""The file of API keys (``KD_API_KEYS_FILE``).

    {"name": "alice", "sha256": "...", "scopes": ["write"], "created_at": "2026-11-21T..."}
    {"name": "bob", ..., "expires_at": "2027-02-21T...", "team": "nlp"}
    {"revoked": "...", "at": "2026-11-22T12:00:00+00:00"}
    {"quota_of": "nlp", "device_seconds": 36000.0, "bytes": null, "at": "2026-11-22T..."}

A line {"format": 2} would say that the lines after it are of another format: the file is refused.
A line creates or revokes a key, or sets the quotas of a team, which replace earlier ones. A key is
refused from its ``expires_at`` on. Keys of one name are of one team. Lines are only added,
at the end and in one write, so that a reader always sees a whole file, also through a mount of only
the file, and the history is kept. Only the SHA-256 of a key is stored. A slow hash is not needed,
because a key has 256 random bits.

read    see jobs, caches and workers
write   also post and change jobs, and delete caches
admin   also see the jobs and caches of every key
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
import stat
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cache.disk import storage_errors, wait_for_lock
from cache.errors import PotstillError
from cache.json_object import Json
from services.store.appending import append_line
from services.store.callers import Quota

#: The format of the file: that of a file in which no line names one.
FORMAT = 1
#: Start of every key, by which a log finds and hides it.
PREFIX = "kd_"
#: Each scope includes those before it.
SCOPES = ("read", "write", "admin")
#: Names that a key may have.
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
#: The owner of jobs that were created without keys.
RESERVED = "local"
#: The time before its end in which every answer warns of the end of a key.
WARNING_TIME = timedelta(days=14)
_UNITS = {"h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}
_LIFETIME = re.compile(r"(\d{1,5})([hdw])")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FORBIDDEN_MODE = stat.S_IWGRP | stat.S_IROTH | stat.S_IWOTH


class KeysError(PotstillError):
    """The file of keys cannot be used, or a key cannot be created or revoked."""

    type = "keys_error"


@dataclass(frozen=True)
class ApiKey:
    """A key that is not revoked: its owner's name and its scopes. An owner may have several keys.

    ``expires_at`` is None for a key without an end, ``team`` for one that is a team of its own.
    """

    name: str
    sha256: str
    scopes: tuple[str, ...]
    created_at: str
    expires_at: datetime | None = None
    team: str | None = None

    @property
    def id(self) -> str:
        """A short id, by which the key can be revoked."""
        return self.sha256[:12]

    @property
    def expired(self) -> bool:
        """True if the key has come to its end."""
        return self.expires_at is not None and datetime.now(UTC) >= self.expires_at

    @property
    def expires_soon(self) -> bool:
        """True if callers should be warned of the key's end."""
        return self.expires_at is not None and datetime.now(UTC) >= self.expires_at - WARNING_TIME

    def may(self, scope: str) -> bool:
        """Return whether the key has ``scope`` or one that includes it."""
        return any(SCOPES.index(held) >= SCOPES.index(scope) for held in self.scopes)


class KeyFile:
    """The keys in a file, which is read again when it has changed. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._seen: tuple[int, ...] = ()
        self._content: tuple[tuple[ApiKey, ...], dict[str, Quota]] = ((), {})

    def list_keys(self) -> tuple[ApiKey, ...]:
        """The keys that are not revoked, with those that have expired.

        Raises ``KeysError`` if the file is missing or damaged, or if others may use it.
        """
        return self._read()[0]

    def list_quotas(self) -> dict[str, Quota]:
        """The quotas of teams that have their own. Raises ``KeysError`` as ``list_keys``."""
        return dict(self._read()[1])

    def _read(self) -> tuple[tuple[ApiKey, ...], dict[str, Quota]]:
        with self._lock:
            state = _read_file_state(self.path)
            if state != self._seen:
                self._content = _read_file(self.path)
                self._seen = state
            return self._content

    def find(self, key: str) -> ApiKey | None:
        """Find a key, which may have expired. Unknown keys take as long as known ones."""
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
    return _read_file(path)[0]


def _read_file(path: Path) -> tuple[tuple[ApiKey, ...], dict[str, Quota]]:
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
    keys = tuple(
        entry for entry in entries if isinstance(entry, ApiKey) and entry.sha256 not in revoked
    )
    return keys, dict(entry for entry in entries if isinstance(entry, tuple))


def parse_lifetime(text: str) -> timedelta:
    """Return the time that text such as ``90d`` names; raises ``KeysError`` for any other text."""
    match = _LIFETIME.fullmatch(text.strip())
    if match is None or not int(match[1]):
        remedy = "Give a whole number and a unit: 90d for days, 12h for hours, 26w for weeks."
        raise KeysError(f"{text!r} is not a time for which a key is valid.", remedy)
    return int(match[1]) * _UNITS[match[2]]


def create_key(
    path: Path,
    name: str,
    scopes: Iterable[str],
    lifetime: timedelta | None = None,
    team: str | None = None,
) -> tuple[str, ApiKey]:
    """Create a key and add it to the file. A missing file is created.

    The key expires after ``lifetime``; None = never. Without a ``team`` it is of the team of the
    other keys of this name; if there is none, it is a team of its own.

    Returns the text of the key, which is stored nowhere.
    """
    wanted = tuple(dict.fromkeys(scopes))
    _require_name("key", name)
    if not wanted or set(wanted) - set(SCOPES):
        remedy = f"Use {', '.join(SCOPES)}."
        raise KeysError(f"the scopes {', '.join(wanted) or '(none)'} are unknown.", remedy)
    team = _choose_team(path, name, team)
    text = PREFIX + secrets.token_urlsafe(32)
    end = None if lifetime is None else datetime.now(UTC).replace(microsecond=0) + lifetime
    key = ApiKey(name, hash_key(text), wanted, _format_now(), end, team)
    entry = asdict(key) | {"expires_at": end and end.isoformat()}
    _append(path, {name: value for name, value in entry.items() if value is not None})
    return text, key


def _choose_team(path: Path, name: str, team: str | None) -> str | None:
    """The team of a new key. A file with errors raises ``KeysError``, and gets no more lines."""
    _require_name("team", team)
    teams = {key.team for key in read_keys(path) if key.name == name} if path.exists() else set()
    if team is None:
        return next(iter(teams), None)
    if teams - {team}:
        other = next(iter(teams - {team})) or name
        detail = f"the keys of {name} are of team {other}, and cannot be of team {team} too."
        raise KeysError(detail, f"Leave --team out, or revoke them first: kd keys revoke {name}.")
    return team


def _require_name(kind: str, name: str | None) -> None:
    if name is not None and (not NAME.fullmatch(name) or (kind == "key" and name == RESERVED)):
        remedy = "Use lower case, digits, dot, dash, underscore."
        raise KeysError(f"{name!r} cannot be the name of a {kind}.", remedy)


def set_quota(path: Path, team: str, quota: Quota) -> None:
    """Set the quotas of a team. Where a value is None, the operator's setting counts."""
    _require_name("team", team)
    read_keys(path)  # a file with errors, or none, gets no more lines
    _append(path, {"quota_of": team, **asdict(quota), "at": _format_now()})


def revoke_keys(path: Path, name_or_id: str) -> list[ApiKey]:
    """Revoke the key with this id, or every key with this name. Returns them."""
    ended = [key for key in read_keys(path) if name_or_id in (key.name, key.id)]
    if not ended:
        raise KeysError(f"no key in {path} has the name or id {name_or_id!r}.", "See `kd keys ls`.")
    for key in ended:
        _append(path, {"revoked": key.sha256, "at": _format_now()})
    return ended


def _append(path: Path, entry: Json) -> None:
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        append_line(path, entry)


def _parse_entry(path: Path, number: int, line: str) -> ApiKey | str | tuple[str, Quota]:
    """A key, or the digest of a revoked one, or a team and its quotas."""
    try:
        entry = json.loads(line)
        if "format" in entry:
            if int(entry["format"]) > FORMAT:
                raise KeysError(
                    f"{path} has key file format {int(entry['format'])}, but this version reads "
                    f"{FORMAT}.",
                    "Use the version that wrote it, or a newer one.",
                )
            return ""  # the digest of no key
        if "quota_of" in entry:
            return _require(entry["quota_of"], NAME), _parse_quota(entry)
        if "revoked" in entry:
            return _require(entry["revoked"], _SHA256)
        name = _require(entry["name"], NAME)
        digest = _require(entry["sha256"], _SHA256)
        scopes = tuple(entry["scopes"])
        if not scopes or set(scopes) - set(SCOPES):
            raise ValueError(f"scopes must be some of {', '.join(SCOPES)}")
        text = entry.get("expires_at")
        end = None if text is None else datetime.fromisoformat(text)
        if end is not None and end.tzinfo is None:
            raise ValueError("expires_at must name its time zone")
        team = _require(entry["team"], NAME) if "team" in entry else None
        return ApiKey(name, digest, scopes, str(entry.get("created_at", "")), end, team)
    except (ValueError, TypeError, KeyError) as error:
        remedy = "Correct or remove the line; until then no key is accepted."
        detail = f"{path}, line {number}: this is not a key ({type(error).__name__}: {error})."
        raise KeysError(detail, remedy) from None


def _parse_quota(entry: Json) -> Quota:
    seconds, size = entry.get("device_seconds"), entry.get("bytes")
    for value in (seconds, size):
        if value is not None and not 0 < value < float("inf"):
            raise ValueError("a quota must be a number above 0")
    return Quota(None if seconds is None else float(seconds), None if size is None else int(size))


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
        remedy = f"chmod 600 {path}"
        raise KeysError(f"the mode of {path} is {mode:04o}, so that others may use it.", remedy)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_mode


def _make_unreadable_error(path: Path, error: Exception) -> KeysError:
    reason = getattr(error, "strerror", None) or error
    detail = f"the file of API keys {path} cannot be read: {reason}."
    return KeysError(detail, "Make one: `kd keys new NAME`.")


def _format_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
