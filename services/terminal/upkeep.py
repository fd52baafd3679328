"""Commands that compare, describe, merge and remove caches: ``kd cache merge|diff|stats|gc|rm``."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.terminal.console import AsJson, Home, err, make_settings, out, plain, print_json, table

if TYPE_CHECKING:
    from cache.inspection import CacheStats, Comparison, Histogram
    from cache.operations import Garbage
    from services.settings import Settings

DIFFERENT = 1
BAR_WIDTH = 40
SECONDS_OF_UNIT = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
STORE_TIMEOUT = 1.0

CacheName = Annotated[str, typer.Argument(help="Fingerprint of a cache, the beginning of one, or a path.")]
CacheNames = Annotated[list[str], typer.Argument(help="Fingerprints, beginnings of them, or paths; two at least.")]
Fingerprints = Annotated[list[str], typer.Argument(help="Fingerprints of caches, or beginnings of them.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

app = typer.Typer()


@app.command("merge")
def cache_merge(names: CacheNames, home: Home = None, as_json: AsJson = False) -> None:
    """Write the sequences of several caches into one; they must share teacher, tokenizer and codec."""
    from cache.operations import find_cache_or_path, merge
    from cache.store import summarise

    root = make_settings(home=home).caches
    folders = [find_cache_or_path(root, name) for name in names]
    merged = merge(root, folders, lambda done, of: err.print(f"shard {done} of {of}"))
    summary = summarise(merged.folder).to_json()
    print_json(summary) if as_json else out.print(
        f"{merged.folder.name}: {summary['sequences']} sequences, {summary['tokens']} tokens, "
        f"{plain(summary['bytes_per_token'])} bytes per token"
    )


@app.command("diff")
def cache_diff(a: CacheName, b: CacheName, home: Home = None, as_json: AsJson = False) -> None:
    """Say in what two caches differ; exit code 1 if they do, 0 if not."""
    from cache.inspection import diff
    from cache.operations import find_cache_or_path
    from cache.store import open_cache

    root = make_settings(home=home).caches
    left, right = (open_cache(find_cache_or_path(root, name)) for name in (a, b))
    found = diff(left, right)
    print_json(found.to_json()) if as_json else _print_comparison(found)
    raise typer.Exit(0 if found.equal else DIFFERENT)


@app.command("stats")
def cache_stats(name: CacheName, home: Home = None, as_json: AsJson = False) -> None:
    """Show what a cache's records are like: entropy, kept mass, entries, bytes, the teacher's perplexity."""
    from cache.inspection import stats
    from cache.operations import find_cache_or_path
    from cache.store import open_cache

    folder = find_cache_or_path(make_settings(home=home).caches, name)
    found = stats(open_cache(folder, memory_bytes=0))
    print_json(found.to_json()) if as_json else _print_stats(found)


@app.command("gc")
def cache_gc(
    older_than: Annotated[str, typer.Option(help="Age of incomplete caches that go: 90m, 12h, 7d, 2w.")] = "7d",
    yes: Yes = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Remove what nobody can use: leftovers of crashes, old incomplete caches, caches of older versions.

    What an unfinished job uses stays, however old it is: a paused capture goes on from its sealed shards.
    Says what it would remove, and asks; with --json it removes nothing unless --yes is given.
    """
    from cache.operations import collect, find_garbage

    seconds = _seconds(older_than)
    settings = make_settings(home=home)
    garbage = _unused(settings, find_garbage(settings.caches, seconds))
    if not as_json:
        _print_garbage(garbage)
    if garbage and not yes and not as_json:
        typer.confirm("Remove it?", abort=True, err=True)
    removed = collect(_unused(settings, garbage), seconds) if yes or not as_json else []
    if as_json:
        print_json({"removed": yes, "garbage": [one.to_json() for one in (removed if yes else garbage)]})
    elif garbage:
        out.print(f"{len(removed)} of {len(garbage)} removed, {sum(one.bytes for one in removed)} bytes")


@app.command("rm")
def cache_rm(names: Fingerprints, yes: Yes = False, home: Home = None) -> None:
    """Remove caches; one that is being captured, or that an unfinished job uses, is refused."""
    from cache.operations import find_cache, remove_cache
    from cache.store import summarise

    settings = make_settings(home=home)
    folders = list(dict.fromkeys(find_cache(settings.caches, name) for name in names))
    for folder in folders:
        _require_unused(settings, folder.name)
    summaries = [summarise(folder) for folder in folders]
    table(
        ["FINGERPRINT", "COMPLETE", "TEACHER", "BYTES"],
        [[one.fingerprint, plain(one.complete), plain(one.teacher), plain(one.bytes)] for one in summaries],
    )
    if not yes:
        typer.confirm("Remove it?" if len(folders) == 1 else "Remove them?", abort=True, err=True)
    for folder in folders:
        _require_unused(settings, folder.name)  # a job may have begun while the question stood
        remove_cache(folder)
        out.print(f"{folder.name}: removed")


