"""``kd gc``: what the rules of retention remove, and what stays because somebody needs it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.terminal.commands.recovery import connect_store
from services.terminal.commands.upkeep import Yes, parse_age
from services.terminal.console import (
    AsJson,
    Home,
    audit_command,
    err,
    format_value,
    make_settings,
    out,
    print_json,
    print_table,
)

if TYPE_CHECKING:
    from services.settings import Settings
    from services.store.retention.collector import AgeLimits, Item, Scene

#: Things that stay which are named one by one.
SHOWN_KEPT = 10

OlderThan = Annotated[
    str | None,
    typer.Option(
        help="Age, instead of the age in the settings: 90m, 12h, 7d, 2w. It applies to the kinds "
        "that you name; if you name none, to leftovers."
    ),
]
Caches = Annotated[bool | None, typer.Option(help="Sealed caches that nothing has read.")]
Texts = Annotated[bool | None, typer.Option(help="Token stores that nothing has read.")]
Runs = Annotated[bool | None, typer.Option(help="Ended jobs: record, run folder and student.")]
OLD_CHECKPOINTS = "Checkpoints of ended jobs beyond the newest; --keep says how many stay."
Checkpoints = Annotated[bool | None, typer.Option(help=OLD_CHECKPOINTS)]
KEPT = "Checkpoints that an ended job keeps; 0 = none if its student is saved."
Keep = Annotated[int | None, typer.Option(min=0, help=KEPT)]
Events = Annotated[bool | None, typer.Option(help="Events and metrics of ended jobs, in Redis.")]
Logs = Annotated[bool | None, typer.Option(help="Logs of ended jobs.")]
Files = Annotated[bool | None, typer.Option(help="Uploaded files that no job names.")]
Imports = Annotated[bool | None, typer.Option(help="Models and data that `import kd` saved.")]
LEFT = "What crashes left: incomplete caches, runs without a record. Age: 7d."
Leftovers = Annotated[bool | None, typer.Option(help=LEFT)]
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
        "--force/--no-force",
        help="Also remove what an unfinished job or the card of a kept student names, but never "
        "what a process captures, reads or writes now.",
    ),
]

app = typer.Typer()


@app.command()
def gc(
    context: typer.Context,
    older_than: OlderThan = None,
    caches: Caches = None,
    texts: Texts = None,
    runs: Runs = None,
    checkpoints: Checkpoints = None,
    keep: Keep = None,
    events: Events = None,
    logs: Logs = None,
    files: Files = None,
    imports: Imports = None,
    leftovers: Leftovers = None,
    place: Place = None,
    force: Force = False,
    yes: Yes = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Remove what the retention rules name, and what crashes left behind.

    The rules are the settings that begin with KD_RETAIN. If kinds are named, such as --caches, only
    these are removed. The job store must run, unless --store says where caches lie. Folders of `kd
    run` are counted and never removed: `kd runs rm` removes them. The command lists what it will
    remove, and asks first. With --json it removes nothing unless --yes is given. `kd jobs adopt`
    restores a record of a run without one.
    """
    from services.store.embedded import StoreUnavailable
    from services.store.retention.collector import find_items, look

    settings = make_settings(home=home, store=place)
    limits = _choose_limits(settings, context.params)
    local = {"number": 0, "bytes": 0} if place else _measure_local_runs(settings)
    with ExitStack() as stack:
        try:
            store = stack.enter_context(connect_store(settings))
        except StoreUnavailable:
            if place is None:
                hint = "`kd gc --store FOLDER` removes leftovers of caches without a job store."
                err.print(hint, markup=False)
                raise
            store = None
        found = find_items(look(settings, store, limits, force))
        free = [item for item in found if item.kept_by is None]
        kept = [item for item in found if item.kept_by is not None]
        if not as_json:
            _print_items(free, kept, local)
        if free and not (yes or as_json):
            typer.confirm("Remove them?", abort=True, err=True)
        gone: list[Item] = free
        needed: list[Item] = []
        if free and (yes or not as_json):
            # Looked at again: a job may have begun, or a student been saved, meanwhile.
            gone, needed = _remove(free, look(settings, store, limits, force))
    if as_json:
        shown = {"items": gone, "kept": kept + needed}
        parts = {name: [item.to_json() for item in part] for name, part in shown.items()}
        print_json({"removed": yes, **parts, "local_runs": local})
    elif free:
        _print_kept(needed)
        size = format_value(sum(item.bytes for item in gone), "bytes")
        out.print(f"{len(gone)} of {len(free)} removed, {size}")


def _choose_limits(settings: Settings, given: Mapping[str, Any]) -> AgeLimits:
    """Return the limits of the settings, as the options of this call change them."""
    from services.store.retention.collector import KINDS, LEFTOVERS_DAYS, AgeLimits

    age = None if given["older_than"] is None else parse_age(given["older_than"])
    asked = {kind: given[kind] for kind in KINDS}
    if given["keep"] is not None and asked["checkpoints"] is None:
        asked["checkpoints"] = True
    named = [kind for kind in KINDS if asked[kind]]
    limits = AgeLimits.of(settings, LEFTOVERS_DAYS).change(asked, age, given["keep"])
    if given["place"] is not None:
        if {*named} - {"leftovers"}:
            raise typer.BadParameter("it is for leftovers only", param_hint="--store")
        ages = {rule: each for rule, each in limits.ages.items() if rule == "leftovers"}
        return replace(limits, ages=ages)
    for kind in named:
        if kind not in limits.kinds:
            needed = "--keep" if kind == "checkpoints" else "--older-than"
            raise typer.BadParameter(
                f"the settings have no rule for {kind}: add {needed}", param_hint=f"--{kind}"
            )
    return limits


def _remove(shown: list[Item], scene: Scene) -> tuple[list[Item], list[Item]]:
    """Remove those ``shown`` that are still found; return what is gone, and what stays."""
    from services.store.retention.collector import find_items, remove_items

    known = {(item.kind, item.name, item.path) for item in shown}
    still = [item for item in find_items(scene) if (item.kind, item.name, item.path) in known]

    def audit(item: Item) -> None:
        audit_command(scene.settings, "retention.remove", item.name, **item.describe())

    return remove_items(still, scene, audit)


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
        rows = [
            [
                item.kind,
                format_value(item.bytes, "bytes"),
                format_value(item.age_seconds, "age_seconds"),
                str(item.path),
                item.reason,
            ]
            for item in free
        ]
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
