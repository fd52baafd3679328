"""The objects of a bucket. This is the one module that knows obstore.

Credentials, region and endpoint come only from the environment. Errors name the bucket, the
server's code and a remedy; what the environment keeps secret is taken out of them, because a server
may repeat an access key in its answer.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from cache.errors import StoreError
from cache.remote.address import StoreAddress, read_binding

Found = TypeVar("Found")

#: Names of the environment variables whose values never appear in a message.
_SECRET = re.compile(r"(?i)^aws_.*(key|secret|token|password|credential)")
#: Attempts and seconds of one request. A time-out of the whole is longer than a short outage.
_RETRIES = 8
_RETRY_SECONDS = 120
_REQUEST_SECONDS = 60
#: Objects of one page of a listing, the most that S3 gives.
_PAGE = 1000
#: Seconds between our own attempts of one request: a job outlives most of a minute of throttling.
_PAUSES = (0.1, 0.3, 1.0, 3.0, 6.0, 12.0, 24.0)
#: Of these waits, those that a job makes before it begins.
_PROBES = 5
#: Answers after which the same request may succeed: two requests met, too many came, or the server
#: is at fault.
_PASSING = re.compile(r"^(409|429|5\d\d)$")
_CODE = re.compile(r"<Code>([^<]*)</Code>")
_MESSAGE = re.compile(r"<Message>([^<]*)</Message>")
_STATUS = re.compile(r"status code: (\d{3})")
#: What to do about an error, by the server's code or by words of the message.
_REMEDIES = {
    "NoSuchBucket": "Create the bucket, or correct its name.",
    "AuthorizationHeaderMalformed": "Set AWS_REGION to the region of the bucket.",
    "PermanentRedirect": "Set AWS_REGION to the region of the bucket.",
    "IllegalLocationConstraintException": "Set AWS_REGION to the region of the bucket.",
    # Of an answer that names no code: the server is that of another region.
    "incorrectly configured region": "Set AWS_REGION to the region of the bucket.",
    "ExpiredToken": "The credentials have expired: renew them, then run again.",
    "InvalidAccessKeyId": "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY to a valid key.",
    "SignatureDoesNotMatch": "Set AWS_SECRET_ACCESS_KEY to the secret of AWS_ACCESS_KEY_ID.",
    "AccessDenied": "Let this key get, put, list and delete objects of the bucket.",
    "QuotaExceeded": "The bucket is full: remove caches from it, or raise its quota.",
    "InsufficientStorage": "The bucket is full: remove caches from it, or raise its quota.",
    "SlowDown": "The server refuses so many requests: run again later, or ask for a higher rate.",
}
_REMEDY = (
    "Check the address of the bucket, the network and the credentials with `kd store check URL`. "
    "What was written stays valid; a job can be retried."
)


class StoredObject(NamedTuple):
    """One object in a listing; ``modified`` is in seconds since 1970, by the server's clock.

    ``tag`` names its content, as in ``Tagged``.
    """

    name: str
    bytes: int
    modified: float
    tag: str


class Tagged(NamedTuple):
    """The content of an object, and the tag that names this content in ``replace``."""

    data: bytes
    tag: str


class Bucket:
    """The objects of a bucket below a prefix, by name; threads may share it.

    Every method raises ``StoreError`` if the server does not do what is asked.
    """

    def __init__(self, address: StoreAddress, patient: bool = True, probes: bool = False) -> None:
        """Open the bucket. One that is not ``patient`` gives up soon if nothing answers.

        One that ``probes`` for a job does so after some ten seconds: a server may be busy.
        """
        self.address = address
        self._pauses = _PAUSES if patient else _PAUSES[: _PROBES if probes else 1]
        try:
            import obstore  # an extra
            import obstore.store
        except ImportError:
            raise StoreError(
                "A bucket needs the package obstore, which is not installed.",
                "Run `pip install 'potstill[obstore]'`.",
            ) from None
        self._obstore = obstore
        self._store = self._do(lambda: _open_store(address, patient))

    def get(self, name: str) -> bytes:
        """Return the content of an object; raise ``FileNotFoundError`` if there is none."""
        return self.get_tagged(name).data

    def get_tagged(self, name: str) -> Tagged:
        """Return the content of an object and its tag; raises as ``get`` does."""

        def get() -> Tagged:
            found = self._obstore.get(self._store, name)
            return Tagged(bytes(found.bytes()), str(found.meta["e_tag"]))

        return self._do(get)

    def find_tagged(self, name: str) -> Tagged | None:
        """Return the content of an object and its tag; None if there is none."""
        try:
            return self.get_tagged(name)
        except FileNotFoundError:
            return None

    def put(self, name: str, data: bytes | Path) -> None:
        """Write an object, or replace it; ``data`` may be a file that holds its content."""
        self._do(lambda: self._obstore.put(self._store, name, data))

    def create(self, name: str, data: bytes) -> bool:
        """Write an object if there is none; return False if one exists.

        It may be our own: the answer to an earlier attempt may have got lost.
        """
        return self._put_if(name, data, "create", self._obstore.exceptions.AlreadyExistsError)

    def replace(self, name: str, data: bytes, tag: str) -> bool:
        """Replace the object that has ``tag``; return False if it has another one or is gone."""
        return self._put_if(name, data, {"e_tag": tag}, self._obstore.exceptions.PreconditionError)

    def replace_found(self, name: str, data: bytes, found: Tagged | None) -> bool:
        """Put ``data`` in place of what ``find_tagged`` found; return False if it has changed."""
        if found is None:
            return self.create(name, data)
        return found.data == data or self.replace(name, data, found.tag)

    def _put_if(self, name: str, data: bytes, mode: object, refusal: type[Exception]) -> bool:
        def put() -> bool:
            try:
                self._obstore.put(self._store, name, data, mode=mode)
            except (refusal, FileNotFoundError):
                return False
            return True

        return self._do(put)

    def walk(self, prefix: str) -> Iterator[StoredObject]:
        """Yield the objects whose names begin with the folder ``prefix``, a page at a time."""
        last: str | None = None
        while True:
            page = self._do(partial(self._list_page, prefix, last))
            yield from page
            if len(page) < _PAGE:
                return
            last = page[-1].name

    def _list_page(self, prefix: str, last: str | None) -> list[StoredObject]:
        # A listing that broke cannot go on: its iterator ends as if there were no more objects.
        pages = self._obstore.list(self._store, prefix or None, offset=last, chunk_size=_PAGE)
        return [_describe_object(each) for each in next(iter(pages), [])]

    def find(self, name: str) -> StoredObject:
        """Return what a listing says of one object; raises as ``get`` does."""
        return _describe_object(self._do(lambda: self._obstore.head(self._store, name)))

    def get_part(self, name: str, start: int, stop: int, tag: str | None = None) -> bytes:
        """Return the bytes of an object from ``start`` to before ``stop``; raises as ``get`` does.

        With a ``tag``, ``StoreError`` is raised if the object has another content by now.
        """

        def get() -> bytes:
            options = {"range": (start, stop), **({"if_match": tag} if tag else {})}
            try:
                found = self._obstore.get(self._store, name, options=options)
            except self._obstore.exceptions.PreconditionError:
                found = None
            # A server may ignore the condition.
            if found is None or tag not in (None, found.meta["e_tag"]):
                raise StoreError(
                    f"{self.address}/{name} was replaced while it was read.", "Run the job again."
                )
            return bytes(found.bytes())

        return self._do(get)

    def list_folders(self, prefix: str = "") -> list[str]:
        """List the names of what lies directly below the folder ``prefix`` and is a folder."""
        found = self._do(lambda: self._obstore.list_with_delimiter(self._store, prefix or None))
        return sorted(name.rstrip("/").rpartition("/")[2] for name in found["common_prefixes"])

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; those that are gone already are no error."""
        wanted = list(names)
        for start in range(0, len(wanted), 1000):
            with suppress(FileNotFoundError):
                self._do(partial(self._obstore.delete, self._store, wanted[start : start + 1000]))

    def _do(self, work: Callable[[], Found]) -> Found:
        """Do ``work`` until it succeeds, fails for good, or has failed too often.

        obstore never retries conditional writes: a retry might fail on the object that the first
        try wrote. Our callers recognise their own object, so we retry.
        """
        for pause in self._pauses:
            try:
                return self._try(work)
            except StoreError as error:
                if not error.passing:
                    raise
            time.sleep(pause)
        return self._try(work)

    def _try(self, work: Callable[[], Found]) -> Found:
        try:
            return work()
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                _refuse(self.address, error)
            raise FileNotFoundError(_describe(error)) from None
        except StoreError:
            raise
        except Exception as error:  # obstore's errors share no class with each other
            _refuse(self.address, error)


