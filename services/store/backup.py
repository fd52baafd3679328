"""``kd backup`` and ``kd restore``: every job, cache and run of a service in one folder, and back.

    redis.jsonl      the job store: one line for each key, with its expiry and its value from DUMP
    api_keys         the digests of the API keys, if the operator has that file
    caches/, runs/, files/, models/, data/   as under KD_HOME; caches/ as under KD_STORE, if set
    lacking.json     what jobs name and the backup lacks, and links that were left out
    backup.json      the files with sizes and sha256; written last, so that a folder without it is
                     not a backup

The service may run meanwhile. The store is read first, at one moment, while its writes wait for
about a second. The files that its records name are on the disk by then. A run checks any other file
when it resumes.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, cast

from redis import Redis
from redis.exceptions import RedisError, ResponseError

from cache import disk
from cache.errors import PotstillError, StorageError
from cache.json_object import Json
from cache.remote.address import PLACE_FILE
from kd.config.jobfile import read_record
from kd.files import measure_free_bytes
from kd.preflight.named_paths import find_plain_prefix, list_named_resources, list_relative_paths
from kd.python.version import read_version
from services.store.connection import connect_redis, describe_failure
from services.store.jobs.leases import Claim
from services.store.jobs.store import JobStore
from services.store.retention.in_use import NAME

if TYPE_CHECKING:
    from services.settings import Settings

#: Format of ``backup.json``.
FORMAT = 1
INDEX = "backup.json"
STORE = "redis.jsonl"
KEYS = "api_keys"
LACKING = "lacking.json"
#: The folders of KD_HOME that cannot be made again from the rest.
TREES = ("caches", "runs", "files", "models", "data")
#: An absolute path in the record of a job, as JSON; of a pattern the folder before it.
_PATH = re.compile(r'"(/[^"\\*?\[]+(?=")|/[^"\\*?\[]*/)')
#: Ends of the names of files beside caches that only running processes, or only this folder, need.
PASSING_SUFFIXES = (".lock", ".used", ".writers", PLACE_FILE)
#: Keys of hints and heartbeats, which mean nothing later.
SKIPPED_PREFIXES = ("kd:celery:", "kd:worker:", "kd:workers")
#: Time for which the writes of the store may wait.
PAUSE_SECONDS = 5.0
#: Time that a call of Redis may take.
TIMEOUT_SECONDS = 30.0
#: Keys in one call of Redis.
SCAN = 500
#: Times that a folder is copied before it counts as always changing.
TRIES = 20
#: Age below which a folder may still be changing.
SETTLE_SECONDS = 0.5
#: Bytes that a copy reads at once.
COPY_BYTES = 1 << 20
#: Free space that must remain besides the files: for the store and the index.
SPARE_BYTES = 64 << 20


class BackupError(PotstillError):
    """A backup or a restore failed."""

    type = "backup_failed"


@dataclass(frozen=True)
class BackupFile:
    """One file of a backup."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Backup:
    """The content of ``backup.json``. Keys of ``files`` are paths with forward slashes."""

    version: str
    created_at: str
    home: str
    keys: int
    files: dict[str, BackupFile]

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.bytes for file in self.files.values())

    def to_json(self) -> Json:
        """The content of the file as JSON."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def read(cls, folder: Path) -> Backup:
        """Read the index of the backup in ``folder``. Its files are not checked."""
        try:
            found = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            if (number := found.pop("format")) != FORMAT:
                writer = found.get("version", "another version")
                raise BackupError(
                    f"{folder} has backup format {number}, written by Potstill {writer}; this "
                    f"version, {read_version()}, reads format {FORMAT}.",
                    f"Restore it with Potstill {writer}.",
                )
            files = {name: BackupFile(**file) for name, file in found.pop("files").items()}
            return cls(**found, files=files)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            remedy = "Name a folder of `kd backup`."
            raise BackupError(f"{folder} is not a backup: {INDEX}: {error}.", remedy) from None


@dataclass(frozen=True)
class Lacking:
    """The things that a backup lacks.

    ``needed`` are folders, files, buckets and ids of a hub outside of it that jobs name, each with
    the number of those jobs; ``links`` are those that were left out, with what they lead to.
    """

    needed: dict[str, int]
    links: dict[str, str]

    @classmethod
    def read(cls, folder: Path) -> Lacking:
        """Read it from a backup; one of an earlier version says nothing."""
        path = folder / LACKING
        return cls(**json.loads(path.read_bytes())) if path.is_file() else cls({}, {})

    def describe(self) -> Iterator[str]:
        """Yield a line for each kind, with a count and examples."""
        if self.needed:
            named = [f"{name} ({count} jobs)" for name, count in list(self.needed.items())[:5]]
            places = f"Jobs name {len(self.needed)} places that are not in the backup"
            yield f"{places}: {', '.join(named)}"
        if self.links:
            named = [f"{name} -> {to}" for name, to in list(self.links.items())[:5]]
            yield f"Links that were left out: {len(self.links)}: {', '.join(named)}"


def locate_trees(settings: Settings) -> dict[str, Path]:
    """Map the folders of a backup to their places; a bucket of caches is no part of it."""
    places = {tree: settings.home / tree for tree in TREES}
    if not settings.in_bucket:
        places["caches"] = settings.caches
    return places


@contextlib.contextmanager
def open_store(settings: Settings) -> Iterator[Redis]:
    """A client of the job store. The embedded store is started if it does not run."""
    from services.store.embedded import StoreUnavailable, provide_redis

    with provide_redis(settings) as (url, _), connect_redis(url, TIMEOUT_SECONDS) as client:
        try:
            client.ping()
            yield client
        except RedisError as error:
            raise StoreUnavailable(
                f"The job store {describe_failure(error)}.",
                "Start it, or correct KD_REDIS_URL: its user must be allowed all commands of "
                "docs/how-to/several-hosts.md.",
            ) from None


# ---------------------------------------------------------------------- backup


def make_backup(
    folder: Path, settings: Settings, client: Redis, pause_seconds: float = PAUSE_SECONDS
) -> Backup:
    """Write a backup to ``folder``. After an error there is no such folder."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        remedy = "Name a folder that does not exist yet."
        raise BackupError(f"{folder} exists and is not empty.", remedy)
    places = locate_trees(settings)
    for name, place in {"KD_HOME": settings.home, "KD_STORE": places["caches"]}.items():
        if folder.is_relative_to(place):
            remedy = "Name another folder."
            raise BackupError(f"{folder} is in {name}, and would be lost with it.", remedy)
    parts = [part for place in places.values() for part in list_parts(place)]
    needed = SPARE_BYTES + sum(disk.sum_file_sizes(part) for part in parts)
    free = measure_free_bytes(folder)
    if free < needed:
        detail = f"{folder.parent}: a backup needs {needed} bytes, and {free} are free."
        raise StorageError(detail, "Free space there, or name a folder on another disk.")
    temporary = folder.with_name(disk.TEMPORARY_PREFIX + folder.name)
    with disk.storage_errors(folder.parent):
        disk.make_folder(folder.parent)
        disk.remove_path(temporary)
        temporary.mkdir(mode=0o700)
        try:
            made = _fill(temporary, settings, client, pause_seconds)
            _publish(temporary, folder)
        finally:
            disk.remove_path(temporary)
    return made


