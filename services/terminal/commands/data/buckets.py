"""``kd store``: whether a bucket can hold caches."""

from __future__ import annotations

from typing import Annotated

import typer

from services.terminal.console import out, print_as_json, print_table
from services.terminal.exit_codes import FAILED

app = typer.Typer()
store_app = typer.Typer(no_args_is_help=True, help="Buckets that hold caches.")
app.add_typer(store_app, name="store")


@store_app.command("check")
def store_check(url: Annotated[str, typer.Argument(help="Bucket: s3://bucket/prefix.")]) -> None:
    """Check whether a bucket can hold caches: each property that they need, and its rate.

    Small objects are written and deleted. Credentials, region and endpoint come from the usual
    environment variables. The exit code is 1 if a property is missing.
    """
    from cache.remote.address import StoreAddress, is_bucket
    from cache.remote.bucket import Bucket
    from cache.remote.probe import measure_rate, probe

    if not is_bucket(url):
        detail = f"{url!r} is a folder, which needs no check: give a bucket, s3://bucket/prefix"
        raise typer.BadParameter(detail)
    bucket = Bucket(StoreAddress.parse(url), patient=False)
    found = list(probe(bucket))
    put, got = measure_rate(bucket)
    fit = all(each.holds for each in found)
    properties = [each._asdict() for each in found]
    rates = {"put_bytes": put, "get_bytes": got}
    if not print_as_json({"fit": fit, "properties": properties, **rates}):
        rows = [[each.name, "yes" if each.holds else "NO", each.seen] for each in found]
        print_table(["PROPERTY", "HOLDS", "SEEN"], rows)
        out.print(f"one connection puts {put / 1e6:.3g} MB/s and gets {got / 1e6:.3g} MB/s")
        out.print("It can hold caches." if fit else "It cannot hold caches.")
    raise typer.Exit(0 if fit else FAILED)
