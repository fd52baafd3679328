"""``kd cache``: list, show, verify and measure the caches on this machine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from services.terminal import console
from services.terminal.commands import upkeep
from services.terminal.exit_codes import UNVERIFIED

app = typer.Typer()
cache_app = typer.Typer(no_args_is_help=True, help="Caches on this machine, in KD_HOME.")
app.add_typer(cache_app, name="cache")
cache_app.add_typer(upkeep.app)


@cache_app.command("ls")
def cache_ls(home: console.Home = None) -> None:
    """List caches."""
    from cache.checking.listing import list_caches
    from kd.python.runs import find_makers

    settings = console.make_settings(home=home)
    makers = find_makers(settings.runs)
    found = [
        {**asdict(each), **makers.get(each.fingerprint, {})}
        for each in list_caches(settings.caches)
    ]
    if console.print_as_json(found):
        return
    columns = ["complete", "teacher", "text", "made_by", "profile", "tokens", "bytes_per_token"]
    if any(each["problem"] for each in found):
        columns.append("problem")
    rows = [
        [each["fingerprint"][:12], *(console.format_value(each.get(column)) for column in columns)]
        for each in found
    ]
    console.print_table(["FINGERPRINT", *(column.upper() for column in columns)], rows)


@cache_app.command("info")
def cache_info(fingerprint: console.Fingerprint, home: console.Home = None) -> None:
    """Show what a cache holds and what it was made from."""
    from cache.checking.listing import summarise_cache
    from cache.store import read_manifest
    from kd.python.runs import find_makers

    folder = find_cache_folder(fingerprint, home)
    maker = find_makers(console.make_settings(home=home).runs).get(folder.name, {})
    summary = {**asdict(summarise_cache(folder)), **maker}
    more: dict[str, Any] = {"identity": None, "fidelity": [], "overruled": None}
    precision = overruled = None
    if summary["complete"]:
        manifest = read_manifest(folder)
        precision = manifest.teacher.identity.describe_precision()
        more["identity"] = manifest.identity.to_json()
        more["fidelity"] = [asdict(row) for row in manifest.fidelity]
        if overruled := manifest.overruled:
            more["overruled"] = overruled.to_json()
    if console.print_as_json({**summary, **more}):
        return
    console.print_facts({**summary, "teacher_precision": precision})
    _print_fidelity(more["fidelity"])
    if overruled:
        console.err.print(f"warning: {overruled.describe()}")


@cache_app.command("verify")
def cache_verify(fingerprint: console.Fingerprint, home: console.Home = None) -> None:
    """Read every byte of a cache and compare it with its digests."""
    from cache.checking.verify import find_extras, verify_cache

    folder = find_cache_folder(fingerprint, home)
    problems = verify_cache(folder)
    extras = [] if problems else find_extras(folder)
    if not console.print_as_json({"path": str(folder), "problems": problems, "extras": extras}):
        if problems:
            remedy = f"Delete {folder} and run the job again; it captures the cache again."
            console.print_error("\n".join(problems), remedy)
        else:
            console.out.print(f"{folder.name}: no byte has changed since it was sealed")
        if extras:
            console.out.print(
                f"ignored, not part of the cache: {len(extras)}, for example {extras[0]}"
            )
    raise typer.Exit(UNVERIFIED if problems else 0)


@cache_app.command("fidelity")
def cache_fidelity(
    fingerprint: console.Fingerprint,
    teacher: Annotated[
        str | None,
        typer.Option(
            help="Folder, GGUF file or hub id. Default: the teacher that the cache names."
        ),
    ] = None,
    positions: Annotated[int, typer.Option(min=8, help="How many positions to sample.")] = 32,
    redraws: Annotated[
        int, typer.Option(min=2, help="How many new samples to draw at each position.")
    ] = 40,
    home: console.Home = None,
) -> None:
    """Compare records of a cache with its live teacher, and store the result in the cache."""
    from cache.reading.usage import hold_for
    from cache.store import open_cache
    from kd.capture.fidelity.live import TeacherLocation
    from kd.capture.fidelity.recheck import recheck_fidelity
    from kd.models.loading import hide_progress_bars

    hide_progress_bars()
    store = open_cache(find_cache_folder(fingerprint, home))
    hold_for(store, store.folder)
    origin = TeacherLocation.find(store, teacher, console.make_settings(home=home).root)
    found = recheck_fidelity(store, origin, positions, redraws)
    problems = found.problems
    if not console.print_as_json({"path": str(store.folder), **asdict(found)}):
        _print_fidelity([asdict(row) for row in found.fidelity])
        console.out.print(f"The teacher's own noise between two batches is {found.noise:.2g} nats.")
        if problems:
            console.print_error(
                "\n".join(problems),
                "Check that this is the cache's teacher, with the same precision and versions.",
            )
        elif not found.written:
            console.err.print(
                f"The weights in {origin.teacher.folder} differ from those of the capture, so the "
                "cache keeps its earlier fidelity."
            )
    raise typer.Exit(UNVERIFIED if problems else 0)


def _print_fidelity(rows: list[dict[str, Any]]) -> None:
    if rows:
        console.out.print()
        names = [name for name in rows[0] if any(row[name] is not None for row in rows)]
        lines = [[name, *(console.format_value(row[name]) for row in rows)] for name in names]
        console.print_table([""] * (1 + len(rows)), lines)


def find_cache_folder(fingerprint: str, home: Path | None) -> Path:
    """Return the folder of the cache whose fingerprint begins with ``fingerprint``.

    Raises ``CacheNotFound`` if no cache or several caches match.
    """
    from cache.operations import find_cache

    return find_cache(console.make_settings(home=home).caches, fingerprint)
