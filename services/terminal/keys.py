"""Commands about API keys: ``kd keys``. They work on the file, which the API reads again when it has changed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.terminal.console import AsJson, err, make_settings, moment, out, print_json, table

if TYPE_CHECKING:
    from services.keys import ApiKey

keys_app = typer.Typer(no_args_is_help=True, help="API keys: who may call the service.")
app = typer.Typer()
app.add_typer(keys_app, name="keys")

File = Annotated[Path | None, typer.Option("--file", help="File of the keys. Default: KD_API_KEYS_FILE.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Whose key: jobs and caches belong to this name.")]


@keys_app.command("new")
def keys_new(
    name: Name,
    scopes: Annotated[str, typer.Option(help="read, write or admin; each holds those before it.")] = "write",
    file: File = None,
    as_json: AsJson = False,
) -> None:
    """Make a key and print it, once: only its digest is kept. A second key of a name is the same owner's."""
    from services.keys import new_key

    text, key = new_key(_file(file), name, [scope.strip() for scope in scopes.split(",")])
    if as_json:
        print_json({"key": text, **_shown(key)})
        return
    out.print(text, soft_wrap=True)
    err.print(f"Key {key.id} of {key.name}, scope {', '.join(key.scopes)}. It is not shown again: keep it.")


@keys_app.command("ls")
def keys_ls(file: File = None, as_json: AsJson = False) -> None:
    """List the keys that hold."""
    from services.keys import read_keys

    keys = read_keys(_file(file))
    if as_json:
        print_json([_shown(key) for key in keys])
        return
    rows = [[key.id, key.name, ", ".join(key.scopes), moment(key.created_at)] for key in keys]
    table(["ID", "NAME", "SCOPES", "MADE"], rows)


@keys_app.command("revoke")
def keys_revoke(
    name_or_id: Annotated[str, typer.Argument(metavar="NAME|ID", help="A key's id, or a name: all of its keys.")],
    file: File = None,
    as_json: AsJson = False,
) -> None:
    """End a key, or every key of a name, at once; its jobs and caches stay."""
    from services.keys import revoke

    ended = [_shown(key) for key in revoke(_file(file), name_or_id)]
    if as_json:
        print_json(ended)
    else:
        out.print("\n".join(f"revoked {key['id']} of {key['name']}" for key in ended))


def _shown(key: ApiKey) -> dict[str, str | list[str]]:
    return {"id": key.id, "name": key.name, "scopes": list(key.scopes), "created_at": key.created_at}


def _file(given: Path | None) -> Path:
    file = given or make_settings().api_keys_file
    if file is None:
        raise typer.BadParameter("no file is named: set KD_API_KEYS_FILE, or give --file", param_hint="--file")
    return file.expanduser()