def _fill(folder: Path, settings: Settings, client: Redis, pause_seconds: float) -> Backup:
    rows = read_store(client, pause_seconds)
    with (folder / STORE).open("w", encoding="ascii") as file:
        file.writelines(json.dumps(asdict(row)) + "\n" for row in rows)
    files = {STORE: BackupFile((folder / STORE).stat().st_size, disk.hash_file(folder / STORE))}
    keys = settings.api_keys_file
    if keys is not None and keys.exists():
        files[KEYS] = copy_file(keys, folder / KEYS)
        (folder / KEYS).chmod(0o600)
    links: dict[str, str] = {}
    for tree, place in locate_trees(settings).items():
        found = copy_folder(place, folder / tree, links, leads=True)
        files |= {f"{tree}/{name}": file for name, file in found.items()}
    lacking = Lacking(_find_needed(settings, client), dict(sorted(links.items())))
    disk.write_file(folder / LACKING, (json.dumps(asdict(lacking), indent=1) + "\n").encode())
    files[LACKING] = BackupFile((folder / LACKING).stat().st_size, disk.hash_file(folder / LACKING))
    moment = datetime.now(UTC).isoformat(timespec="seconds")
    made = Backup(read_version(), moment, str(settings.home), len(rows), files)
    disk.write_file(folder / INDEX, (json.dumps(made.to_json(), indent=1) + "\n").encode())
    return made


