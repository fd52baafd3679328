"""``kd upgrade``: which data of earlier versions this version reads, and which it rewrites."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from services.terminal import console
from services.terminal.commands.recovery import connect_store
from services.terminal.commands.upkeep import find_embedded_url
from services.terminal.exit_codes import FAILED

if TYPE_CHECKING:
    from services.settings import Settings
    from services.store.formats import Data, FoundFormat

#: What becomes of a place, in words.
STATES = {"read": "read as it is", "rewrite": "to rewrite", "refused": "cannot be read"}

app = typer.Typer()


@app.command()
def upgrade(
    yes: Annotated[
        bool, typer.Option("--yes/--no-yes", "-y", help="Rewrite what has an old format.")
    ] = False,
    home: console.Home = None,
) -> None:
    """List the formats of all data, and rewrite data in formats that this version cannot read.

    Without --yes nothing is changed. Stop the service and make a backup first. The command can be
    interrupted and repeated. The exit code is 1 if something is left that this version cannot read,
    or that must be rewritten. If the job store does not run, it is left out, and the command says
    so.
    """
    from services.store.formats import examine, rewrite

    settings = console.make_settings(home=home)
    with _opening(settings) as data:
        found = examine(data)
        done = rewrite(data) if yes and any(each.state == "rewrite" for each in found) else []
        left = examine(data) if done else found
    if done:
        console.audit_command(settings, "data.upgrade", str(settings.home), rewritten=len(done))
    facts = {
        "store": data.client is not None,
        "found": [asdict(each) for each in left],
        "rewritten": [asdict(each) for each in done],
    }
    if not console.print_as_json(facts):
        _print(left, done, data)
    raise typer.Exit(0 if all(each.state == "read" for each in left) else FAILED)


@contextmanager
def _opening(settings: Settings) -> Iterator[Data]:
    """Yield the data of the service; a job store that does not answer is left out.

    An embedded store that is stopped is started for this command.
    """
    from services.store.backup import open_store
    from services.store.embedded import StoreUnavailable
    from services.store.formats import Data

    with ExitStack() as stack:
        client = None
        if settings.redis_url is not None:
            with suppress(StoreUnavailable):
                client = stack.enter_context(connect_store(settings)).redis
        elif find_embedded_url(settings.home / "redis") is not None:
            client = stack.enter_context(open_store(settings))
        yield Data(settings, client)


def _print(left: list[FoundFormat], done: list[FoundFormat], data: Data) -> None:
    counts = Counter((each.format, each.number, each.state) for each in left)
    rows = [
        [name, console.format_value(number), str(count), STATES[state]]
        for (name, number, state), count in counts.items()
    ]
    if rows:
        console.print_table(["FORMAT", "NUMBER", "PLACES", "STATE"], rows)
    if data.client is None:
        console.out.print("no job store was found; its records were not checked")
    for each in left:
        if each.state == "refused":
            console.print_error(each.detail, each.remedy)
        elif each.state == "rewrite":
            console.out.print(f"to rewrite: {each.place}", markup=False, soft_wrap=True)
    for each in done:
        console.out.print(f"rewritten: {each.place}", markup=False, soft_wrap=True)
    if not done:
        found = any(each.state == "rewrite" for each in left)
        advice = "`kd upgrade --yes` rewrites it; make a backup first."
        console.out.print(advice if found else "nothing to rewrite", markup=False)
