"""``kd push`` and ``kd pull``: students and caches to a Hugging Face hub, and from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.terminal.console import Home, audit_command, make_settings, notes, print_summary

if TYPE_CHECKING:
    from services.settings import Settings

app = typer.Typer()

Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A run (folder, beginning of its name, or `last`), the folder of a student or of a "
        "cache, or the beginning of a cache's fingerprint.",
    ),
]
RepositoryName = Annotated[
    str,
    typer.Argument(metavar="REPOSITORY", help="Name of the repository: owner/name. Or a folder."),
]


@app.command()
def push(
    source: Source,
    repository: RepositoryName,
    revision: Annotated[
        str | None,
        typer.Option(help="Branch to push to; created if it does not exist. Default: main."),
    ] = None,
    private: Annotated[
        bool | None,
        typer.Option(
            help="A new repository is private, unless you give --no-private. --private also "
            "refuses a repository that is public."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="Only list the files; nothing is sent.")] = False,
    home: Home = None,
) -> None:
    """Push a student or a cache to the Hugging Face hub, with its card.

    A name that begins with / or ./ is a new folder, which gets the same files. If a push is
    interrupted, the same command continues it. HF_ENDPOINT is the address of another hub. The token
    is HF_TOKEN, or the one that `hf auth login` stored.
    """
    from kd.exchange.hub.pushing import push as push_folder
    from kd.exchange.hub.pushing import push_to_folder

    settings = make_settings(home=home)
    folder = find_source(source, settings)
    target = Path(repository) if repository.startswith(("/", "./", "../")) else None
    if dry_run or target is not None:
        print_summary(push_to_folder(folder, None if dry_run else target))
        return
    summary = push_folder(folder, repository, revision, private, _get_teller())
    action = "cache.push" if summary["type"] == "dataset" else "student.push"
    audit_command(settings, action, folder.name, to=summary["url"])
    print_summary(summary)


@app.command()
def pull(
    repository: RepositoryName,
    type: Annotated[
        str | None,
        typer.Option(
            metavar="model|dataset",
            help="Students are models, caches are datasets. Default: what the hub has.",
        ),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit. Default: main.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="New folder for a student, or the folder of caches. Default: a folder with the "
            "repository's name here, or the caches of KD_HOME."
        ),
    ] = None,
    home: Home = None,
) -> None:
    """Pull a student or a cache from the Hugging Face hub, and compare every byte.

    If a pull is interrupted, the same command continues it. You can train from a pulled cache at
    once.
    """
    from kd.exchange.hub.pulling import pull as pull_repository

    if type not in (None, "model", "dataset"):
        raise typer.BadParameter(f"{type!r} is not model or dataset", param_hint="--type")
    settings = make_settings(home=home)
    tell = _get_teller()
    summary = pull_repository(repository, type, revision, out, settings.caches, tell)  # type: ignore[arg-type]
    print_summary(summary)


def find_source(name: str, settings: Settings) -> Path:
    """Find the folder of the student or cache that ``name`` means.

    A path takes precedence, then a run, then a cache. Raises ``HubError`` where there is none, and
    ``ModelError`` for a run without a student.
    """
    from cache.errors import CacheNotFound
    from cache.operations import find_cache
    from kd.errors import HubError, ModelError
    from kd.files import MARK, find_run

    path = Path(name)
    found = path if path.is_dir() else find_run(name, settings.runs)
    if found is not None:
        if (found / "student").is_dir():
            return (found / "student").absolute()
        if found != path or (found / MARK).exists():
            remedy = "Name a run whose training has finished."
            raise ModelError(f"the run {found} has no student.", remedy)
        return found.absolute()
    try:
        return find_cache(settings.caches, name).absolute()
    except CacheNotFound as error:
        detail = f"{name!r} is neither a folder, nor a run, nor a single cache in {settings.home}."
        remedy = "`kd cache ls` lists caches; the runs are the folders in runs of KD_HOME."
        raise HubError(detail, remedy) from error


def _get_teller() -> Callable[[str], None]:
    """Return what prints a note before each long step."""
    from kd.exchange.hub.repository import hide_bars

    if notes.quiet:
        hide_bars()
    return notes.print
