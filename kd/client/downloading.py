"""Download a file of a job: resumed after a cut, compared with its digest, whole or not at all."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

from cache.disk import TEMPORARY_PREFIX, hash_file, make_folder, storage_errors, sync_path
from kd.client.errors import Refused, Unreachable
from kd.client.requests import JobRef, Request, locate_job
from kd.client.retrying import Backoff, Retrier

#: An answer that holds the part of the file that was asked for.
PARTIAL_CONTENT = 206
#: The server's ETag of a file: its sha256.
DIGEST = re.compile(r'"([0-9a-f]{64})"')


@dataclass(frozen=True)
class Content:
    """What is known of the file that arrives: its ETag, and its bytes if the server tells them."""

    tag: str = ""
    size: int | None = None


def download(caller: Retrier, job: JobRef, name: str, path: Path) -> Path:
    """Download the artifact ``name`` of a job to the file ``path``; return the path.

    The file appears at once and whole; until then its bytes lie beside it. Raises ``Refused`` if
    the bytes have another sha256 than the server's, and ``StorageError`` if the disk is full.
    """
    url = locate_job(job, "/artifacts/") + quote(name)
    temporary = path.with_name(TEMPORARY_PREFIX + path.name)
    with storage_errors(path.parent):
        make_folder(path.parent)
        try:
            with temporary.open("wb") as file:
                content = _fill(caller, file, url)
                file.flush()
                os.fsync(file.fileno())
            expected = DIGEST.fullmatch(content.tag)
            if expected is not None and (found := hash_file(temporary)) != expected[1]:
                raise Refused(
                    200,
                    f"{name} arrived with the sha256 {found}, but the server has {expected[1]}.",
                    "Download it again.",
                )
            temporary.replace(path)
            sync_path(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
    return path


def _fill(caller: Retrier, file: BinaryIO, url: str) -> Content:
    """Write the whole content at ``url`` into ``file``, in as many requests as it needs."""
    content = Content()
    backoff = Backoff(caller.patience)
    while content.size is None or file.tell() < content.size:
        headers = {"Accept-Encoding": "identity"}
        if content.tag and file.tell():
            headers |= {"Range": f"bytes={file.tell()}-", "If-Range": content.tag}
        try:
            request = Request("GET", url, headers=headers)
            with caller.transport.stream(request) as (answer, pieces):
                if answer.status_code != PARTIAL_CONTENT:
                    # The first part, or the file is another one by now: it comes from its start.
                    file.seek(0)
                    file.truncate()
                    size = answer.headers.get("content-length")
                    tag = answer.headers.get("etag", "")
                    content = Content(tag, None if size is None else int(size))
                for piece in pieces:
                    file.write(piece)
                    backoff.reset()
            if content.size is None:
                return content
        except (Refused, Unreachable) as error:
            time.sleep(backoff.next_pause(error))
    return content
