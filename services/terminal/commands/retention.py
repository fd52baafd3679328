"""``kd gc``: what the rules of retention remove, and what stays because somebody needs it."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from services.terminal import console
from services.terminal.commands.recovery import START, connect_store
from services.terminal.commands.upkeep import Yes, parse_age

if TYPE_CHECKING:
    from services.settings import Settings
    from services.store.retention.collector import Item

#: Things that stay which are named one by one.
SHOWN_KEPT = 10

OlderThan = Annotated[
    str | None,
    typer.Option(help="Age of leftovers: 90m, 12h, 7d, 2w; 0s = any. Default: the settings."),
]
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
    older_than: OlderThan = None,
    place: Place = None,
    force: Force = False,
    yes: Yes = False,
    home: console.Home = None,
) -> None:
    """Remove what the retention rules name, and what crashes left behind.

    The rules are the settings that begin with KD_RETAIN; a variable before the command changes one
    for this call. The job store must run, unless --store says where caches lie. Folders of `kd run`
    are counted and never removed: `kd runs rm` removes them. The command lists what it will remove,
    and asks first. With --json it removes nothing unless --yes is given. `kd jobs adopt` restores a
    record of a run without one.
    """
    from services.store.embedded import StoreUnavailable
    from services.store.retention import collector

    settings = console.make_settings(home=home, store=place)
    age = None if older_than is None else parse_age(older_than)
    ages = collector.add_leftovers(collector.read_ages(settings), age)
    if place is not None:
        ages = {"leftovers": ages["leftovers"]}
    local = {"number": 0, "bytes": 0} if place else _measure_local_runs(settings)
    with ExitStack() as stack:
        store = None
        hint = f"{START} `kd gc --store FOLDER` removes leftovers of caches without a job store."
        with suppress(StoreUnavailable) if place else nullcontext():
            store = stack.enter_context(connect_store(settings, hint))
        found = collector.find_items(collector.look(settings, store, ages, force))
        free = [item for item in found if item.kept_by is None]
        kept = [item for item in found if item.kept_by is not None]
        if not console.mode.as_json:
            _print_items(free, kept, local)
            if free and not yes:
                typer.confirm("Remove them?", abort=True, err=True)
        gone, needed = free, list["Item"]()
        if free and (yes or not console.mode.as_json):
            # Looked at again: a job may have begun, or a student been saved, meanwhile.
            scene = collector.look(settings, store, ages, force)
            paths = {item.path for item in free}
            still = [item for item in collector.find_items(scene) if item.path in paths]
            gone, needed = collector.remove_items(
                still, scene, partial(console.audit_command, settings)
            )
    items = [item.model_dump(mode="json") for item in gone]
    stay = [item.model_dump(mode="json") for item in kept + needed]
    shown = {"removed": yes, "items": items, "kept": stay, "local_runs": local}
    if not console.print_as_json(shown) and free:
        _print_kept(needed)
        size = console.format_value(sum(item.bytes for item in gone), "bytes")
        console.out.print(f"{len(gone)} of {len(free)} removed, {size}")


def _measure_local_runs(settings: Settings) -> dict[str, int]:
    """The number and the bytes of the runs that no job of the service has made."""
    from cache.disk import sum_file_sizes
    from services.store.run_folder import JOB_ID

    runs = [path for path in settings.runs.glob("[!.]*/") if not JOB_ID.fullmatch(path.name)]
    return {"number": len(runs), "bytes": sum(map(sum_file_sizes, runs))}


def _print_items(free: list[Item], kept: list[Item], local: dict[str, int]) -> None:
    if local["number"]:
        stay = "{number} runs of `kd run` stay, {bytes} bytes".format(**local)
        console.err.print(f"{stay}: `kd runs rm` removes them", markup=False)
    if free:
        fields = ("kind", "bytes", "age_seconds", "path", "reason")
        rows = [
            [console.format_value(getattr(item, name), name) for name in fields] for item in free
        ]
        console.print_table(["KIND", "BYTES", "AGE", "WHAT", "REASON"], rows)
        console.out.print(
            f"together {console.format_value(sum(item.bytes for item in free), 'bytes')}"
        )
    else:
        console.out.print("nothing to remove")
    _print_kept(kept)


def _print_kept(kept: list[Item]) -> None:
    for item in kept[:SHOWN_KEPT]:
        console.err.print(f"{item.path} stays: {item.kept_by}", markup=False)
    if len(kept) > SHOWN_KEPT:
        console.err.print(f"{len(kept) - SHOWN_KEPT} more stay; --json lists them")
