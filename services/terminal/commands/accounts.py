"""``kd quota`` and ``kd audit``: what teams use of a service, and what callers did."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from services.terminal import console

if TYPE_CHECKING:
    from kd.client.wire.accounts import QuotaUse

#: Members of an entry that have columns of their own.
_COLUMNS = ("id", "time", "actor", "action", "target", "outcome")

app = typer.Typer()


@app.command()
def quota(server: console.Server = None) -> None:
    """Show what your team uses of its quotas; with an admin's key, all teams."""
    from services.terminal.client import connect, dump

    with connect(server) as client:
        accounts = client.quotas()
    if console.print_as_json(list(map(dump, accounts))):
        return
    parts = ("caches", "runs", "files")
    columns = ("TEAM", "DEVICES", "QUEUED", "RECENT", "TODAY", "OF", "ON DISK", "OF")
    rows = [
        [
            account.team,
            str(account.devices),
            str(account.queued_jobs),
            console.format_value(int(account.recent_device_seconds), "seconds"),
            *_format_use(account.device_seconds, "seconds"),
            *_format_use(account.bytes, "bytes"),
            *(console.format_value(getattr(account.disk, part), "bytes") for part in parts),
        ]
        for account in accounts
    ]
    console.print_table([*columns, *map(str.upper, parts)], rows)
    for account in accounts:
        if account.reason is not None:
            console.err.print(account.reason, markup=False)


def _format_use(use: QuotaUse, unit: str) -> tuple[str, str]:
    used = console.format_value(int(use.used), unit)
    return used, "no limit" if use.limit is None else console.format_value(int(use.limit), unit)


@app.command()
def audit(
    actor: Annotated[str | None, typer.Option(help="Only what this key's owner did.")] = None,
    action: Annotated[
        str | None,
        typer.Option(help="Only this action, such as job.cancel; job means all actions on jobs."),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Only what was done to this job, cache or key.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="AGE", help="Only the last 90m, 12h, 7d or 2w.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many entries to print at most.")] = 50,
    server: console.Server = None,
) -> None:
    """Print who created, changed, deleted and exported what, newest first; needs an admin's key."""
    from services.terminal.client import connect, read_pages
    from services.terminal.commands.upkeep import parse_age

    filters: dict[str, str | int | None] = {"actor": actor, "action": action, "target": target}
    if since is not None:
        start = datetime.now(UTC) - timedelta(seconds=parse_age(since, "--since"))
        filters["after"] = start.isoformat(timespec="milliseconds")
    filters["limit"] = min(limit, 1000)
    with connect(server) as client:
        entries = [
            {name: value for name, value in entry.items() if value is not None}
            for entry in islice(read_pages(client, "/audit", filters), limit)
        ]
    if console.print_as_json(entries):
        return
    rows = []
    for entry in entries:
        more = console.format_value({name: entry[name] for name in entry if name not in _COLUMNS})
        row = [console.format_time(entry["time"]), *(entry[name] for name in _COLUMNS[2:])]
        rows.append([*row, more])
    console.print_table([*map(str.upper, _COLUMNS[1:]), "MORE"], rows, spare=("MORE",))
