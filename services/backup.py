"""What ``kd backup`` and ``kd restore`` do: every job, cache and run of a service in one folder, and back.

    redis.jsonl      the job store: a line a key, with its end of life and its value as DUMP gives it
    api_keys         the digests of the API's keys, where the operator has that file
    caches/, runs/   as under KD_HOME
    backup.json      what there is, with sizes and sha256: written last, so that a folder without it is no backup

The service may run meanwhile. The store is read first, at one moment: its writes wait for a second or so. What its
records name is on the disk by then, and whatever the disk holds besides was going to be checked on resume anyway.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from redis import Redis
from redis.exceptions import RedisError, ResponseError

from cache.disk import TEMPORARY, file_sha256, files_below, make_folder, remove, storage_errors, sync, write_file
from cache.errors import PotstillError, StorageError
from services.jobs import Claim, JobStore, connect

if TYPE_CHECKING:
    from services.settings import Settings

FORMAT = 1
INDEX, STORE, KEYS = "backup.json", "redis.jsonl", "api_keys"
TREES = ("caches", "runs")  #: the folders of KD_HOME that cannot be made again from the rest
PASSING = ("kd:celery:", "kd:worker:", "kd:workers")  #: hints and signs of life, which mean nothing later
PAUSE_SECONDS = 5.0
TIMEOUT_SECONDS = 30.0
SCAN = 500
TRIES = 20
SETTLE_SECONDS = 0.5
CHUNK_BYTES = 1 << 20
SPARE_BYTES = 64 << 20


class BackupError(PotstillError):
    """No backup was made, or none can be put back."""

    type = "backup_failed"


@dataclass(frozen=True)
class File:
    """One file of a backup."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Backup:
    """What ``backup.json`` says; ``files`` is by path, with forward slashes."""

    version: str
    created_at: str
    home: str
    keys: int
    files: dict[str, File]

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(file.bytes for file in self.files.values())

    def to_json(self) -> dict[str, Any]:
        """The content of the file."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def read(cls, folder: Path) -> Backup:
        """The backup in ``folder``, its files not yet looked at."""
        try:
            found = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            if found.pop("format") != FORMAT:
                raise BackupError(f"{folder} was written by another version.", "Restore it with that version.")
            files = {name: File(**file) for name, file in found.pop("files").items()}
            return cls(**found, files=files)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BackupError(f"{folder} is no backup: {INDEX}: {error}.", "Name a folder of `kd backup`.") from None


@contextlib.contextmanager
def store_of(settings: Settings) -> Iterator[Redis]:
    """A client of the job store, which is started where it is the embedded one and does not run."""
    from services.embedded import ServerError, redis_url

    with redis_url(settings) as (url, _), connect(url, TIMEOUT_SECONDS) as client:
        try:
            client.ping()
        except RedisError as error:
            raise ServerError(f"The job store does not serve: {error}.", "Start it, or mend KD_REDIS_URL.") from None
        yield client


# ---------------------------------------------------------------------- backup


def make_backup(folder: Path, settings: Settings, client: Redis, pause_seconds: float = PAUSE_SECONDS) -> Backup:
    """Write a backup to ``folder``, whole or not at all."""
    _require_new(folder, settings)
    temporary = folder.with_name(TEMPORARY + folder.name)
    with storage_errors(folder.parent):
        make_folder(folder.parent)
        remove(temporary)
        temporary.mkdir(mode=0o700)
        try:
            made = _fill(temporary, settings, client, pause_seconds)
            _publish(temporary, folder)
        finally:
            remove(temporary)
    return made


def _require_new(folder: Path, settings: Settings) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BackupError(f"{folder} exists and is not empty.", "Name a folder that does not exist yet.")
    if folder.is_relative_to(settings.home):
        raise BackupError(f"{folder} lies in KD_HOME, and would be lost with it.", "Name a folder elsewhere.")
    needed = SPARE_BYTES + sum(sum(files_below(settings.home / tree).values()) for tree in TREES)
    free = shutil.disk_usage(next(parent for parent in folder.parents if parent.exists())).free
    if free < needed:
        detail = f"{folder.parent}: a backup needs {needed} bytes, and {free} are free."
        raise StorageError(detail, "Free space there, or name a folder on another disk.")


def _fill(folder: Path, settings: Settings, client: Redis, pause_seconds: float) -> Backup:
    rows = read_store(client, pause_seconds)
    with (folder / STORE).open("w", encoding="ascii") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    files = {STORE: File((folder / STORE).stat().st_size, file_sha256(folder / STORE))}
    keys = settings.api_keys_file
    if keys is not None and keys.exists():
        files[KEYS] = copy_file(keys, folder / KEYS)
        (folder / KEYS).chmod(0o600)
    for tree in TREES:
        found = copy_folder(settings.home / tree, folder / tree)
        files |= {f"{tree}/{name}": file for name, file in found.items()}
    made = Backup(_version(), datetime.now(UTC).isoformat(timespec="seconds"), str(settings.home), len(rows), files)
    write_file(folder / INDEX, (json.dumps(made.to_json(), indent=1) + "\n").encode())
    return made


def read_store(client: Redis, pause_seconds: float) -> list[dict[str, Any]]:
    """Every key, its end of life (Unix milliseconds, 0 = none) and its value, all of one moment.

    No write is served while they are read; should this process die, the server goes on after ``pause_seconds``.
    """
    found: dict[str, tuple[bytes, int]] = {}
    began = time.monotonic()
    client.client_pause(int(pause_seconds * 1000), all=False)
    try:
        seconds, microseconds = client.time()
        for keys in _batches(client):
            if time.monotonic() - began > pause_seconds:
                raise _too_slow(pause_seconds)
            found |= _dump(client, keys)
        if time.monotonic() - began > pause_seconds:
            raise _too_slow(pause_seconds)
    finally:
        client.client_unpause()
    now = seconds * 1000 + microseconds // 1000
    return [
        {"key": key, "until": now + ttl if ttl >= 0 else 0, "dump": base64.b64encode(value).decode()}
        for key, (value, ttl) in sorted(found.items())
    ]


def _too_slow(pause_seconds: float) -> BackupError:
    return BackupError(
        f"The job store could not be read within {pause_seconds:g} s, for which its writes may wait.",
        "Stop the API and the workers, then give --pause more.",
    )


def _batches(client: Redis) -> Iterator[list[str]]:
    cursor = -1
    while cursor:
        cursor, keys = cast(tuple[int, list[str]], client.scan(max(cursor, 0), match="kd:*", count=SCAN))
        yield [key for key in keys if not key.startswith(PASSING)]


def _dump(client: Redis, keys: list[str]) -> dict[str, tuple[bytes, int]]:
    pipeline = client.pipeline(transaction=False)
    for key in keys:
        pipeline.dump(key)
        pipeline.pttl(key)
    answers = pipeline.execute() if keys else []
    pairs = zip(keys, answers[::2], answers[1::2], strict=True)
    return {key: (value, ttl) for key, value, ttl in pairs if value is not None}


# ---------------------------------------------------------------------- files that may change while they are copied


class _Changed(Exception):
    """A folder is not the one that the copy began with."""


def copy_folder(source: Path, target: Path) -> dict[str, File]:
    """Copy a folder that a run may write to; a folder below it that goes away meanwhile is as if it had never been.

    What has a rename to come (``.tmp-``), locks and links are left out. A file that grows is copied as long as it was;
    a folder that another takes the place of is copied anew, so that none is a mixture of two. One that changed just
    now may be on its way out, half of it gone already: it is looked at again when that is over.
    """
    for _ in range(TRIES):
        try:
            return _copy_once(source, target) if source.exists() else {}
        except (_Changed, FileNotFoundError):
            remove(target)
            time.sleep(0.05)
    raise BackupError(f"{source} changed each of {TRIES} times that it was read.", "Try again when its job has ended.")


def _copy_once(source: Path, target: Path) -> dict[str, File]:
    before = source.stat()
    entries = sorted((entry for entry in os.scandir(source) if _kept(entry)), key=lambda entry: entry.name)
    target.mkdir()
    found: dict[str, File] = {}
    for entry in entries:
        below = target / entry.name
        if entry.is_dir(follow_symlinks=False):
            found |= {f"{entry.name}/{name}": file for name, file in copy_folder(Path(entry), below).items()}
        else:
            found[entry.name] = copy_file(Path(entry), below)
    time.sleep(max(min(before.st_mtime + SETTLE_SECONDS - time.time(), SETTLE_SECONDS), 0))
    files = [path.name for path in target.iterdir() if path.is_file()]
    if source.stat().st_ino != before.st_ino or not all(os.path.lexists(source / name) for name in files):
        raise _Changed
    return found


def _kept(entry: os.DirEntry[str]) -> bool:
    passing = entry.name.startswith(TEMPORARY) or entry.name.endswith(".lock")
    return not passing and (entry.is_dir(follow_symlinks=False) or entry.is_file(follow_symlinks=False))


def copy_file(source: Path, target: Path) -> File:
    """Copy the bytes that the file has now; the digest is that of the bytes written."""
    digest, copied = hashlib.sha256(), 0
    with source.open("rb") as reader, target.open("xb") as writer:
        left = os.fstat(reader.fileno()).st_size
        while left and (chunk := reader.read(min(left, CHUNK_BYTES))):
            writer.write(chunk)
            digest.update(chunk)
            left, copied = left - len(chunk), copied + len(chunk)
    return File(copied, digest.hexdigest())


def _publish(temporary: Path, folder: Path) -> None:
    for name in files_below(temporary):
        sync(temporary / name)
    if folder.exists():
        folder.rmdir()
    temporary.rename(folder)
    sync(folder.parent)


def _version() -> str:
    from importlib.metadata import version

    return version("potstill")


# ---------------------------------------------------------------------- restore


def verified(folder: Path) -> Backup:
    """The backup in ``folder``, every file of which is as it was written."""
    found = Backup.read(folder)
    sizes = files_below(folder)
    sizes.pop(INDEX)
    wrong = [f"{name}: missing" for name in found.files if name not in sizes]
    wrong += [f"{name}: not part of the backup" for name in sizes if name not in found.files]
    for name in found.files.keys() & sizes.keys():
        if found.files[name] != File(sizes[name], file_sha256(folder / name)):
            wrong.append(f"{name}: other bytes than were written")
    if wrong:
        detail = f"{folder} is damaged in {len(wrong)} places: {'; '.join(sorted(wrong)[:5])}."
        raise BackupError(detail, "Nothing was restored; take another backup.")
    return found


def restore_backup(folder: Path, found: Backup, settings: Settings, client: Redis, force: bool) -> list[str]:
    """Put a verified backup in place; returns the jobs that were running in it, which now wait to be run on.

    The files go first, so that no record names what is not there yet; interrupted, it must be done again.
    """
    _require_stopped(client)
    if not force:
        _require_empty(settings, client)
    with storage_errors(settings.home):
        make_folder(settings.home)
        for tree in TREES:
            _replace(folder / tree, settings.home / tree)
        if settings.api_keys_file is not None and KEYS in found.files:
            write_keys(settings.api_keys_file, (folder / KEYS).read_bytes())
    with (folder / STORE).open(encoding="ascii") as lines:
        write_store(client, (json.loads(line) for line in lines))
    return release_all(client)


def _require_stopped(client: Redis) -> None:
    if alive := JobStore(client).workers():
        names = ", ".join(worker.id for worker in alive[:5])
        raise BackupError(f"Workers are at work on this job store: {names}.", "Stop them and the API, then try again.")


def _require_empty(settings: Settings, client: Redis) -> None:
    jobs = client.exists("kd:index:*:*", "kd:open", "kd:jobs")
    there = [tree for tree in TREES if files_below(settings.home / tree)]
    keys = settings.api_keys_file
    there += [str(keys)] if keys is not None and keys.exists() and keys.stat().st_size else []
    if jobs or there:
        what = [*(["jobs in the job store"] if jobs else []), *there]
        raise BackupError(f"{settings.home} is not empty: {', '.join(what)}.", "--force replaces all of it.")


def _replace(source: Path, target: Path) -> None:
    temporary = target.with_name(TEMPORARY + target.name)
    remove(temporary)
    temporary.mkdir()
    copy_folder(source, temporary / "whole")
    remove(target)
    if source.exists():
        _publish(temporary / "whole", target)
    remove(temporary)


def write_keys(path: Path, data: bytes) -> None:
    """Put the API's keys in place, readable for their owner alone."""
    make_folder(path.parent)
    temporary = path.with_name(TEMPORARY + path.name)
    remove(temporary)
    temporary.touch(mode=0o600)
    temporary.write_bytes(data)
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def write_store(client: Redis, rows: Iterator[dict[str, Any]]) -> None:
    """Empty the job store and fill it with what ``read_store`` found."""
    for keys in list(_batches(client)):
        if keys:
            client.unlink(*keys)
    pipeline = client.pipeline(transaction=False)
    try:
        for number, row in enumerate(rows, 1):
            value = base64.b64decode(row["dump"])
            pipeline.restore(row["key"], row["until"], value, replace=True, absttl=bool(row["until"]))
            if number % SCAN == 0:
                pipeline.execute()
        pipeline.execute()
    except ResponseError as error:
        raise BackupError(
            f"The job store refuses a value: {error}.",
            "It must be as new as the one that was backed up, and have as much memory; then restore with --force.",
        ) from None


def release_all(client: Redis) -> list[str]:
    """Take every job from the worker that had it, as if that one had stopped cleanly: it costs no attempt."""
    store = JobStore(client)
    running = cast(list[str], client.zrange("kd:leases", 0, -1))
    for job_id in running:
        fence = cast(str, client.hget(f"kd:job:{job_id}", "fence"))
        store.release(Claim(job_id, int(fence), 0, {}))
    return running