def _find_needed(settings: Settings, client: Redis) -> dict[str, int]:
    """Count the jobs that name each place outside of the backup, where there is one."""
    kept = [place.resolve() for place in locate_trees(settings).values()]
    counts: Counter[str] = Counter()
    for job in JobStore(client).read_naming_jobs():
        paths, names = _list_named(job.text, settings.root)
        counts.update(names)
        for path in paths:
            is_there = os.path.exists(path)  # noqa: PTH110  Path raises for an impossible name
            if is_there and not any(map(path.resolve().is_relative_to, kept)):
                counts[str(path)] += 1
        if settings.in_bucket and NAME.search(job.text):
            counts[str(settings.store)] += 1
    return dict(sorted(counts.items()))


def _list_named(text: str, root: Path) -> tuple[set[Path], set[str]]:
    """List what the record of a job names: paths, and what is on a hub or in a bucket.

    A relative name starts at ``root``, as for a worker. It stays as it is if nothing is there.
    """
    paths = {Path(name) for name in _PATH.findall(text)}
    try:
        config = read_record(json.loads(text.partition("\n")[0]))
    except (PotstillError, ValueError):  # a record without a job, or with that of another version
        return paths, set()
    found = {
        each.name: root / find_plain_prefix(each) for each in list_relative_paths(config, root)
    }
    names = {name for name, path in found.items() if not os.path.exists(path)}  # noqa: PTH110
    for each in list_named_resources(config):
        if each.name not in found and each.kind != "task" and not Path(each.name).is_absolute():
            names.add(each.name)
    return paths.union(found.values()), names


@dataclass(frozen=True)
class StoredKey:
    """A key of the job store: its expiry in Unix milliseconds, 0 = none, and its value in base64.

    It is a line of the backup.
    """

    key: str
    until: int
    dump: str


def read_store(client: Redis, pause_seconds: float) -> list[StoredKey]:
    """Read every key at one moment.

    The server's writes wait meanwhile. If this process dies, they go on after ``pause_seconds``.
    """
    found: dict[str, tuple[bytes, int]] = {}
    began = time.monotonic()
    client.client_pause(int(pause_seconds * 1000), all=False)
    try:
        seconds, microseconds = client.time()
        for keys in _scan_keys(client):
            found |= _dump(client, keys)
            if time.monotonic() - began > pause_seconds:
                raise BackupError(
                    f"The job store could not be read within {pause_seconds:g} s. Its writes wait "
                    "no longer.",
                    "Stop the API and the workers, then use a longer --pause.",
                )
    finally:
        client.client_unpause()
    now = seconds * 1000 + microseconds // 1000
    return [
        StoredKey(key, now + ttl if ttl >= 0 else 0, base64.b64encode(value).decode())
        for key, (value, ttl) in sorted(found.items())
    ]


def _scan_keys(client: Redis) -> Iterator[list[str]]:
    """Yield the keys that a backup has, ``SCAN`` at most in each list."""
    found = cast(Iterator[str], client.scan_iter("kd:*", SCAN))
    keys = [key for key in found if not key.startswith(SKIPPED_PREFIXES)]
    yield from (keys[place : place + SCAN] for place in range(0, len(keys), SCAN))


def _dump(client: Redis, keys: list[str]) -> dict[str, tuple[bytes, int]]:
    pipeline = client.pipeline(transaction=False)
    for key in keys:
        pipeline.dump(key)
        pipeline.pttl(key)
    answers = pipeline.execute()
    pairs = zip(keys, answers[::2], answers[1::2], strict=True)
    return {key: (value, ttl) for key, value, ttl in pairs if value is not None}


