"""Commands about the caches on this machine: ``kd cache``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.terminal import upkeep
from services.terminal.console import (
    AsJson,
    Fingerprint,
    Home,
    complain,
    err,
    make_settings,
    out,
    plain,
    print_facts,
    print_json,
    table,
)

if TYPE_CHECKING:
    from cache.manifest import FidelityRow

UNVERIFIED = 4

app = typer.Typer()
cache_app = typer.Typer(no_args_is_help=True, help="Caches on this machine, under KD_HOME.")
app.add_typer(cache_app, name="cache")
cache_app.add_typer(upkeep.app)


@cache_app.command("ls")
def cache_ls(home: Home = None, as_json: AsJson = False) -> None:
    """List caches."""
    from cache.store import list_caches

    found = [summary.to_json() for summary in list_caches(make_settings(home=home).caches)]
    if as_json:
        print_json(found)
        return
    columns = ["complete", "teacher", "profile", "tokens", "bytes_per_token"]
    if any(one["problem"] for one in found):
        columns.append("problem")
    rows = [[one["fingerprint"][:12], *(plain(one[column]) for column in columns)] for one in found]
    table(["FINGERPRINT", *(column.upper() for column in columns)], rows)


@cache_app.command("info")
def cache_info(fingerprint: Fingerprint, home: Home = None, as_json: AsJson = False) -> None:
    """Show what a cache holds and was made from."""
    from cache.store import read_manifest, summarise

    folder = cache_folder(fingerprint, home)
    summary = summarise(folder).to_json()
    if as_json:
        manifest = read_manifest(folder) if summary["complete"] else None
        identity = manifest.identity.to_json() if manifest else None
        print_json({**summary, "identity": identity, "fidelity": _rows(manifest.fidelity) if manifest else []})
        return
    print_facts(summary)
    if summary["complete"]:
        _print_fidelity(_rows(read_manifest(folder).fidelity))


@cache_app.command("verify")
def cache_verify(fingerprint: Fingerprint, home: Home = None, as_json: AsJson = False) -> None:
    """Read every byte of a cache and compare it with what was sealed."""
    from cache.store import verify

    folder = cache_folder(fingerprint, home)
    problems = verify(folder)
    if as_json:
        print_json({"path": str(folder), "problems": problems})
    elif not problems:
        out.print(f"{folder.name}: every byte is as it was sealed")
    else:
        complain("\n".join(problems), f"Delete {folder} and run the job again: it will be captured anew.")
    raise typer.Exit(UNVERIFIED if problems else 0)


@cache_app.command("fidelity")
def cache_fidelity(
    fingerprint: Fingerprint,
    teacher: Annotated[
        str | None, typer.Option(help="Folder, GGUF file or hub id. Default: what the cache names.")
    ] = None,
    positions: Annotated[int, typer.Option(min=8, help="Positions to sample.")] = 32,
    redraws: Annotated[int, typer.Option(min=2, help="Samples to draw anew of each.")] = 40,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Compare records of a cache with its live teacher, and write what is found into the cache."""
    from cache.store import open_cache, replace_fidelity
    from kd.fidelity import Live, Origin, measure, out_of_bounds
    from kd.models import hide_progress_bars

    hide_progress_bars()
    store = open_cache(cache_folder(fingerprint, home))
    origin = Origin.find(store, teacher, make_settings(home=home).root)
    rows = measure(store, Live.load(store.identity, origin.config, origin.folder), positions, redraws)
    problems = out_of_bounds(store, rows)
    written = origin.genuine and not problems
    if written:
        replace_fidelity(store.folder, rows)
    if as_json:
        print_json({"path": str(store.folder), "fidelity": _rows(rows), "problems": problems, "written": written})
    else:
        _print_fidelity(_rows(rows))
        if problems:
            complain("\n".join(problems), "Is this the teacher of the cache, and does it run as it did?")
        elif not written:
            err.print(f"The weights in {origin.folder} are not those that were captured: the cache keeps its own rows.")
    raise typer.Exit(UNVERIFIED if problems else 0)


def _rows(fidelity: tuple[FidelityRow, ...]) -> list[dict[str, Any]]:
    return [asdict(row) for row in fidelity]


def _print_fidelity(rows: list[dict[str, Any]]) -> None:
    if rows:
        out.print()
        names = [name for name in rows[0] if any(row[name] is not None for row in rows)]
        table([""] * (1 + len(rows)), [[name, *(plain(row[name]) for row in rows)] for name in names])


def cache_folder(fingerprint: str, home: Path | None) -> Path:
    """The folder of the one cache whose fingerprint begins so; else ``CacheNotFound``."""
    from cache.operations import find_cache

    return find_cache(make_settings(home=home).caches, fingerprint)