def open_bucket(address: StoreAddress, patient: bool = True) -> Bucket:
    """Open a bucket once in a process: its connections are kept. A fork opens its own."""
    return _open_bucket(address, patient, os.getpid())


@lru_cache(maxsize=16)
def _open_bucket(address: StoreAddress, patient: bool, _process: int) -> Bucket:
    return Bucket(address, patient)


def find_bucket(root: Path) -> Bucket | None:
    """Return the bucket that the folder ``root`` mirrors; None for a folder of caches."""
    binding = read_binding(root)
    return None if binding is None else open_bucket(binding.address)


def is_stored(folder: Path) -> bool:
    """Return whether the cache of ``folder`` exists, on the disk or in the bucket it mirrors."""
    bucket = find_bucket(folder.parent)
    if bucket is None:
        return folder.is_dir()
    return next(bucket.walk(folder.name), None) is not None


def _open_store(address: StoreAddress, patient: bool) -> Any:
    from obstore import store

    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
    options: dict[str, Any] = {
        "client_options": {"timeout": timedelta(seconds=_REQUEST_SECONDS)},
        "retry_config": {
            "max_retries": _RETRIES if patient else 2,
            "retry_timeout": timedelta(seconds=_RETRY_SECONDS if patient else 10),
        },
        "prefix": address.prefix or None,
    }
    if endpoint:
        options |= {"endpoint": endpoint}
        # The operator has named a server without TLS.
        options["client_options"]["allow_http"] = endpoint.startswith("http://")
    return store.S3Store(address.bucket, **options)