# ---------------------------------------------------------------------- copies of changing files


class _FolderChanged(Exception):
    """Another folder has replaced the one that is copied."""


def list_parts(folder: Path) -> list[Path]:
    """List what lies directly in a folder of caches or runs, which may be links to other disks."""
    return list(folder.iterdir()) if folder.is_dir() else []


def copy_folder(
    source: Path, target: Path, links: dict[str, str], leads: bool = False
) -> dict[str, BackupFile]:
    """Copy a folder while a run may write to it.

    Temporary files (``.tmp-``), locks and links are left out; the links are added to ``links``.
    ``leads``: what the links directly in the folder lead to is copied in their place. A file that
    grows is copied up to its present size. A folder that another one replaces is copied again, so
    that no copy mixes the two. A folder that has just changed may be half deleted, so it is checked
    again a little later. A folder that disappears is left out.
    """
    for _ in range(TRIES):
        try:
            return _copy_once(source, target, links, leads) if source.exists() else {}
        except (_FolderChanged, FileNotFoundError):
            disk.remove_path(target)
            time.sleep(0.05)
    remedy = "Try again when its job has ended."
    raise BackupError(f"{source} changed each of {TRIES} times that it was read.", remedy)


def _copy_once(
    source: Path, target: Path, links: dict[str, str], leads: bool
) -> dict[str, BackupFile]:
    before = source.stat()
    target.mkdir()
    found: dict[str, BackupFile] = {}
    for entry in sorted(os.scandir(source), key=lambda entry: entry.name):
        below = target / entry.name
        if not _is_kept(entry, leads):
            if entry.is_symlink():
                links[entry.path] = str(Path(entry).readlink())
        elif entry.is_dir(follow_symlinks=leads):
            inner = copy_folder(Path(entry), below, links)
            found |= {f"{entry.name}/{name}": file for name, file in inner.items()}
        else:
            found[entry.name] = copy_file(Path(entry), below)
    time.sleep(max(min(before.st_mtime + SETTLE_SECONDS - time.time(), SETTLE_SECONDS), 0))
    files = [path.name for path in target.iterdir() if path.is_file()]
    if source.stat().st_ino != before.st_ino or not all(
        os.path.lexists(source / name) for name in files
    ):
        raise _FolderChanged
    return found


def _is_kept(entry: os.DirEntry[str], leads: bool) -> bool:
    passing = entry.name.startswith(disk.TEMPORARY_PREFIX) or entry.name.endswith(PASSING_SUFFIXES)
    return not passing and (
        entry.is_dir(follow_symlinks=leads) or entry.is_file(follow_symlinks=leads)
    )


def copy_file(source: Path, target: Path) -> BackupFile:
    """Copy the bytes that the file has now. The digest is of the copied bytes."""
    digest = hashlib.sha256()
    with source.open("rb") as reader:
        size = left = os.fstat(reader.fileno()).st_size
        with target.open("xb") as writer:
            while left and (chunk := reader.read(min(left, COPY_BYTES))):
                writer.write(chunk)
                digest.update(chunk)
                left -= len(chunk)
    return BackupFile(size - left, digest.hexdigest())


def _publish(temporary: Path, folder: Path) -> None:
    for path in [temporary, *temporary.rglob("*")]:
        disk.sync_path(path)
    if folder.exists():
        folder.rmdir()
    temporary.rename(folder)
    disk.sync_path(folder.parent)


# ---------------------------------------------------------------------- restore


def verify_backup(folder: Path) -> Backup:
    """Read the backup in ``folder`` and check every file. Raises ``BackupError``."""
    found = Backup.read(folder)
    sizes = disk.list_file_sizes(folder)
    sizes.pop(INDEX)
    wrong = [f"{name}: missing" for name in found.files if name not in sizes]
    wrong += [f"{name}: not part of the backup" for name in sizes if name not in found.files]
    for name in found.files.keys() & sizes.keys():
        if found.files[name] != BackupFile(sizes[name], disk.hash_file(folder / name)):
            wrong.append(f"{name}: its bytes have changed")
    if wrong:
        detail = f"{folder} is damaged in {len(wrong)} places: {'; '.join(sorted(wrong)[:5])}."
        raise BackupError(detail, "Nothing was restored; use another backup.")
    return found


