"""The collector: what the operator's rules remove, and what stays because something needs it.

    rules      the table ``RULES``: the kind, the setting, how things are found and removed
    limits     what the settings, or one call of `kd gc`, say (Redis itself removes old events)
    in use     in_use.py: the names in open jobs, kept students and ended jobs
    items      what is older than its limit, with the reason, and who needs it
    removal    asks again who needs it, under the lock that its user takes

A removal renames first and deletes then, so that a kill leaves no half that would be believed. What
a kill leaves behind is a leftover, which the next pass removes.

    kind          age counts from       lock of the removal            a user that comes later
    caches        last use, or capture  those of captures and readers  finds none, and is refused
    texts         last use              those of writers and readers   waits, and makes it again
    runs          end of the job        none: the script deletes the   finds no job
                                        record first
    checkpoints,  end of the job        that of the run folder         waits, goes on from the rest
    logs
    files         the upload            none: records that name it     is refused: the path is
    imports       last save             are read just before           not there
    leftovers     last write            that of the cache or the run   begins anew
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from cache import disk
from cache.errors import CacheError, StorageError
from cache.reading.usage import read_last_use
from cache.shards.names import FINGERPRINT, MANIFEST
from kd.client.wire.operator import StoredItem
from kd.files import LOCK
from kd.text.stored.shard_files import list_stores, remove_store
from services.settings import DAY_SECONDS, Settings
from services.store.callers import LOCAL_CALLER
from services.store.jobs.store import JobStore
from services.store.retention.in_use import InUse, read_in_use
from services.store.run_folder import (
    INTERRUPTED,
    JOB_ID,
    is_held,
    list_spare_checkpoints,
    remove_run_files,
)
from services.store.training_files import ABANDONED_SECONDS, TrainingFiles

if TYPE_CHECKING:
    from cache.remote.upkeep import Garbage

#: The counter of the bytes that the rules have freed, by kind.
FREED = "kd_retention_freed_bytes_total"
#: Age of leftovers that `kd gc` removes if the settings name none.
LEFTOVERS_SECONDS = 7 * DAY_SECONDS
#: The names that ``kd.python.inputs`` gives to models and data.
SAVED = re.compile(r"([0-9a-f]{32})(\.jsonl)?")


class Kept(Exception):
    """Something stays; the text says why."""


@dataclass(frozen=True)
class Item:
    """Something that a rule would remove.

    ``name`` is the id, fingerprint or digest by which others name it. ``since`` is the time from
    which its age counts, in seconds since 1970. ``kept_by`` says who needs it: None = nobody, so
    that it can be removed. An item that is ``due`` goes whatever its age. ``garbage`` is what the
    cache knows of a leftover.
    """

    rule: str
    name: str
    path: Path
    since: float
    reason: str
    bytes: int = 0
    kept_by: str | None = None
    due: bool = False
    age_seconds: float = 0.0
    garbage: Garbage | None = None

    @property
    def kind(self) -> str:
        """The kind of the thing; some kinds have two rules."""
        return RULES[self.rule].kind

    @property
    def key(self) -> tuple[str, Path]:
        """The kind and the path. They name the thing in every listing, whichever rule finds it."""
        return self.kind, self.path

    @property
    def view(self) -> StoredItem:
        """The thing as the API shows it."""
        return StoredItem.model_validate(self, from_attributes=True)


@dataclass(frozen=True)
class Scene:
    """The service as one pass of the rules sees it.

    ``now`` is the time of its beginning in seconds since 1970. With ``force`` what is only named
    can be removed too; what a process holds never can. Without a job store no job is known, and
    only the rule of leftovers can be on.
    """

    settings: Settings
    job_store: JobStore | None
    limits: AgeLimits
    in_use: InUse
    now: float
    force: bool = False

    @property
    def store(self) -> JobStore:
        """The job store, for the rules that need one."""
        assert self.job_store is not None, "without a job store only leftovers are removed"
        return self.job_store

    def is_old(self, rule: str, since: float) -> bool:
        """Return whether the age of something has reached the limit of a rule that is on."""
        return rule in self.limits.ages and self.now - since >= self.limits.ages[rule]

    def find_last_change(self, path: Path) -> float:
        """Return the time of the last change of anything at ``path``."""
        try:
            return disk.find_last_change(path)
        except FileNotFoundError:  # it is being written or removed, or it lies in a bucket
            return self.now

    def find_holder(self, name: str, ended: bool = False) -> str | None:
        """Say who needs ``name``; with ``ended`` also an ended job, which may be retried."""
        return None if self.force else self.in_use.find_holder(name, ended)

    def require_unnamed(self, name: str) -> None:
        """Raise ``Kept`` if an open job names this now: it may be newer than the list."""
        known = self.job_store is not None and not self.force
        if known and (users := self.store.find_open_users(name)):
            raise Kept(f"the job {users[0]}, which has not ended, names it")

    def require_unread(self, folder: Path) -> None:
        """Raise ``Kept`` if a run has read a cache or a token store since it was listed."""
        if (read_last_use(folder) or 0.0) > self.now:
            raise Kept("a run has read it since it was listed")


# ---------------------------------------------------------------------- caches and texts


def _find_caches(scene: Scene) -> Iterator[Item]:
    """Yield sealed caches by their last use, and by their age. Incomplete ones are leftovers."""
    for manifest in sorted(scene.settings.caches.glob(f"*/{MANIFEST}")):
        folder = manifest.parent
        if FINGERPRINT.fullmatch(folder.name):
            captured = scene.find_last_change(manifest)
            used = max(read_last_use(folder) or captured, captured)
            yield Item("caches", folder.name, folder, used, "not used for {age}")
            yield Item("captured", folder.name, folder, captured, "captured {age} ago")


def _remove_cache(scene: Scene, item: Item) -> None:
    from cache.operations import remove_cache  # it loads zarr

    def require_free() -> None:
        scene.require_unnamed(item.name)
        scene.require_unread(item.path)

    remove_cache(item.path, require_free)
    scene.store.forget_cache(LOCAL_CALLER, item.name)


def _find_texts(scene: Scene) -> Iterator[Item]:
    """Yield token stores. A run that needs one again makes it again."""
    for store in list_stores(scene.settings.texts):
        yield Item("texts", store.folder.name, store.folder, store.used, "not used for {age}")


def _remove_text(scene: Scene, item: Item) -> None:
    remove_store(item.path, lambda: scene.require_unread(item.path))


# ---------------------------------------------------------------------- ended jobs


def _find_ended(scene: Scene) -> Iterator[Item]:
    """Yield run folders of ended jobs; of those that stay, the log and the checkpoints.

    Only a job that has succeeded cannot be retried, and needs no checkpoint beside its student.
    """
    ages = scene.limits.ages
    for job in scene.in_use.ended_jobs:
        folder = scene.settings.run_dir(job.id)
        reason = f"{job.status} {{age}} ago"
        yield Item("runs", job.id, folder, job.ended, reason)
        if scene.is_old("runs", job.ended) and scene.find_holder(job.id) is None:
            continue
        if (log := folder / "log.txt").is_file():
            yield Item("logs", job.id, log, job.ended, reason)
        may_go_on = job.status != "succeeded"
        beside = "beside" in ages and not may_go_on and (folder / "student").is_dir()
        if beside or "checkpoints" in ages:
            rule = "beside" if beside else "checkpoints"
            keep = 0 if beside else scene.limits.keep
            for path, why in list_spare_checkpoints(folder, keep, may_go_on):
                yield Item(rule, job.id, path, job.ended, why)


def _remove_run(scene: Scene, item: Item) -> None:
    """Delete the record, which one call of the script decides, and then the folder."""
    if is_held(item.path):
        _keep()
    if not scene.store.retire(item.name, scene.limits.ages["runs"], scene.force):
        raise Kept("it has not ended, or an open job names it")
    remove_run_files(scene.settings, item.name)


def _keep() -> NoReturn:
    raise Kept("a process writes to it")


def _remove_part(scene: Scene, item: Item) -> None:
    """Remove a checkpoint or a log while no stage can begin in its run."""
    with disk.locked(scene.settings.run_dir(item.name) / LOCK, _keep):
        scene.require_unnamed(item.name)
        disk.discard_path(item.path)


# ---------------------------------------------------------------------- what users gave


def _find_files(scene: Scene) -> Iterator[Item]:
    """Yield uploaded files."""
    root = scene.settings.files
    for team in sorted(root.glob("*")):
        for file in TrainingFiles(root).list_files(team.name):
            reason = f"uploaded {{age}} ago by team {team.name}"
            yield Item("files", file.id, team / file.id, file.created_at, reason)


def _find_imports(scene: Scene) -> Iterator[Item]:
    """Yield models and data that calls of `import kd` have saved. A new call saves them again."""
    for root in (scene.settings.models, scene.settings.data):
        for path in sorted(root.glob("*")):
            if found := SAVED.fullmatch(path.name):
                since = scene.find_last_change(path)
                yield Item("imports", found[1], path, since, "saved {age} ago")


def _remove_gift(scene: Scene, item: Item) -> None:
    """Remove a file, a model or data, unless it is new by now."""
    scene.require_unnamed(item.name)
    if item.path.lstat().st_mtime > scene.now:
        raise Kept("it was saved again since it was listed")
    disk.discard_path(item.path)


# ---------------------------------------------------------------------- leftovers


def _find_leftovers(scene: Scene) -> Iterator[Item]:
    """Yield what crashes left of caches, in a folder or a bucket."""
    from cache.operations import find_garbage

    for one in find_garbage(scene.settings.caches, scene.limits.ages["leftovers"]):
        name = one.folder.name
        since = scene.find_last_change(one.path)
        yield Item("leftovers", name, one.path, since, one.why, one.bytes, due=True, garbage=one)


def _remove_leftover(scene: Scene, item: Item) -> None:
    from cache.operations import remove_garbage

    assert item.garbage is not None, "the finder gives it"
    scene.require_unnamed(item.name)
    if not remove_garbage(item.garbage, scene.limits.ages["leftovers"]):
        raise Kept("it is in use again")


def _find_strays(scene: Scene) -> Iterator[Item]:
    """Yield runs without a record, and what interrupted saves and removals left."""
    settings = scene.settings
    names = [path.name for path in settings.runs.glob("job_*") if JOB_ID.fullmatch(path.name)]
    for run in map(settings.run_dir, scene.store.list_unknown(sorted(names))):
        if run.is_dir() and not run.is_symlink() and not is_held(run):
            since = scene.find_last_change(run)
            yield Item("strays", run.name, run, since, "a run that no job record names")
    for root in (settings.texts, settings.runs, settings.models, settings.data):
        for path in disk.find_interrupted(root):
            since = scene.find_last_change(path)
            # Nobody writes to a removed run. Of others it is sure after some time.
            removed = JOB_ID.fullmatch(path.name.removeprefix(disk.TEMPORARY_PREFIX)) is not None
            if removed or scene.now - since >= ABANDONED_SECONDS:
                yield Item("strays", path.name, path, since, INTERRUPTED, due=removed)


def _remove_stray(scene: Scene, item: Item) -> None:
    if not JOB_ID.fullmatch(item.name):
        disk.remove_path(item.path)
        return
    with disk.locked(item.path / LOCK, _keep):
        if not scene.store.list_unknown([item.name]):
            raise Kept("a job record names it by now")
        disk.discard_path(item.path)


# ---------------------------------------------------------------------- the table of rules


class Rule(NamedTuple):
    """The kind of things that a rule removes, its setting, and how things are found and removed."""

    kind: str
    setting: str
    find: Callable[[Scene], Iterator[Item]]
    remove: Callable[[Scene, Item], None]


#: The setting of each rule has the prefix ``retain_``. "beside": checkpoints beside a student.
RULES: Mapping[str, Rule] = {
    "caches": Rule("caches", "caches_unused_days", _find_caches, _remove_cache),
    "captured": Rule("caches", "caches_days", _find_caches, _remove_cache),
    "texts": Rule("texts", "texts_days", _find_texts, _remove_text),
    "runs": Rule("runs", "runs_days", _find_ended, _remove_run),
    "checkpoints": Rule("checkpoints", "checkpoints", _find_ended, _remove_part),
    "beside": Rule("checkpoints", "checkpoints_of_students", _find_ended, _remove_part),
    "logs": Rule("logs", "logs_days", _find_ended, _remove_part),
    "files": Rule("files", "files_days", _find_files, _remove_gift),
    "imports": Rule("imports", "imports_days", _find_imports, _remove_gift),
    "leftovers": Rule("leftovers", "leftovers_days", _find_leftovers, _remove_leftover),
    "strays": Rule("leftovers", "leftovers_days", _find_strays, _remove_stray),
}
KINDS = tuple(dict.fromkeys(rule.kind for rule in RULES.values()))


@dataclass(frozen=True)
class AgeLimits:
    """The ages in seconds from which on the rules remove something; a rule without one is off.

    ``keep`` is the number of checkpoints that the rule ``checkpoints`` leaves to a job. Both rules
    of checkpoints apply from the end of a job on.
    """

    ages: dict[str, float]
    keep: int = 0

    @classmethod
    def of(cls, settings: Settings) -> AgeLimits:
        """Return the limits that the settings state."""
        set_to = {name: getattr(settings, f"retain_{rule.setting}") for name, rule in RULES.items()}
        keep = set_to.pop("checkpoints")
        always = set_to.pop("beside")
        ages = {name: days * DAY_SECONDS for name, days in set_to.items() if days}
        of_checkpoints = {"checkpoints": keep > 0, "beside": not always}
        return cls(ages | {name: 0.0 for name, is_on in of_checkpoints.items() if is_on}, keep)

    def with_leftovers(self, age: float | None = None) -> AgeLimits:
        """Return these limits with an age of leftovers: a week if neither says one."""
        age = self.ages.get("leftovers", LEFTOVERS_SECONDS) if age is None else age
        return replace(self, ages=self.ages | {"leftovers": age, "strays": age})

    @property
    def kinds(self) -> list[str]:
        """The kinds of things that at least one rule removes."""
        return [kind for kind in KINDS if any(RULES[name].kind == kind for name in self.ages)]


# ---------------------------------------------------------------------- a pass


def look(
    settings: Settings, store: JobStore | None, limits: AgeLimits, force: bool = False
) -> Scene:
    """Read what is in use now, as a pass with these limits needs it. Raises ``RedisError``."""
    now = time.time()  # what is used from now on was used since
    jobs = () if store is None else store.read_naming_jobs()
    return Scene(settings, store, limits, read_in_use(jobs, settings.runs), now, force)


def find_items(scene: Scene) -> list[Item]:
    """List what the limits would remove, with those things that something needs."""
    finders = dict.fromkeys(rule.find for name, rule in RULES.items() if name in scene.limits.ages)
    found: dict[tuple[str, Path], Item] = {}  # each thing once, although two rules may find it
    for item in (item for find in finders for item in find(scene)):
        if item.key in found or not (item.due or scene.is_old(item.rule, item.since)):
            continue
        # An ended job may be retried, and cannot make again what users gave.
        holder = scene.find_holder(item.name, ended=item.kind in ("files", "imports"))
        if item.garbage is not None and item.path != item.garbage.folder:
            # A student needs its cache, and not what was left in it or beside it.
            holder = None if scene.force else scene.in_use.open.get(item.name)
        age = scene.now - item.since
        found[item.key] = replace(
            item,
            age_seconds=round(age, 1),
            reason=item.reason.replace("{age}", f"{age / DAY_SECONDS:.3g} days"),
            bytes=item.bytes or disk.measure_path(item.path),
            kept_by=holder,
        )
    return sorted(found.values(), key=lambda item: KINDS.index(item.kind))


def remove_items(
    items: Iterable[Item], scene: Scene, audit: Callable[..., None]
) -> tuple[list[Item], list[Item]]:
    """Remove the items that nothing needs; return those that are gone, and those that stay.

    ``audit`` gets each removal as ``AuditLog.write`` does, without the actor. What the disk does
    not let go stays.
    """
    gone: list[Item] = []
    kept: list[Item] = []
    for item in items:
        try:
            if item.kept_by is not None:
                raise Kept(item.kept_by)
            with disk.storage_errors(item.path):
                RULES[item.rule].remove(scene, item)
        except FileNotFoundError:
            kept.append(replace(item, kept_by="it is gone already"))
        except CacheError as reason:  # its remedy is for those who use the cache
            kept.append(replace(item, kept_by=reason.detail))
        except (Kept, StorageError, OSError) as reason:
            kept.append(replace(item, kept_by=str(reason)))
        else:
            gone.append(item)
            if scene.job_store is not None:
                scene.job_store.count(FREED, item.bytes, kind=item.kind)
            path = item.path.name if item.path.name != item.name else None
            facts = {"kind": item.kind, "bytes": item.bytes, "why": item.reason, "path": path}
            audit("retention.remove", item.name, **facts)
    return gone, kept
