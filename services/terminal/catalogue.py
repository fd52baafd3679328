"""What the help says of every command besides its own text: its group and an example.

The class of the command ``kd`` applies the table, and gives every command the options ``--json``
and ``--quiet``. A test compares the table with the commands, and parses every example.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from services.terminal.console import mode, notes

START = "First steps"
BEFORE = "Before a run"
RUN = "Run a job here"
JOBS = "Jobs of a service"
CACHES = "Caches"
SHARE = "Share results"
STUDY = "Learn about settings"
SERVICE = "Run a service"


class Help(NamedTuple):
    """The group of a command, and an example of its use."""

    group: str
    example: str


#: The commands in the order of the help.
CATALOGUE = {
    "demo": Help(START, "kd demo --baseline"),
    "example": Help(START, "kd example"),
    "init": Help(START, "kd init job.yaml --teacher teacher-folder --train 'texts/*.txt'"),
    "doctor": Help(START, "kd doctor"),
    "explain": Help(START, "kd explain cache.threshold"),
    "run": Help(RUN, "kd run job.yaml --set train.max_steps=100"),
    "eval": Help(RUN, "kd eval my-run job.yaml"),
    "check": Help(RUN, "kd check job.yaml"),
    "validate": Help(BEFORE, "kd validate job.yaml"),
    "estimate": Help(BEFORE, "kd estimate job.yaml"),
    "plan": Help(BEFORE, "kd plan job.yaml --devices 8xh100"),
    "lr": Help(BEFORE, "kd lr job.yaml"),
    "submit": Help(JOBS, "kd submit job.yaml --detach"),
    "watch": Help(JOBS, "kd watch last"),
    "open": Help(JOBS, "kd open last"),
    "jobs ls": Help(JOBS, "kd jobs ls --status running"),
    "jobs show": Help(JOBS, "kd jobs show last"),
    "jobs diff": Help(JOBS, "kd jobs diff job_01m7 job_01m8"),
    "jobs cancel": Help(JOBS, "kd jobs cancel last"),
    "jobs pause": Help(JOBS, "kd jobs pause last"),
    "jobs resume": Help(JOBS, "kd jobs resume last"),
    "jobs retry": Help(JOBS, "kd jobs retry last"),
    "jobs clone": Help(JOBS, "kd jobs clone last --set train.learning_rate=1e-3"),
    "jobs rm": Help(JOBS, "kd jobs rm last --artifacts"),
    "jobs logs": Help(JOBS, "kd jobs logs last --follow"),
    "jobs events": Help(JOBS, "kd jobs events last --types evaluation"),
    "jobs adopt": Help(JOBS, "kd jobs adopt potstill-data/runs/job_01m7"),
    "cache ls": Help(CACHES, "kd cache ls"),
    "cache info": Help(CACHES, "kd cache info 89b9"),
    "cache verify": Help(CACHES, "kd cache verify 89b9"),
    "cache fidelity": Help(CACHES, "kd cache fidelity 89b9"),
    "cache diff": Help(CACHES, "kd cache diff 89b9 4c3e"),
    "cache stats": Help(CACHES, "kd cache stats 89b9"),
    "cache rm": Help(CACHES, "kd cache rm 89b9"),
    "cache import": Help(CACHES, "kd cache import distillkit records --tokenizer teacher-folder"),
    "cache export": Help(CACHES, "kd cache export 89b9 --format distillkit --out records --lossy"),
    "runs ls": Help(RUN, "kd runs ls"),
    "runs rm": Help(RUN, "kd runs rm my-run"),
    "report": Help(SHARE, "kd report last --html"),
    "push": Help(SHARE, "kd push last ann/small-austen --private"),
    "pull": Help(SHARE, "kd pull ann/small-austen"),
    "export": Help(SHARE, "kd export last --to merged"),
    "ablate": Help(STUDY, "kd ablate job.yaml --axis alpha --axis schedules"),
    "landscape": Help(STUDY, "kd landscape my-run"),
    "up": Help(SERVICE, "kd up --workers 2"),
    "serve": Help(SERVICE, "kd serve --port 8000"),
    "worker": Help(SERVICE, "kd worker --queues train"),
    "keys new": Help(SERVICE, "kd keys new ann --team novels"),
    "keys ls": Help(SERVICE, "kd keys ls"),
    "keys revoke": Help(SERVICE, "kd keys revoke ann"),
    "keys quota": Help(SERVICE, "kd keys quota novels --bytes 500GiB"),
    "quota": Help(SERVICE, "kd quota"),
    "audit": Help(SERVICE, "kd audit --json"),
    "store check": Help(SERVICE, "kd store check s3://my-bucket/caches"),
    "backup": Help(SERVICE, "kd backup backups/monday"),
    "restore": Help(SERVICE, "kd restore backups/monday --check"),
    "gc": Help(SERVICE, "kd gc --older-than 7d"),
}


class Catalogue(TyperGroup):
    """The command ``kd``, whose commands are grouped, have examples, and may be quiet."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        shared = _make_shared_options()
        for path, command in walk(self):
            own = {each.name for each in command.params}
            command.params += [each for each in shared if each.name not in own]
            if line := CATALOGUE.get(path):
                command.epilog = f"Example: {line.example}"
                first: Any = self.commands[path.partition(" ")[0]]
                first.rich_help_panel = line.group
        ranks = {path.partition(" ")[0]: rank for rank, path in enumerate(CATALOGUE)}
        names = sorted(self.commands, key=lambda name: ranks.get(name, len(ranks)))
        self.commands = {name: self.commands[name] for name in names}


def walk(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the words and the command of all that is below ``group`` and is no group itself."""
    for name, command in group.commands.items():
        path = f"{before}{name}"
        if hasattr(command, "commands"):
            yield from walk(command, f"{path} ")
        else:
            yield path, command


def _make_shared_options() -> list[Any]:
    """Make the options of every command; one that has its own --json keeps it."""
    app = typer.Typer()

    @app.command()
    def command(
        as_json: Annotated[
            bool,
            typer.Option(
                "--json/--no-json",
                help="Print JSON for programs.",
                callback=_set_json,
                expose_value=False,
            ),
        ] = False,
        quiet: Annotated[
            bool,
            typer.Option(
                "-q",
                "--quiet/--no-quiet",
                help="Print no progress and no hints; results, warnings and errors stay.",
                callback=_set_quiet,
                expose_value=False,
                show_default=False,
            ),
        ] = False,
    ) -> None: ...

    return typer.main.get_command(app).params[:2]


def _set_json(wanted: bool) -> None:
    mode.as_json = wanted


def _set_quiet(wanted: bool) -> None:
    notes.quiet = wanted