# ---------------------------------------------------------------------- who uses a cache


def _require_unused(settings: Settings, fingerprint: str) -> None:
    """Raise ``CacheError`` if an unfinished job of this machine's job store uses the cache.

    Without a store that answers nothing is known, and nothing said; nor is it about a `kd run`, which has no store.
    """
    from cache.errors import CacheError

    if users := _users(settings, [fingerprint]).get(fingerprint):
        raise CacheError(
            f"The cache {fingerprint} is used by {', '.join(users[:5])}, which has not ended.",
            "Wait for it, or cancel it with `kd jobs cancel`.",
        )


def _unused(settings: Settings, garbage: list[Garbage]) -> list[Garbage]:
    """What is of no cache that an unfinished job uses, as far as a store that answers knows."""
    used = _users(settings, {one.folder.name for one in garbage})
    return [one for one in garbage if one.folder.name not in used]


def _users(settings: Settings, fingerprints: Collection[str]) -> dict[str, list[str]]:
    """The unfinished jobs that use each of these caches, of those that have any; none without a store that answers."""
    from redis.exceptions import RedisError

    from services.jobs import JobStore, connect

    url = settings.redis_url or _embedded_url(settings.home / "redis")
    if url is None or not fingerprints:
        return {}
    try:
        with connect(url, STORE_TIMEOUT) as client:
            store = JobStore(client)
            return {name: users for name in fingerprints if (users := store.cache_users(name))}
    except RedisError:
        return {}


def _embedded_url(folder: Path) -> str | None:
    """Where the bundled server of this data folder answers, if it runs; ``services.embedded`` would start one."""
    try:
        password, port = ((folder / name).read_text() for name in ("password", "port"))
    except OSError:
        return None
    return f"redis://:{password}@127.0.0.1:{port}/0"


# ---------------------------------------------------------------------- what is printed


def _print_comparison(found: Comparison) -> None:
    if found.fields:
        table(["FIELD", "A", "B"], [[_short(cell) for cell in row] for row in found.fields])
    records = found.records
    if records is not None:
        out.print(f"{records.equal_shards} of {records.shards} shards are equal, byte for byte")
    if records is not None and records.same is not None:
        out.print(f"{records.same:.2%} of {records.positions} records of the others are the same")
    if records is not None and records.gold_difference is not None:
        out.print(f"log-probabilities of the text differ by {records.gold_difference:.4g} nats")
    if found.equal:
        out.print("no difference")


def _print_stats(found: CacheStats) -> None:
    facts: dict[str, Any] = {
        name: getattr(found, name) for name in ("fingerprint", "profile", "sequences", "positions", "bytes_per_token")
    }
    for split, gold in found.gold.items():
        facts[f"teacher's perplexity, {split}"] = gold.perplexity
    if found.entries is not None:
        entries = found.entries
        facts["entries"] = f"mean {entries.mean:.4g}, p50 {entries.p50}, p99 {entries.p99}, max {entries.max}"
    table(["", ""], [[name, plain(value)] for name, value in facts.items() if value is not None])
    _print_histogram("ENTROPY, NATS", found.entropy)
    _print_histogram("KEPT MASS", found.kept_mass)
    total = sum(found.bytes.values())
    out.print()
    table(["ARRAY", "BYTES", ""], [[name, str(size), f"{size / total:.1%}"] for name, size in found.bytes.items()])


def _print_histogram(title: str, histogram: Histogram) -> None:
    total = sum(histogram.counts)
    if not total:
        return
    filled = [number for number, count in enumerate(histogram.counts) if count]
    rows = []
    for number in range(filled[0], filled[-1] + 1):
        low, high, count = histogram.edges[number], histogram.edges[number + 1], histogram.counts[number]
        bar = "#" * round(BAR_WIDTH * count / max(histogram.counts))
        rows.append([f"{low:g} to {high:g}", f"{count / total:.1%}", bar])
    out.print()
    table([title, "SHARE", f"mean {plain(histogram.mean)}"], rows)


def _print_garbage(garbage: list[Garbage]) -> None:
    if not garbage:
        out.print("nothing to remove")
        return
    table(["BYTES", "PATH", "WHY"], [[str(one.bytes), str(one.path), one.why] for one in garbage])


def _short(value: Any) -> str:
    text = plain(value)
    return text if len(text) <= 64 else f"{text[:61]}..."


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+)([smhdw])", text)
    if found is None:
        raise typer.BadParameter(f"{text!r} is no age: write 90m, 12h, 7d or 2w", param_hint="--older-than")
    return int(found[1]) * SECONDS_OF_UNIT[found[2]]