def restore_backup(
    folder: Path, found: Backup, settings: Settings, client: Redis, force: bool
) -> list[str]:
    """Restore a verified backup. Returns the jobs that were running in it, which now wait.

    Files come before records, so that no record names a missing file. An interrupted restore must
    be repeated.
    """
    if alive := JobStore(client).list_workers():
        names = ", ".join(worker.id for worker in alive[:5])
        remedy = "Stop them and the API, then try again."
        raise BackupError(f"Workers use this job store: {names}.", remedy)
    if not force:
        _require_empty(settings, client)
    with disk.storage_errors(settings.home):
        disk.make_folder(settings.home)
        for tree, place in locate_trees(settings).items():
            # A backup of an earlier version knows nothing of some trees: what is there stays.
            if LACKING in found.files or (folder / tree).is_dir():
                _replace(folder / tree, place)
        if settings.api_keys_file is not None and KEYS in found.files:
            disk.make_folder(settings.api_keys_file.parent)
            disk.write_file(settings.api_keys_file, (folder / KEYS).read_bytes(), mode=0o600)
    with (folder / STORE).open(encoding="ascii") as lines:
        write_store(client, (StoredKey(**json.loads(line)) for line in lines))
    return release_all_jobs(client)


def _require_empty(settings: Settings, client: Redis) -> None:
    jobs = client.exists("kd:index:*:*", "kd:open")
    places = locate_trees(settings)
    there = [tree for tree, place in places.items() if any(map(_has_file, list_parts(place)))]
    keys = settings.api_keys_file
    there += [str(keys)] if keys is not None and keys.exists() and keys.stat().st_size else []
    if jobs or there:
        what = [*(["jobs in the job store"] if jobs else []), *there]
        remedy = "--force replaces all of it."
        raise BackupError(f"{settings.home} is not empty: {', '.join(what)}.", remedy)


def _has_file(part: Path) -> bool:
    return part.is_file() or any(True for _ in disk.walk_files(part))


def _replace(source: Path, target: Path) -> None:
    """Fill ``target`` with what is in ``source``; a link or a mount point stays in its place."""
    disk.make_folder(target)
    temporary = target / f"{disk.TEMPORARY_PREFIX}restored"
    disk.remove_path(temporary)
    temporary.mkdir()
    copy_folder(source, temporary / "whole", {})
    for old in list_parts(target):
        if old != temporary:
            disk.remove_path(old)
    for new in list_parts(temporary / "whole"):
        _publish(new, target / new.name)
    disk.remove_path(temporary)


def write_store(client: Redis, rows: Iterator[StoredKey]) -> None:
    """Replace the content of the job store by the rows of ``read_store``."""
    for keys in _scan_keys(client):
        client.unlink(*keys)
    pipeline = client.pipeline(transaction=False)
    try:
        for number, row in enumerate(rows, 1):
            value = base64.b64decode(row.dump)
            pipeline.restore(row.key, row.until, value, replace=True, absttl=bool(row.until))
            if number % SCAN == 0:
                pipeline.execute()
        pipeline.execute()
    except ResponseError as error:
        raise BackupError(
            f"The job store refuses a value: {error}.",
            "Use a server that is as new as the old one and has as much memory, "
            "then restore with --force.",
        ) from None


def release_all_jobs(client: Redis) -> list[str]:
    """Release every lease as if its worker had stopped cleanly, which costs no attempt."""
    store = JobStore(client)
    running = cast(list[str], client.zrange("kd:leases", 0, -1))
    for job_id in running:
        fence = cast(str, client.hget(f"kd:job:{job_id}", "fence"))
        store.release(Claim(job_id, int(fence), 0, {}))
    return running
