"""Where caches lie: a folder, or a bucket by its URL; and the folder of this disk that shows them.

    a folder      its caches are below it
    s3://b/p      the mirror of the bucket: ``stores/<name>`` in the data folder

A mirror has the layout of a folder of caches. The file ``store.json`` in it names the bucket, so
that a path is all that anyone needs to open a cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from cache.disk import TEMPORARY_PREFIX, make_folder, storage_errors, write_file
from cache.errors import StoreError

#: The file of a mirror that names its bucket.
STORE_FILE = "store.json"
#: The file of a folder of caches with a word that no other folder has.
PLACE_FILE = ".place"
#: Bytes of shards that a mirror keeps unless the operator sets another number.
MIRROR_BYTES = 50 << 30
#: The scheme of a bucket, and those of services that nothing here was tested with.
SCHEME = "s3"
UNTESTED = {"gs": "Google Cloud Storage", "az": "Azure Blob Storage"}
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}")
_PREFIX = re.compile(r"[A-Za-z0-9._=+-]+(/[A-Za-z0-9._=+-]+)*")


@dataclass(frozen=True)
class StoreAddress:
    """The address of a bucket, or of a part of it whose objects begin with ``prefix``."""

    scheme: str
    bucket: str
    prefix: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")

    @classmethod
    def parse(cls, text: str) -> StoreAddress:
        """Parse the URL of a bucket; raise ``StoreError`` that says what is wrong with it.

        The error does not repeat what may be a password.
        """
        parts = urlsplit(text)
        if parts.username or parts.password or parts.query or parts.fragment:
            raise StoreError(
                f"The address of the bucket {parts.hostname} must be scheme://bucket/prefix, "
                "with no user, password, query or fragment.",
                "Give credentials in the environment: see docs/how-to/object-storage.md.",
            )
        if (service := UNTESTED.get(parts.scheme)) is not None:
            raise StoreError(
                f"{text!r} names {service}, with which caches were not tested.",
                "Name a bucket of S3, s3://bucket/prefix, or a folder.",
            )
        prefix = parts.path.strip("/")
        whole = parts.scheme == SCHEME and _BUCKET.fullmatch(parts.netloc)
        if not whole or (prefix and not _PREFIX.fullmatch(prefix)) or ".." in prefix.split("/"):
            raise StoreError(
                f"{text!r} is not the address of a bucket.",
                "Write s3://bucket/prefix, with letters, digits and . _ = + - in the prefix; or "
                "name a folder.",
            )
        return cls(parts.scheme, parts.netloc, prefix)


def is_bucket(store: str) -> bool:
    """Return whether ``store`` is meant as an address, not as a folder."""
    return "://" in store


def locate_caches(home: Path, store: str | None) -> Path:
    """Return the folder that holds the caches of ``store``, or mirrors them.

    Without a store it is ``caches`` in ``home``. Raises ``StoreError`` for a wrong address.
    """
    if store is None:
        return home / "caches"
    if not is_bucket(store):
        return Path(store).expanduser().absolute()
    address = StoreAddress.parse(store)
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", f"{address.scheme}-{address.bucket}-{address.prefix}")
    digest = hashlib.sha256(str(address).encode()).hexdigest()[:8]
    return home / "stores" / f"{readable.strip('-')[:64]}-{digest}"


def bind_caches(home: Path, store: str | None, mirror_bytes: int | None = None) -> Path:
    """Return the folder of ``locate_caches``; a mirror gets the file that names its bucket.

    ``mirror_bytes`` bounds the bytes of shards that the mirror keeps; None leaves the bound as it
    is.
    """
    root = locate_caches(home, store)
    if store is None or not is_bucket(store):
        return root
    bound = read_binding(root)
    if bound is None or mirror_bytes not in (None, bound.mirror_bytes):
        address = StoreAddress.parse(store)
        content = {"store": str(address), "mirror_bytes": mirror_bytes or MIRROR_BYTES}
        with storage_errors(root):
            make_folder(root)
            write_file(root / STORE_FILE, json.dumps(content).encode())
    return root


def name_place(root: Path) -> str:
    """Return a name that only the store of ``root`` has, on whichever host it is seen.

    It is the address of a bucket; for a folder it is a word that is kept in it.
    """
    binding = read_binding(root)
    if binding is not None:
        return str(binding.address)
    path = root / PLACE_FILE
    with storage_errors(root):
        make_folder(root)
        if not path.exists():
            temporary = path.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(4)}")
            temporary.write_text(f"folder-{secrets.token_hex(8)}\n", encoding="ascii")
            try:
                # Not a rename: another host may have been faster.
                with suppress(FileExistsError):
                    os.link(temporary, path)
            finally:
                temporary.unlink()
        return path.read_text(encoding="ascii").strip()


def is_mirror(folder: Path) -> bool:
    """Return whether the cache in ``folder`` lies in a bucket, and ``folder`` only shows it."""
    return (folder.parent / STORE_FILE).is_file()


@dataclass(frozen=True)
class Binding:
    """The content of ``store.json``: the bucket that a folder mirrors, and its bound of bytes."""

    address: StoreAddress
    mirror_bytes: int


def read_binding(root: Path) -> Binding | None:
    """Return the bucket that the folder ``root`` mirrors; None for a folder of caches."""
    try:
        content = json.loads((root / STORE_FILE).read_bytes())
        return Binding(StoreAddress.parse(content["store"]), int(content["mirror_bytes"]))
    except FileNotFoundError:
        return None
    except (ValueError, LookupError, TypeError) as error:
        raise StoreError(
            f"{root / STORE_FILE} cannot be read: {error!r}.",
            "Delete the folder: it holds copies of what is in the bucket.",
        ) from error
