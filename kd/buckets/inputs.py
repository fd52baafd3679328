"""Text and models that a job names by the URL of a bucket, as files of this disk.

The job keeps its URLs, so that it is the same job on every machine. What needs a file asks here for
its path, and gets a copy (downloads.py). A process sees one version of each address, until a stage
begins with ``begin_downloads``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path

from cache.errors import PotstillError, StoreError
from cache.remote.address import SCHEME, StoreAddress
from cache.remote.bucket import Bucket, StoredObject, open_bucket
from kd.buckets.counting import Report
from kd.buckets.downloads import Downloads, Listing
from kd.buckets.runs import RUNS, StoredRun
from kd.errors import DataError

#: The folder of the copies, in the data folder, and the variable that tells it to processes which
#: this one starts.
DOWNLOADS = "downloads"
FOLDER_VARIABLE = "KD_DOWNLOADS"
#: The operator's setting of their bytes, and what it is unless it is set.
BYTES_VARIABLE = "KD_DOWNLOAD_BYTES"
DOWNLOAD_BYTES = 50 << 30

_looks: ContextVar[bool] = ContextVar("looks_into_buckets", default=True)


def _ignore(line: str) -> None:
    """Drop a line about a download: nobody listens."""


@dataclass
class _SeenVersions:
    """The versions that this process sees and holds, and how it reports what it downloads."""

    listings: dict[str, Listing | PotstillError] = field(default_factory=dict)
    handles: dict[str, int] = field(default_factory=dict)
    report: Report = _ignore


_view = _SeenVersions()


def is_stored_name(name: str) -> bool:
    """Return whether a name in a job is the URL of something in a bucket."""
    return name.startswith(f"{SCHEME}://")


def begin_downloads(home: Path, report: Report = _ignore) -> None:
    """Keep copies below ``home`` from now on, and look anew at what the buckets hold.

    ``report`` gets a line about a download now and then, and may raise to give up.
    """
    os.environ[FOLDER_VARIABLE] = str(home.absolute() / DOWNLOADS)
    for handle in _view.handles.values():
        os.close(handle)
    _view.listings, _view.handles, _view.report = {}, {}, report


def forward_report(line: str) -> None:
    """Pass a line about a download on to whoever began it; may raise to give up."""
    _view.report(line)


@contextmanager
def avoiding_buckets() -> Iterator[None]:
    """In this block no check looks into a bucket: its answer may take too long."""
    token = _looks.set(False)
    try:
        yield
    finally:
        _looks.reset(token)


def may_read_buckets() -> bool:
    """Return whether checks may look into buckets."""
    return _looks.get()


def list_stored(url: str) -> Listing:
    """List the object at ``url``, or else those below it; none where there is nothing.

    Raises ``StoreError`` if the bucket does not answer or refuses access, and ``DataError`` for
    a name of an object that no file can have.
    """
    if url not in _view.listings:
        try:
            _view.listings[url] = _list(url)
        except PotstillError as error:  # a bucket that does not answer is not asked ten times
            _view.listings[url] = error
    found = _view.listings[url]
    if isinstance(found, PotstillError):
        raise found
    return found


def _list(url: str) -> Listing:
    address = StoreAddress.parse(url)
    whole = replace(address, prefix="")
    bucket = open_bucket(whole, patient=False)
    key = address.prefix
    try:
        objects = _list_objects(bucket, key) or _list_results(whole, key)
    except StoreError as error:
        detail = error.detail.replace(f"{whole}:", f"{url}:", 1)
        raise StoreError(detail, error.remedy, error.passing) from None
    for name in objects:
        if any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name:
            detail = f"{url} holds an object whose name no file can have: {name!r}."
            raise DataError(detail, "Rename it, or name the files one by one.")
    return Listing(url, open_bucket(whole), objects)


def _list_objects(bucket: Bucket, key: str) -> dict[str, StoredObject]:
    # A listing first: where it is refused the server says why, and a question for one object has
    # an answer without a body.
    objects = {
        each.name.removeprefix(f"{key}/" if key else ""): each
        for each in bucket.walk(key)
        if not each.name.endswith("/")
    }
    if not objects and key:
        with suppress(FileNotFoundError):
            objects = {key.rpartition("/")[2]: bucket.find(key)}
    return objects


def _list_results(whole: StoreAddress, key: str) -> dict[str, StoredObject]:
    """List what lies at ``.../runs/{id}/...`` by the names that the results of a run have."""
    above, mark, rest = f"/{key}".rpartition(f"/{RUNS}/")
    run, _, inner = rest.partition("/")
    if not mark or not inner:
        return {}
    prefix = f"{above}/{RUNS}".lstrip("/")
    files = StoredRun(open_bucket(replace(whole, prefix=prefix)), run).read_files()
    bucket = open_bucket(whole)
    return {
        name.removeprefix(f"{inner}/"): bucket.find(f"{prefix}/{file.object}")
        for name, file in files.items()
        if name.startswith(f"{inner}/")
    }


def download_files(url: str, names: Sequence[str]) -> Path:
    """Make sure that files of ``list_stored(url)`` are on this disk; return their folder.

    They stay there as long as this process looks at this version. Raises ``StoreError`` if the
    bucket does not give them, and ``StorageError`` if the disk does not take them.
    """
    listing = list_stored(url)
    size = os.environ.get(BYTES_VARIABLE, "")
    # Commands know their data folder as KD_HOME; a stage names its own.
    home = Path(os.environ.get("KD_HOME") or "potstill-data").absolute()
    root = Path(os.environ.get(FOLDER_VARIABLE) or home / DOWNLOADS)
    downloads = Downloads(root, int(size) if size.isdecimal() else DOWNLOAD_BYTES)
    if listing.name not in _view.handles:
        _view.handles[listing.name] = downloads.hold(listing)
    return downloads.download(listing, list(names), _view.report)


def describe_nothing(url: str) -> tuple[str, str]:
    """Say that nothing lies at ``url``, and what to do."""
    return (
        f"nothing lies at {url!r}: there is no object of that name, and none below it.",
        "List the bucket, and correct the name; it is the whole name of an object or of a folder.",
    )
