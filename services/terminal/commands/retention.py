"""``kd gc``: what the rules of retention remove, and what stays because somebody needs it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

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
    from services.store.retention.items import Item, Scene
    from services.store.retention.rules import AgeLimits

#: Things that stay which are named one by one.
SHOWN_KEPT = 10

app = typer.Typer()

OlderThan = Annotated[
    str | None,
    typer.Option(
        help="Age, instead of the age in the settings: 90m, 12h, 7d, 2w. It applies to the kinds "
        "that you name; if you name none, to leftovers."
    ),
]
Caches = Annotated[
    bool | None,
    typer.Option("--caches/--no-caches", help="Sealed caches that nothing has read."),
]
Texts = Annotated[
    bool | None,
    typer.Option("--texts/--no-texts", help="Token stores that nothing has read."),
]
Runs = Annotated[
    bool | None,
    typer.Option("--runs/--no-runs", help="Ended jobs: record, run folder and student."),
]
Checkpoints = Annotated[
    bool | None,
    typer.Option(
        "--checkpoints/--no-checkpoints",
        help="Checkpoints of ended jobs beyond the newest; --keep says how many stay.",
    ),
]
Keep = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Checkpoints that an ended job keeps; 0 = none if its student is saved.",
    ),
]
Events = Annotated[
    bool | None,
    typer.Option("--events/--no-events", help="Events and metrics of ended jobs, in Redis."),
]
Logs = Annotated[bool | None, typer.Option("--logs/--no-logs", help="Logs of ended jobs.")]
Files = Annotated[
    bool | None,
    typer.Option("--files/--no-files", help="Uploaded files that no job names."),
]
Imports = Annotated[
    bool | None,
    typer.Option("--imports/--no-imports", help="Models and data that `import kd` saved."),
]
Leftovers = Annotated[
    bool | None,
    typer.Option(
        "--leftovers/--no-leftovers",
        help="What crashes left: incomplete caches, runs without a record. Age: 7d.",
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


@dataclass(frozen=True)
class RemovalRequest:
    """Which rules one call applies.

    ``kinds``: whether each kind is asked for; None = its options are not given. ``age`` in seconds
    and ``keep``, a number of checkpoints, stand in place of those of the settings; None = those.
    """

    kinds: dict[str, bool | None]
    age: float | None
    keep: int | None

    def choose_limits(self, settings: Settings) -> AgeLimits:
        """Return the rules of the settings, as the options of this call change them."""
        from services.store.retention.rules import AgeLimits

        limits = AgeLimits.of_gc(settings)
        named = [kind for kind, wanted in self.kinds.items() if wanted]
        if not named:
            kinds = [kind for kind, wanted in self.kinds.items() if wanted is None]
            aged = limits if self.age is None else replace(limits, leftovers=self.age)
            return aged.only(kinds)
        limits = limits.only(named)
        if self.age is not None:
            limits = limits.with_age(named, self.age)
        if self.keep is not None:
            kept = self.keep or None
            limits = replace(limits, checkpoints=kept, student_checkpoints=bool(kept))
        for kind in named:
            if not limits.has(kind):
                needed = "--keep" if kind == "checkpoints" else "--older-than"
                raise typer.BadParameter(
                    f"the settings have no rule for {kind}: add {needed}", param_hint=f"--{kind}"
                )
        return limits


@app.command()
def gc(
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
    force: Force = False,
    yes: Yes = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Remove what the retention rules name, and what crashes left behind.

    The rules are the settings that begin with KD_RETAIN. If kinds are named, such as --caches, only
    these are removed. The job store must run. Folders of `kd run` are counted and never removed:
    `kd runs rm` removes them. The command lists what it will remove, and asks first. With --json it
    removes nothing unless --yes is given. `kd jobs adopt` restores a record of a run without one.
    """
    from services.store.retention.collection import find_items, look

    request = RemovalRequest(
        kinds={
            "caches": caches,
            "texts": texts,
            "runs": runs,
            "checkpoints": checkpoints if checkpoints is not None or keep is None else True,
            "events": events,
            "logs": logs,
            "files": files,
            "imports": imports,
            "leftovers": leftovers,
        },
        age=None if older_than is None else parse_age(older_than),
        keep=keep,
    )
    settings = make_settings(home=home)
    limits = request.choose_limits(settings)
    with connect_store(settings) as store:
        # Twice: a job may begin, or a student be saved, while the command asks.
        look_now = partial(look, settings, store, limits, force)
        found = find_items(look_now())
        free = [item for item in found if item.kept_by is None]
        kept = [item for item in found if item.kept_by is not None]
        local = _measure_local_runs(settings)
        if as_json:
            gone, needed = _remove_shown(free, look_now()) if yes else (free, [])
            _print_json(yes, gone, kept + needed, local)
            return
        _print_items(free, kept, local)
        if not free:
            return
        if not yes:
            typer.confirm("Remove them?", abort=True, err=True)
        gone, needed = _remove_shown(free, look_now())
        _print_kept(needed)
    out.print(f"{len(gone)} of {len(free)} removed, {sum(item.bytes for item in gone)} bytes")