def _describe_object(about: Any) -> StoredObject:
    modified = about["last_modified"].timestamp()
    return StoredObject(about["path"], int(about["size"]), modified, str(about["e_tag"]))


def _refuse(address: StoreAddress, error: Exception) -> NoReturn:
    text = str(error)
    code = next(iter(_CODE.findall(text)), "")
    remedy = _REMEDIES.get(code) or next(
        (remedy for name, remedy in _REMEDIES.items() if name in text), _REMEDY
    )
    status = next(iter(_STATUS.findall(text)), "")
    # A connection that broke has no status.
    passing = bool(_PASSING.match(status)) or (not status and "HTTP error" in text)
    # Not "from error": its text may hold what must not reach a log.
    raise StoreError(f"{address}: {_describe(error)}", remedy, passing) from None


def _describe(error: Exception) -> str:
    """Return the message of an error in one line, without secrets."""
    text = str(error).partition("\n\nDebug source")[0]
    status = next(iter(_STATUS.findall(text)), "")
    code = next(iter(_CODE.findall(text)), "")
    if status and code:
        message = next(iter(_MESSAGE.findall(text)), "")
        text = f"{status} {code}: {message}"
    return hide_secrets(" ".join(text.split())[:500])


def hide_secrets(text: str) -> str:
    """Replace every credential of the environment in ``text``."""
    for name, value in os.environ.items():
        if len(value) >= 4 and _SECRET.match(name):
            text = text.replace(value, f"${name}")
    return text
