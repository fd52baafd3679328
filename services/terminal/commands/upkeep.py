"""``kd cache diff|stats|rm``: compare, describe and remove caches."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.terminal.console import (
    Home,
    audit_command,
    format_value,
    make_settings,
    mode,
    out,
    print_as_json,
    print_table,
)
from services.terminal.exit_codes import FAILED

if TYPE_CHECKING:
    from cache.inspection import CacheStats, Comparison, Histogram
    from services.settings import Settings

#: Characters of the longest bar of a histogram.
BAR_WIDTH = 40
SECONDS_OF_UNIT = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
#: A hundred years: no time lies further back, and a longer age may reach no year that has a number.
LONGEST_AGE_SECONDS = 36_525 * 86_400
#: Seconds to wait for the job store, which need not run.
STORE_TIMEOUT = 1.0

CacheName = Annotated[
    str, typer.Argument(help="Fingerprint of a cache, the beginning of one, or a path.")
]
Fingerprints = Annotated[
    list[str], typer.Argument(help="Fingerprints of caches, or beginnings of them.")
]
Yes = Annotated[bool, typer.Option("--yes/--no-yes", "-y", help="Do not ask for confirmation.")]

app = typer.Typer()


@app.command("diff")
def cache_diff(a: CacheName, b: CacheName, home: Home = None) -> None:
    """Show how two caches differ; the exit code is 1 if they do, 0 if not."""
    from cache.inspection import compare_caches
    from cache.operations import find_cache_or_path
    from cache.store import open_cache

    root = make_settings(home=home).caches
    left, right = (open_cache(find_cache_or_path(root, name)) for name in (a, b))
    found = compare_caches(left, right)
    if not print_as_json(found.to_json()):
        _print_comparison(found)
    raise typer.Exit(0 if found.equal else FAILED)


@app.command("stats")
def cache_stats(name: CacheName, home: Home = None) -> None:
    """Show statistics of a cache's records.

    They are the entropy, the kept mass, the entries, the bytes and the teacher's perplexity.
    """
    from cache.inspection import compute_cache_stats
    from cache.operations import find_cache_or_path
    from cache.store import open_cache

    folder = find_cache_or_path(make_settings(home=home).caches, name)
    found = compute_cache_stats(open_cache(folder, memory_bytes=0))
    if not print_as_json(asdict(found)):
        _print_stats(found)


@app.command("rm")
def cache_rm(names: Fingerprints, yes: Yes = False, home: Home = None) -> None:
    """Remove caches that nothing captures or reads, and that no unfinished job uses."""
    from cache.checking.listing import summarise_cache
    from cache.operations import find_cache, remove_cache

    settings = make_settings(home=home)
    folders = list(dict.fromkeys(find_cache(settings.caches, name) for name in names))
    for folder in folders:
        _require_unused(settings, folder.name)
    summaries = [summarise_cache(folder) for folder in folders]
    if not mode.as_json:
        rows = [
            [each.fingerprint, *map(format_value, (each.complete, each.teacher, each.bytes))]
            for each in summaries
        ]
        print_table(["FINGERPRINT", "COMPLETE", "TEACHER", "BYTES"], rows)
    if not yes:
        typer.confirm("Remove it?" if len(folders) == 1 else "Remove them?", abort=True, err=True)
    for folder in folders:
        # A job may have begun while the command asked.
        remove_cache(folder, partial(_require_unused, settings, folder.name))
        audit_command(settings, "cache.delete", folder.name)
        if not mode.as_json:
            out.print(f"{folder.name}: removed")
    print_as_json(
        [
            {"fingerprint": each.fingerprint, "bytes": each.bytes, "removed": True}
            for each in summaries
        ]
    )


# ---------------------------------------------------------------------- who uses a cache


def _require_unused(settings: Settings, fingerprint: str) -> None:
    """Raise ``CacheError`` if an unfinished job of this machine's job store uses the cache.

    If the store does not answer, no job is known and no error is raised. A `kd run` is in no store.
    """
    from redis.exceptions import RedisError

    from cache.errors import CacheError
    from services.store.connection import connect_redis
    from services.store.jobs.store import JobStore

    users: list[str] = []
    if url := settings.redis_url or find_embedded_url(settings.home / "redis"):
        with suppress(RedisError), connect_redis(url, STORE_TIMEOUT) as client:
            users = JobStore(client).find_cache_users(fingerprint)
    if users:
        detail = f"The cache {fingerprint} is used by unfinished jobs: {', '.join(users[:5])}."
        raise CacheError(detail, "Wait for them, or cancel them with `kd jobs cancel`.")


def find_embedded_url(folder: Path) -> str | None:
    """Return the address of the bundled server of this data folder, if there is one.

    ``services.store.embedded`` would start a server, which this command must not do.
    """
    try:
        password, port = ((folder / name).read_text() for name in ("password", "port"))
    except OSError:
        return None
    return f"redis://:{password}@127.0.0.1:{port}/0"


# ---------------------------------------------------------------------- output


def _print_comparison(found: Comparison) -> None:
    if found.fields:
        cells = [map(format_value, row) for row in found.fields]
        rows = [[text if len(text) <= 64 else f"{text[:61]}..." for text in row] for row in cells]
        print_table(["FIELD", "A", "B"], rows)
    if (records := found.records) is not None:
        out.print(f"{records.equal_shards} of {records.shards} shards are equal byte for byte")
        if records.same is not None:
            count = records.positions
            out.print(f"{records.same:.2%} of {count} records in the other shards are the same")
        if records.gold_difference is not None:
            out.print(f"log-probabilities of the text differ by {records.gold_difference:.4g} nats")
    if found.equal:
        out.print("no difference")


def _print_stats(found: CacheStats) -> None:
    from cache.perplexity import Perplexity

    facts: dict[str, object] = {
        name: getattr(found, name)
        for name in ("fingerprint", "profile", "sequences", "positions", "bytes_per_token")
    }
    for split, gold in found.gold.items():
        if gold.perplexity is not None:
            known = Perplexity(gold.perplexity, gold.positions, gold.interval)
            facts[f"teacher's perplexity, {split}"] = str(known)
    if (entries := found.entries) is not None:
        facts["entries"] = (
            f"mean {entries.mean:.4g}, p50 {entries.p50}, p99 {entries.p99}, max {entries.max}"
        )
    rows = [[name, format_value(value)] for name, value in facts.items() if value is not None]
    print_table(["", ""], rows)
    means = found.entropy_of == "sequences"
    title = "MEAN ENTROPY OF A SEQUENCE, NATS" if means else "ENTROPY, NATS"
    _print_histogram(title, found.entropy)
    _print_histogram("KEPT MASS", found.kept_mass)
    total = sum(found.bytes.values())
    out.print()
    rows = [[name, str(size), f"{size / total:.1%}"] for name, size in found.bytes.items()]
    print_table(["ARRAY", "BYTES", ""], rows)


def _print_histogram(title: str, histogram: Histogram) -> None:
    total = sum(histogram.counts)
    if not total:
        return
    filled = [number for number, count in enumerate(histogram.counts) if count]
    rows = []
    for number in range(filled[0], filled[-1] + 1):
        low, high = histogram.edges[number : number + 2]
        count = histogram.counts[number]
        bar = "#" * round(BAR_WIDTH * count / max(histogram.counts))
        rows.append([f"{low:g} to {high:g}", f"{count / total:.1%}", bar])
    out.print()
    print_table([title, "SHARE", f"mean {format_value(histogram.mean)}"], rows)


def parse_age(text: str, option: str = "--older-than") -> float:
    """Return the seconds of an age such as 90m, 12h, 7d or 2w, which ``option`` has."""
    found = re.fullmatch(r"(\d+)([smhdw])", text)
    seconds = int(found[1]) * SECONDS_OF_UNIT[found[2]] if found else math.inf
    if seconds > LONGEST_AGE_SECONDS:
        detail = f"{text!r} is not an age: write 90m, 12h, 7d or 2w"
        raise typer.BadParameter(detail, param_hint=option)
    return seconds