def _measure_local_runs(settings: Settings) -> dict[str, int]:
    """The number and the bytes of the runs that no job of the service has made."""
    from cache.disk import sum_file_sizes
    from services.store.run_folder import JOB_ID

    folders = (folder for folder in settings.runs.glob("[!.]*") if folder.is_dir())
    sizes = [sum_file_sizes(folder) for folder in folders if not JOB_ID.fullmatch(folder.name)]
    return {"number": len(sizes), "bytes": sum(sizes)}


def _print_json(
    removed: bool, items: list[Item], kept: list[Item], local_runs: dict[str, int]
) -> None:
    parts = {"items": items, "kept": kept}
    shown = {name: [item.to_json() for item in part] for name, part in parts.items()}
    print_json({"removed": removed, **shown, "local_runs": local_runs})


def _remove_shown(shown: list[Item], scene: Scene) -> tuple[list[Item], list[Item]]:
    """Remove those ``shown`` that are still found; return what is gone, and what stays."""
    from services.store.retention.collection import find_items, remove_items
    from services.store.retention.rules import FREED

    known = {(item.kind, item.path, item.name) for item in shown}
    still = [item for item in find_items(scene) if (item.kind, item.path, item.name) in known]

    def note(item: Item) -> None:
        scene.store.count(FREED, item.bytes, kind=item.kind)
        audit_command(scene.settings, "retention.remove", item.name, **item.describe())

    return remove_items(still, scene, note)


def _print_items(free: list[Item], kept: list[Item], local: dict[str, int]) -> None:
    if local["number"]:
        stay = "{number} runs of `kd run` stay, {bytes} bytes".format(**local)
        err.print(f"{stay}: `kd runs rm` removes them", markup=False)
    if free:
        print_table(
            ["KIND", "BYTES", "AGE", "WHAT", "REASON"],
            [
                [
                    item.kind,
                    str(item.bytes),
                    format_value(item.age, "age_seconds"),
                    str(item.path or item.name),
                    item.reason,
                ]
                for item in free
            ],
        )
        out.print(f"{sum(item.bytes for item in free)} bytes")
        if any(item.reason == "a run that no job record names" for item in free):
            out.print(
                "`kd jobs adopt FOLDER` restores the record of a run that should stay.",
                markup=False,
            )
    else:
        out.print("nothing to remove")
    _print_kept(kept)


def _print_kept(kept: list[Item]) -> None:
    for item in kept[:SHOWN_KEPT]:
        err.print(f"{item.path or item.name} stays: {item.kept_by}", markup=False)
    if len(kept) > SHOWN_KEPT:
        err.print(f"{len(kept) - SHOWN_KEPT} more stay; --json lists them")
