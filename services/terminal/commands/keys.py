"""``kd keys``: create, list and revoke API keys, and set the quotas of teams.

The commands change the key file; the API reads it again when it has changed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.terminal import console

if TYPE_CHECKING:
    from services.store.key_file import ApiKey

keys_app = typer.Typer(no_args_is_help=True, help="API keys of the callers of the service.")
app = typer.Typer()
app.add_typer(keys_app, name="keys")

File = Annotated[
    Path | None, typer.Option("--file", help="The key file. Default: KD_API_KEYS_FILE.")
]
Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="Owner of the key; jobs and caches belong to this name."),
]


@keys_app.command("new")
def keys_new(
    name: Name,
    scopes: Annotated[
        str, typer.Option(help="Scope: read, write or admin; each includes those before it.")
    ] = "write",
    expires: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Time after which the key is refused: 90d, 12h or 26w. Default: never.",
        ),
    ] = None,
    team: Annotated[
        str | None,
        typer.Option(
            help="Team that shares devices and quotas. Default: the team of the name's other "
            "keys, or else a team of its own."
        ),
    ] = None,
    file: File = None,
) -> None:
    """Create a key and print it once; only its digest is kept.

    Several keys with one name belong to the same owner.
    """
    from services.store.key_file import create_key, parse_lifetime

    wanted = [scope.strip() for scope in scopes.split(",")]
    lifetime = None if expires is None else parse_lifetime(expires)
    text, key = create_key(_find_key_file(file), name, wanted, lifetime, team)
    scope = ", ".join(key.scopes)
    settings = console.make_settings()
    console.audit_command(settings, "key.create", key.id, name=name, scopes=scope, team=key.team)
    if console.print_as_json({"key": text, **_describe_key(key)}):
        return
    console.out.print(text, soft_wrap=True)
    console.notes.print(
        f"Key {key.id} of {key.name}, scope {scope}, expires {_format_end(key)}."
        " Keep it: it is not shown again."
    )


@keys_app.command("ls")
def keys_ls(file: File = None) -> None:
    """List the keys that are not revoked, with the time when they expire."""
    from services.store.key_file import read_keys

    keys = read_keys(_find_key_file(file))
    if console.print_as_json([_describe_key(key) for key in keys]):
        return
    rows = []
    for key in keys:
        end = f"{_format_end(key)}{' (expired)' if key.expired else ''}"
        owner = [key.id, key.name, key.team or key.name, ", ".join(key.scopes)]
        rows.append([*owner, console.format_time(key.created_at), end])
    console.print_table(["ID", "NAME", "TEAM", "SCOPES", "CREATED", "EXPIRES"], rows)
    for key in keys:
        if key.expires_soon:
            state = "has expired" if key.expired else f"expires {_format_end(key)}"
            console.err.print(
                f"Key {key.id} of {key.name} {state}: make a new one with `kd keys new {key.name}`,"
                f" then `kd keys revoke {key.id}`."
            )


@keys_app.command("revoke")
def keys_revoke(
    name_or_id: Annotated[
        str,
        typer.Argument(metavar="NAME|ID", help="Id of a key, or a name: all keys of that name."),
    ],
    file: File = None,
) -> None:
    """Revoke a key, or every key of a name, at once; its jobs and caches stay."""
    from services.store.key_file import revoke_keys

    revoked = revoke_keys(_find_key_file(file), name_or_id)
    settings = console.make_settings()
    for key in revoked:
        console.audit_command(settings, "key.revoke", key.id, name=key.name)
    text = "\n".join(f"revoked {key.id} of {key.name}" for key in revoked)
    console.print_result(list(map(_describe_key, revoked)), text)


@keys_app.command("quota")
def keys_quota(
    team: Annotated[str, typer.Argument(metavar="TEAM", help="A team, or a key without one.")],
    device_seconds: Annotated[
        float | None,
        typer.Option(min=1, help="Device-seconds per day (UTC). Default: KD_QUOTA_DEVICE_SECONDS."),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            "--bytes",
            help="Size of its caches and runs, for example 500GiB. Default: KD_QUOTA_BYTES.",
        ),
    ] = None,
    file: File = None,
) -> None:
    """Set the quotas of one team; a quota that you leave out is reset to the settings."""
    from services.store.callers import Quota
    from services.store.key_file import set_quota

    quota = Quota(device_seconds, None if size is None else _parse_size(size))
    set_quota(_find_key_file(file), team, quota)
    facts = {"device_seconds": quota.device_seconds, "bytes": quota.bytes}
    console.audit_command(console.make_settings(), "key.quota", team, **facts)
    words = {"device_seconds": "of device time a day", "bytes": "on the disk"}
    limits = {name: limit for name, limit in facts.items() if limit is not None}
    shown = [f"{console.format_value(limit, name)} {words[name]}" for name, limit in limits.items()]
    text = f"{team}: {', '.join(shown) or 'as the settings say'}"
    console.print_result({"team": team, **facts}, text)


def _parse_size(text: str) -> int:
    from pydantic import Field, TypeAdapter, ValidationError

    from kd.config.section import AS_BYTES

    size = Annotated[int, Field(ge=1), AS_BYTES]
    try:
        found: int = TypeAdapter(size).validate_python(text)
    except ValidationError:
        detail = f"{text!r} is not a size: write 500GiB, or a number of bytes."
        raise typer.BadParameter(detail, param_hint="--bytes") from None
    return found


def _format_end(key: ApiKey) -> str:
    return "never" if key.expires_at is None else console.format_time(key.expires_at.isoformat())


def _describe_key(key: ApiKey) -> dict[str, str | list[str] | None]:
    return {
        "id": key.id,
        "name": key.name,
        "team": key.team or key.name,
        "scopes": list(key.scopes),
        "created_at": key.created_at,
        "expires_at": None if key.expires_at is None else key.expires_at.isoformat(),
    }


def _find_key_file(given: Path | None) -> Path:
    file = given or console.make_settings().api_keys_file
    if file is None:
        detail = "no key file is named: set KD_API_KEYS_FILE, or use --file"
        raise typer.BadParameter(detail, param_hint="--file")
    return file.expanduser()
