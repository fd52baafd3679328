"""``kd gc``: what the rules of retention remove, and what stays because somebody needs it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.terminal.commands.recovery import connect_store
from services.terminal.commands.upkeep import Yes, parse_age
from services.terminal.console import (
    Home,
    audit_command,
    err,
    format_value,
    make_settings,
    mode,
    out,
    print_as_json,
    print_table,
)

if TYPE_CHECKING:
    from services.settings import Settings
    from services.store.jobs.store import JobStore
    from services.store.retention.collector import AgeLimits, Item

#: Things that stay which are named one by one.
SHOWN_KEPT = 10

OlderThan = Annotated[
    str | None,
    typer.Option(
        help="Age, instead of the age in the settings: 90m, 12h, 7d, 2w. It applies to the kinds "
        "that you name; if you name none, to leftovers."
    ),
]
OLD_CHECKPOINTS = "Checkpoints of ended jobs beyond the newest; --keep says how many stay."
EVENTS = "Events and metrics of ended jobs, in Redis."
KEPT = "Checkpoints that an ended job keeps; 0 = none if its student is saved."
LEFT = "What crashes left: incomplete caches, runs without a record. Age: 7d."
#: An option such as --caches and --no-caches; None = the call does not speak of these things.
Kind = bool | None
Place = Annotated[
    str | None,
    typer.Option(
        "--store",
        help="Folder or bucket of caches: only leftovers in it are removed. It needs no job store; "
        "unfinished jobs of one that answers keep what they name.",
    ),
]
Force = Annotated[
    bool,
    typer.Option(
        help="Also remove what an unfinished job or the card of a kept student names, but never "
        "what a process captures, reads or writes now."
    ),
]

app = typer.Typer()


@app.command()
def gc(
    context: typer.Context,
    older_than: OlderThan = None,
    caches: Annotated[Kind, typer.Option(help="Sealed caches that nothing has read.")] = None,
    texts: Annotated[Kind, typer.Option(help="Token stores that nothing has read.")] = None,
    runs: Annotated[Kind, typer.Option(help="Ended jobs: record, run folder and student.")] = None,
    checkpoints: Annotated[Kind, typer.Option(help=OLD_CHECKPOINTS)] = None,
    keep: Annotated[int | None, typer.Option(min=0, help=KEPT)] = None,
    events: Annotated[Kind, typer.Option(help=EVENTS)] = None,
    logs: Annotated[Kind, typer.Option(help="Logs of ended jobs.")] = None,
    files: Annotated[Kind, typer.Option(help="Uploaded files that no job names.")] = None,
    imports: Annotated[Kind, typer.Option(help="Models and data that `import kd` saved.")] = None,
    leftovers: Annotated[Kind, typer.Option(help=LEFT)] = None,
    place: Place = None,
    force: Force = False,
    yes: Yes = False,
    home: Home = None,
) -> None:
    """Remove what the retention rules name, and what crashes left behind.

    The rules are the settings that begin with KD_RETAIN. If kinds are named, such as --caches, only
    these are removed. The job store must run, unless --store says where caches lie. Folders of `kd
    run` are counted and never removed: `kd runs rm` removes them. The command lists what it will
    remove, and asks first. With --json it removes nothing unless --yes is given. `kd jobs adopt`
    restores a record of a run without one.
    """
    from services.store.retention.collector import find_items, look, remove_items

    settings = make_settings(home=home, store=place)
    limits = _choose_limits(settings, context.params)
    local = {"number": 0, "bytes": 0} if place else _measure_local_runs(settings)
    with ExitStack() as stack:
        store = _enter_store(stack, settings, place)
        found = find_items(look(settings, store, limits, force))
        free = [item for item in found if item.kept_by is None]
        kept = [item for item in found if item.kept_by is not None]
        if not mode.as_json:
            _print_items(free, kept, local)
            if free and not yes:
                typer.confirm("Remove them?", abort=True, err=True)
        gone: list[Item] = free
        needed: list[Item] = []
        if free and (yes or not mode.as_json):
            # Looked at again: a job may have begun, or a student been saved, meanwhile.
            scene = look(settings, store, limits, force)
            shown = {item.key for item in free}
            still = [item for item in find_items(scene) if item.key in shown]
            gone, needed = remove_items(still, scene, partial(audit_command, settings))
    parts = {"items": gone, "kept": kept + needed}
    listed = {
        name: [{**item.view.model_dump(), "path": str(item.path)} for item in part]
        for name, part in parts.items()
    }
    if not print_as_json({"removed": yes, **listed, "local_runs": local}) and free:
        _print_kept(needed)
        size = format_value(sum(item.bytes for item in gone), "bytes")
        out.print(f"{len(gone)} of {len(free)} removed, {size}")


def _enter_store(stack: ExitStack, settings: Settings, place: str | None) -> JobStore | None:
    """Connect to the job store; None if it does not run, which only caches in a ``place`` allow."""
    from services.store.embedded import StoreUnavailable

    try:
        return stack.enter_context(connect_store(settings))
    except StoreUnavailable:
        if place is None:
            hint = "`kd gc --store FOLDER` removes leftovers of caches without a job store."
            err.print(hint, markup=False)
            raise
        return None


def _choose_limits(settings: Settings, given: Mapping[str, Any]) -> AgeLimits:
    """Return the limits of the settings, as the options of this call change them.

    An age is for the kinds that the call names, or else for leftovers. It counts from the last use
    of a cache, and does not switch on a rule of checkpoints.
    """
    from services.store.retention.collector import KINDS, LEFTOVERS_DAYS, RULES, AgeLimits

    asked = {kind: given[kind] for kind in KINDS}
    if (keep := given["keep"]) is not None:
        # Both rules of checkpoints are replaced: 0 = none stays beside a saved student.
        both = {"retain_checkpoints": keep, "retain_checkpoints_of_students": keep > 0}
        settings = settings.model_copy(update=both)
        asked["checkpoints"] = asked["checkpoints"] is not False
    named = [kind for kind in KINDS if asked[kind]]
    if given["place"] is not None and set(named) - {"leftovers"}:
        raise typer.BadParameter("it is for leftovers only", param_hint="--store")
    wanted = named or [kind for kind in KINDS if asked[kind] is None]
    age = None if given["older_than"] is None else parse_age(given["older_than"])
    limits = AgeLimits.of(settings, LEFTOVERS_DAYS)
    ages = dict(limits.ages)
    for name, rule in RULES.items():
        if age is not None and rule.kind in (named or ["leftovers"]):
            if name == "captured":
                ages.pop(name, None)
            elif rule.kind != "checkpoints" or name in ages:
                ages[name] = age
        if rule.kind not in wanted or (given["place"] is not None and name != "leftovers"):
            ages.pop(name, None)
    limits = replace(limits, ages=ages)
    for kind in named:
        if kind not in limits.kinds:
            needed = "--keep" if kind == "checkpoints" else "--older-than"
            detail = f"the settings have no rule for {kind}: add {needed}"
            raise typer.BadParameter(detail, param_hint=f"--{kind}")
    return limits


def _measure_local_runs(settings: Settings) -> dict[str, int]:
    """The number and the bytes of the runs that no job of the service has made."""
    from cache.disk import sum_file_sizes
    from services.store.run_folder import JOB_ID

    folders = (folder for folder in settings.runs.glob("[!.]*") if folder.is_dir())
    sizes = [sum_file_sizes(folder) for folder in folders if not JOB_ID.fullmatch(folder.name)]
    return {"number": len(sizes), "bytes": sum(sizes)}


def _print_items(free: list[Item], kept: list[Item], local: dict[str, int]) -> None:
    if local["number"]:
        stay = "{number} runs of `kd run` stay, {bytes} bytes".format(**local)
        err.print(f"{stay}: `kd runs rm` removes them", markup=False)
    if free:
        rows = []
        for item in free:
            size = format_value(item.bytes, "bytes")
            age = format_value(item.age_seconds, "seconds")
            rows.append([item.kind, size, age, str(item.path), item.reason])
        print_table(["KIND", "BYTES", "AGE", "WHAT", "REASON"], rows)
        out.print(f"together {format_value(sum(item.bytes for item in free), 'bytes')}")
    else:
        out.print("nothing to remove")
    if any(item.reason == "a run that no job record names" for item in free):
        adopt = "`kd jobs adopt FOLDER` restores the record of a run that should stay."
        out.print(adopt, markup=False)
    _print_kept(kept)


def _print_kept(kept: list[Item]) -> None:
    for item in kept[:SHOWN_KEPT]:
        err.print(f"{item.path} stays: {item.kept_by}", markup=False)
    if len(kept) > SHOWN_KEPT:
        err.print(f"{len(kept) - SHOWN_KEPT} more stay; --json lists them")
