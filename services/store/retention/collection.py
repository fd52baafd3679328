"""One pass of the operator's rules: look at everything, then remove what nobody needs.

    limits     rules.py       what the settings, or one call of `kd gc`, say
    in use     in_use.py      the names in open jobs, kept students and ended jobs
    items      a rule's find  what is older than its limit, with the reason, and who needs it
    removal    a rule's remove, which asks again who needs it, under the lock that its user takes

A removal renames first and deletes then, so that a kill leaves no half that would be believed. What
a kill leaves behind is a leftover, which the next pass removes.

    kind          lock under which it is removed                  a user that comes later
    caches        the capture's lock, and that of the readers     finds no cache, and is refused
    texts         the writer's lock, and that of the readers      waits, and makes it again
    runs          none: the script deletes the record first       finds no job
    checkpoints,  the run folder's lock                           waits, and goes on from the rest
    logs
    events        none: the script checks that the job has ended
    files,        none: the record of a job that names it is      is refused: the path is not there
    imports       looked for just before the rename
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from cache.errors import StorageError
from services.settings import Settings
from services.store.jobs.store import JobStore
from services.store.retention.caches import Caches
from services.store.retention.in_use import read_in_use
from services.store.retention.items import Item, Kept, Rule, Scene
from services.store.retention.jobs import Checkpoints, Events, Logs, Runs
from services.store.retention.leftovers import Leftovers
from services.store.retention.rules import AgeLimits
from services.store.retention.saved import Files, Imports
from services.store.retention.texts import Texts

#: Every kind, in the order of ``rules.KINDS``.
RULES: Mapping[str, Rule] = {
    "caches": Caches(),
    "texts": Texts(),
    "runs": Runs(),
    "checkpoints": Checkpoints(),
    "events": Events(),
    "logs": Logs(),
    "files": Files(),
    "imports": Imports(),
    "leftovers": Leftovers(),
}
#: The kinds that are parts of a run, and go with it.
PARTS_OF_RUNS = ("checkpoints", "events", "logs")


def look(settings: Settings, store: JobStore, limits: AgeLimits, force: bool = False) -> Scene:
    """Read what is in use now, as a pass with these limits needs it. Raises ``RedisError``."""
    now = time.time()  # what is used from now on was used since
    return Scene(settings, store, limits, read_in_use(store, settings.runs), now, force)


def find_items(scene: Scene) -> list[Item]:
    """List what the limits would remove, with those things that somebody needs."""
    found = [
        item for kind, rule in RULES.items() if scene.limits.has(kind) for item in rule.find(scene)
    ]
    if scene.force:
        found = [replace(item, kept_by=None) for item in found]
    whole = {item.name for item in found if item.kind == "runs" and item.kept_by is None}
    return [item for item in found if item.kind not in PARTS_OF_RUNS or item.name not in whole]


def remove_items(
    items: Iterable[Item], scene: Scene, removed: Callable[[Item], None]
) -> tuple[list[Item], list[Item]]:
    """Remove the items that nobody needs; return those that are gone, and those that stay.

    ``removed`` is called after each removal. What the disk does not let go stays.
    """
    gone, kept = [], []
    for item in items:
        try:
            if item.kept_by is not None:
                raise Kept(item.kept_by)
            RULES[item.kind].remove(item, scene)
        except (Kept, StorageError, OSError) as reason:
            kept.append(replace(item, kept_by=str(reason)))
        else:
            gone.append(item)
            removed(item)
    return gone, kept
