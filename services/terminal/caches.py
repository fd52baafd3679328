"""Commands about the caches on this machine: ``kd cache``."""

from __future__ import annotations

from pathlib import Path

import typer

from services.terminal.console import AsJson, Fingerprint, Home, complain, make_settings, out, plain, print_json, table

UNVERIFIED = 4

app = typer.Typer()
cache_app = typer.Typer(no_args_is_help=True, help="Caches on this machine, under KD_HOME.")
app.add_typer(cache_app, name="cache")


@cache_app.command("ls")
def cache_ls(home: Home = None, as_json: AsJson = False) -> None:
    """List caches."""
    from cache.store import list_caches

    found = [summary.to_json() for summary in list_caches(make_settings(home=home).caches)]
    if as_json:
        print_json(found)
        return
    columns = ("complete", "teacher", "profile", "tokens", "bytes_per_token")
    rows = [[one["fingerprint"][:12], *(plain(one[column]) for column in columns)] for one in found]
    table(["FINGERPRINT", *(column.upper() for column in columns)], rows)


@cache_app.command("info")
def cache_info(fingerprint: Fingerprint, home: Home = None, as_json: AsJson = False) -> None:
    """Show what a cache holds and was made from."""
    from cache.store import read_manifest, summarise

    folder = _cache_folder(fingerprint, home)
    summary = summarise(folder).to_json()
    if as_json:
        identity = read_manifest(folder).identity.to_json() if summary["complete"] else None
        print_json({**summary, "identity": identity})
        return
    table(["", ""], [[name, plain(value)] for name, value in summary.items() if value not in (None, "")])


@cache_app.command("verify")
def cache_verify(fingerprint: Fingerprint, home: Home = None, as_json: AsJson = False) -> None:
    """Read every byte of a cache and compare it with what was sealed."""
    from cache.store import verify

    folder = _cache_folder(fingerprint, home)
    problems = verify(folder)
    if as_json:
        print_json({"path": str(folder), "problems": problems})
    elif not problems:
        out.print(f"{folder.name}: every byte is as it was sealed")
    else:
        complain("\n".join(problems), f"Delete {folder} and run the job again: it will be captured anew.")
    raise typer.Exit(UNVERIFIED if problems else 0)


def _cache_folder(fingerprint: str, home: Path | None) -> Path:
    from cache.errors import CacheNotFound
    from cache.store import list_caches

    caches = make_settings(home=home).caches
    found = [summary.path for summary in list_caches(caches) if summary.fingerprint.startswith(fingerprint)]
    if len(found) != 1:
        raise CacheNotFound(f"{fingerprint!r} names {len(found)} caches under {caches}.", "See `kd cache ls`.")
    return Path(found[0])
