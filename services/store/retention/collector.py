"""The collector: what the operator's rules remove, and what stays because something needs it.

    rules      the table ``RULES``: the kind, the setting, how things are found and removed
    ages       what the settings, or one call of `kd gc`, say (Redis itself removes old events)
    scene      the names in open jobs, held runs, kept students and ended jobs (in_use.py)
    items      what has reached its age, with the reason, and who needs it
    removal    asks again who needs it, under the lock that its user takes
    survey     all that is stored, and what the rules would remove of it

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

import heapq
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from pydantic import Field

from cache import disk
from cache.errors import CacheError, StorageError
from cache.reading.usage import read_last_use
from cache.shards.names import FINGERPRINT, MANIFEST
from kd.client.wire import operator as wire
from kd.files import LOCK
from kd.text.stored.shard_files import list_stores, remove_store
from services.settings import DAY_SECONDS, Settings
from services.store import run_folder
from services.store.callers import LOCAL_CALLER
from services.store.jobs.caches import NamingJob
from services.store.jobs.store import JobStore
from services.store.retention.in_use import add_file, add_names, read_students
from services.store.training_files import ABANDONED_SECONDS, TrainingFiles

#: The names that ``kd.python.inputs`` gives to models and data.
SAVED = re.compile(r"([0-9a-f]{32})(\.jsonl)?")
#: The kinds of what is stored, and how many things of each list are shown.
STORED = ("caches", "texts", "runs", "evaluations", "imports", "files")
SHOWN = 50
#: Why a run without a record is named.
UNKNOWN = "no job record names this run; `kd jobs adopt FOLDER` would restore its record"


class Kept(Exception):
    """Something stays; the text says why."""


class Item(wire.StoredItem):
    """Something that a rule would remove. Its path names it in every listing.

    ``name`` is the id, fingerprint or digest by which others name it. ``since`` is the time from
    which its age counts, in seconds since 1970. ``kept_by`` says who needs it: None = nobody, so
    that it can be removed. An item that is ``due`` goes whatever its age. ``run`` is the run folder
    that it is or lies in, if its removal takes the lock of that. ``garbage`` is what the cache
    knows of a leftover.
    """

    path: Path
    reason: str
    bytes: int = 0
    rule: str = Field(exclude=True)
    since: float = Field(exclude=True)
    due: bool = Field(False, exclude=True)
    run: Path | None = Field(None, exclude=True)
    garbage: Any = Field(None, exclude=True)

    @classmethod
    def of(cls, rule: str, name: str, path: Path, since: float, reason: str, **more: Any) -> Item:
        """Return what a rule has found, of the kind that the table gives to it."""
        kind = RULES[rule].kind
        return cls(kind=kind, rule=rule, name=name, path=path, since=since, reason=reason, **more)


@dataclass(frozen=True)
class Scene:
    """The service as one pass of the rules sees it.

    ``ages`` are those in seconds from which on the rules remove something; a rule without one is
    off. ``now`` is the time of the beginning in seconds since 1970. With ``force`` what is only
    named can be removed too; what a process holds never can. Without a job store no job is known,
    and only the rule of leftovers can be on. ``students``, ``open`` and ``ended`` map each name
    that must stay to who names it: a kept student, an open job or held run, and an ended job.
    """

    settings: Settings
    job_store: JobStore | None
    ages: Mapping[str, float]
    force: bool
    now: float
    students: dict[str, str]
    open: dict[str, str] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    ended_jobs: list[NamingJob] = field(default_factory=list)

    @property
    def store(self) -> JobStore:
        """The job store, for the rules that need one."""
        assert self.job_store is not None, "without a job store only leftovers are removed"
        return self.job_store

    def find_holder(self, name: str, ended: bool = False) -> str | None:
        """Say who names ``name``; with ``ended`` also an ended job, which may be retried."""
        found = self.open.get(name) or self.students.get(name)
        return found or (self.ended.get(name) if ended else None)

    def find_last_change(self, path: Path) -> float:
        """Return the time of the last change of anything at ``path``."""
        try:
            return disk.find_last_change(path)
        except FileNotFoundError:  # it is being written or removed, or it lies in a bucket
            return self.now

    def require_free(self, item: Item) -> None:
        """Raise ``Kept`` if somebody needs the item since it was listed."""
        known = self.job_store is not None and not self.force
        if known and (users := self.store.find_open_users(item.name)):
            raise Kept(f"the job {users[0]}, which has not ended, names it")
        if (read_last_use(item.path) or 0.0) > self.now:
            raise Kept("a run has read it since it was listed")
        if item.run is None and self.find_last_change(item.path) > self.now:
            raise Kept("it was saved again since it was listed")
        if item.run == item.path and not self.store.list_unknown([item.name]):
            raise Kept("a job record names it by now")


# ---------------------------------------------------------------------- caches and texts


def _find_caches(scene: Scene) -> Iterator[Item]:
    """Yield sealed caches by their last use, and by their age. Incomplete ones are leftovers."""
    for manifest in sorted(scene.settings.caches.glob(f"*/{MANIFEST}")):
        folder = manifest.parent
        if FINGERPRINT.fullmatch(folder.name):
            captured = scene.find_last_change(manifest)
            used = max(read_last_use(folder) or captured, captured)
            yield Item.of("caches", folder.name, folder, used, "not used for {age}")
            yield Item.of("captured", folder.name, folder, captured, "captured {age} ago")


def _remove_cache(scene: Scene, item: Item) -> None:
    from cache.operations import remove_cache  # it loads zarr

    remove_cache(item.path, lambda: scene.require_free(item))
    scene.store.forget_cache(LOCAL_CALLER, item.name)


def _find_texts(scene: Scene) -> Iterator[Item]:
    """Yield token stores. A run that needs one again makes it again."""
    for store in list_stores(scene.settings.texts):
        yield Item.of("texts", store.folder.name, store.folder, store.used, "not used for {age}")


def _remove_text(scene: Scene, item: Item) -> None:
    remove_store(item.path, lambda: scene.require_free(item))


# ---------------------------------------------------------------------- ended jobs


def _find_ended(scene: Scene) -> Iterator[Item]:
    """Yield run folders of ended jobs, and the log and the spare checkpoints of each.

    Only a job that has succeeded cannot be retried, and needs no checkpoint beside its student.
    """
    always = scene.settings.retain_checkpoints_of_students
    for job in scene.ended_jobs:
        folder = scene.settings.run_dir(job.id)
        reason = f"{job.status} {{age}} ago"
        yield Item.of("runs", job.id, folder, job.ended, reason)
        if (log := folder / "log.txt").is_file():
            yield Item.of("logs", job.id, log, job.ended, reason, run=folder)
        may_go_on = job.status != "succeeded"
        beside = not (always or may_go_on) and (folder / "student").is_dir()
        if beside or scene.settings.retain_checkpoints:
            keep = 0 if beside else scene.settings.retain_checkpoints
            for path, why in run_folder.list_spare_checkpoints(folder, keep, may_go_on):
                yield Item.of("checkpoints", job.id, path, job.ended, why, run=folder)


def _remove_run(scene: Scene, item: Item) -> None:
    """Delete the record, which one call of the script decides, and then the folder."""
    if run_folder.is_held(item.path):
        _keep()
    if not scene.store.retire(item.name, scene.ages["runs"], scene.force):
        raise Kept("it has not ended, or an open job names it")
    run_folder.remove_run_files(scene.settings, item.name)


def _keep() -> NoReturn:
    raise Kept("a process writes to it")


# ---------------------------------------------------------------------- what users gave


def _find_files(scene: Scene) -> Iterator[Item]:
    """Yield uploaded files."""
    root = scene.settings.files
    for team in sorted(root.glob("*")):
        for file in TrainingFiles(root).list_files(team.name):
            reason = f"uploaded {{age}} ago by team {team.name}"
            yield Item.of("files", file.id, team / file.id, file.created_at, reason)


def _find_imports(scene: Scene) -> Iterator[Item]:
    """Yield models and data that calls of `import kd` have saved. A new call saves them again."""
    for path in sorted((*scene.settings.models.glob("*"), *scene.settings.data.glob("*"))):
        if found := SAVED.fullmatch(path.name):
            since = scene.find_last_change(path)
            yield Item.of("imports", found[1], path, since, "saved {age} ago")


# ---------------------------------------------------------------------- leftovers


def _find_leftovers(scene: Scene) -> Iterator[Item]:
    """Yield what crashes left of caches, in a folder or a bucket."""
    from cache.operations import find_garbage

    for one in find_garbage(scene.settings.caches, scene.ages["leftovers"]):
        since = scene.find_last_change(one.path)
        more = {"bytes": one.bytes, "due": True, "garbage": one}
        yield Item.of("leftovers", one.folder.name, one.path, since, one.why, **more)


def _remove_leftover(scene: Scene, item: Item) -> None:
    from cache.operations import remove_garbage

    scene.require_free(item)
    if not remove_garbage(item.garbage, scene.ages["leftovers"]):
        raise Kept("it is in use again")


def _find_strays(scene: Scene) -> Iterator[Item]:
    """Yield runs without a record, and what interrupted saves and removals left."""
    settings = scene.settings
    names = (path.name for path in settings.runs.glob("job_*"))
    of_jobs = sorted(filter(run_folder.JOB_ID.fullmatch, names))
    for run in map(settings.run_dir, scene.store.list_unknown(of_jobs)):
        if run.is_dir() and not run.is_symlink() and not run_folder.is_held(run):
            yield Item.of("strays", run.name, run, scene.find_last_change(run), UNKNOWN, run=run)
    for root in (settings.texts, settings.runs, settings.models, settings.data):
        for path in disk.find_interrupted(root):
            since = scene.find_last_change(path)
            # Nobody writes to a removed run. Of others it is sure after some time.
            name = path.name.removeprefix(disk.TEMPORARY_PREFIX)
            removed = run_folder.JOB_ID.fullmatch(name) is not None
            if removed or scene.now - since >= ABANDONED_SECONDS:
                yield Item.of("strays", path.name, path, since, run_folder.INTERRUPTED, due=removed)


# ---------------------------------------------------------------------- the table of rules


def _remove_path(scene: Scene, item: Item) -> None:
    """Remove what nobody needs by now; if it lies in a run, while no stage can begin in that."""
    with disk.locked(item.run / LOCK, _keep) if item.run is not None else nullcontext():
        scene.require_free(item)
        disk.discard_path(item.path)


class Rule(NamedTuple):
    """The kind of things that a rule removes, its setting, and how things are found and removed."""

    kind: str
    setting: str
    find: Callable[[Scene], Iterator[Item]]
    remove: Callable[[Scene, Item], None] = _remove_path


#: The setting of each rule has the prefix ``retain_``.
RULES: Mapping[str, Rule] = {
    "caches": Rule("caches", "caches_unused_days", _find_caches, _remove_cache),
    "captured": Rule("caches", "caches_days", _find_caches, _remove_cache),
    "texts": Rule("texts", "texts_days", _find_texts, _remove_text),
    "runs": Rule("runs", "runs_days", _find_ended, _remove_run),
    "checkpoints": Rule("checkpoints", "checkpoints", _find_ended),
    "logs": Rule("logs", "logs_days", _find_ended),
    "files": Rule("files", "files_days", _find_files),
    "imports": Rule("imports", "imports_days", _find_imports),
    "leftovers": Rule("leftovers", "leftovers_days", _find_leftovers, _remove_leftover),
    "strays": Rule("leftovers", "leftovers_days", _find_strays),
}
KINDS = tuple(dict.fromkeys(rule.kind for rule in RULES.values()))


def read_ages(settings: Settings) -> dict[str, float]:
    """Return the ages in seconds from which on the rules of the settings remove something.

    A rule that is off has none. That of checkpoints applies from the end of a job on.
    """
    days = {name: getattr(settings, f"retain_{rule.setting}") for name, rule in RULES.items()}
    ages = {name: each * DAY_SECONDS for name, each in days.items() if each}
    if settings.retain_checkpoints or not settings.retain_checkpoints_of_students:
        ages["checkpoints"] = 0.0
    return ages


def add_leftovers(ages: Mapping[str, float], age: float | None = None) -> dict[str, float]:
    """Return ``ages`` with an age of leftovers: a week if neither says one."""
    age = ages.get("leftovers", 7 * DAY_SECONDS) if age is None else age
    return {**ages, "leftovers": age, "strays": age}


# ---------------------------------------------------------------------- a pass


def look(
    settings: Settings, store: JobStore | None, ages: Mapping[str, float], force: bool = False
) -> Scene:
    """Read what is in use now, for a pass with these ages. Raises ``RedisError``.

    That is all jobs, every run that a process holds, and every student. A run that names itself
    does not count.
    """
    now = time.time()  # what is used from now on was used since
    scene = Scene(settings, store, ages, force, now, read_students(settings.runs))
    for job in () if store is None else store.read_naming_jobs():
        if job.open:
            scene.open.setdefault(job.id, f"the job {job.id} has not ended")
            add_names(scene.open, job.text, f"the job {job.id}, which has not ended", job.id)
        else:
            add_names(scene.ended, job.text, f"the job {job.id}", job.id)
            if job.ended:
                scene.ended_jobs.append(job)
    for run in sorted(settings.runs.glob("[!.]*/")):
        if run_folder.is_held(run):
            add_file(scene.open, run / "config.json", f"the run {run.name}", run.name)
    return scene


def find_items(scene: Scene) -> list[Item]:
    """List what the rules would remove, with those things that something needs."""
    finders = dict.fromkeys(rule.find for name, rule in RULES.items() if name in scene.ages)
    found: dict[Path | None, Item] = {}  # each thing once, although two rules may find it
    for item in (item for find in finders for item in find(scene)):
        age = scene.now - item.since
        is_old = item.rule in scene.ages and age >= scene.ages[item.rule]
        run = found.get(item.run)  # what lies in it goes with it
        if not (is_old or item.due) or item.path in found or (run and run.kept_by is None):
            continue
        # An ended job may be retried, and cannot make again what users gave.
        holder = scene.find_holder(item.name, ended=item.kind in ("files", "imports"))
        if item.garbage is not None and item.path != item.garbage.folder:
            # A student needs its cache, and not what was left in it or beside it.
            holder = scene.open.get(item.name)
        facts = {
            "age_seconds": round(age, 1),
            "reason": item.reason.replace("{age}", f"{age / DAY_SECONDS:.3g} days"),
            "bytes": item.bytes or disk.measure_path(item.path),
            "kept_by": None if scene.force else holder,
        }
        found[item.path] = item.model_copy(update=facts)
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
            kept.append(item.model_copy(update={"kept_by": "it is gone already"}))
        except CacheError as reason:  # its remedy is for those who use the cache
            kept.append(item.model_copy(update={"kept_by": reason.detail}))
        except (Kept, StorageError, OSError) as reason:
            kept.append(item.model_copy(update={"kept_by": str(reason)}))
        else:
            gone.append(item)
            if scene.job_store is not None:
                scene.job_store.count("kd_retention_freed_bytes_total", item.bytes, kind=item.kind)
            path = item.path.name if item.path.name != item.name else None
            facts = {"kind": item.kind, "bytes": item.bytes, "why": item.reason, "path": path}
            audit("retention.remove", item.name, **facts)
    return gone, kept


# ---------------------------------------------------------------------- what is stored


def survey(
    settings: Settings, store: JobStore, disks: Mapping[str, wire.DiskSpace | None]
) -> wire.StorageReport:
    """Measure what is stored, and ask the rules. Reads the sizes of all files of the data folder.

    Raises ``RedisError``.
    """
    ages = read_ages(settings)
    scene = look(settings, store, add_leftovers(ages))
    items = find_items(scene)
    free = [item for item in items if item.kept_by is None]
    needed = [item for item in items if item.kept_by is not None]
    stored: dict[str, list[wire.StoredItem]] = {kind: [] for kind in STORED}
    for kind, name, size in _measure(scene):
        holder = scene.find_holder(name, ended=True)
        stored[kind].append(wire.StoredItem(kind=kind, name=name, bytes=size, kept_by=holder))
    return wire.StorageReport(
        **disks,
        kinds=[_describe_kind(kind, things) for kind, things in stored.items()],
        rules=list(_describe_rules(scene)),
        nightly_hour=settings.retain_hour if ages else None,
        removable=_take_largest(free),
        removable_items=len(free),
        removable_bytes=sum(item.bytes for item in free),
        protected=_take_largest(needed),
        protected_items=len(needed),
    )


def _measure(scene: Scene) -> Iterator[tuple[str, str, int]]:
    """Yield the kind, the name and the bytes of each thing on the disk."""
    from cache.checking.listing import list_caches  # it loads zarr

    for each in list_caches(scene.settings.caches):
        yield "caches", each.fingerprint, each.bytes
    for kind in ("runs", "evaluations"):
        for folder in sorted((scene.settings.home / kind).glob("[!.]*/")):
            yield kind, folder.name, disk.sum_file_sizes(folder)
    of_any_age = dict.fromkeys(("texts", "imports", "files"), -math.inf)
    for item in find_items(replace(scene, ages=of_any_age)):
        yield item.kind, item.name, item.bytes


def _describe_kind(kind: str, things: list[wire.StoredItem]) -> wire.StoredKind:
    size = sum(each.bytes for each in things)
    return wire.StoredKind(kind=kind, items=len(things), bytes=size, largest=_take_largest(things))


def _describe_rules(scene: Scene) -> Iterator[wire.RetentionRule]:
    for kind in KINDS:
        keep = (scene.settings.retain_checkpoints or None) if kind == "checkpoints" else None
        ages = [age for name, age in scene.ages.items() if RULES[name].kind == kind]
        if ages:
            yield wire.RetentionRule(kind=kind, after_days=min(ages) / DAY_SECONDS, keep=keep)


def _take_largest(things: Iterable[wire.StoredItem]) -> list[wire.StoredItem]:
    return heapq.nlargest(SHOWN, things, key=lambda each: each.bytes)
