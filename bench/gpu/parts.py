"""A file in parts, for a machine that takes only so many bytes at once.

A part is called FILE.DIGEST.K-of-N, so that each tells what it belongs to.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from cache.disk import make_folder, write_file
from kd.errors import DataError

#: Digits of the SHA-256 of the whole file in the name of each part.
DIGITS = 16
NAME = re.compile(
    rf"(?P<file>.+)\.(?P<digest>[0-9a-f]{{{DIGITS}}})\.(?P<part>\d+)-of-(?P<count>\d+)"
)


def split_file(path: Path, folder: Path, count: int) -> list[Path]:
    """Write ``path`` into ``count`` parts of nearly equal size in ``folder``; return them."""
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()[:DIGITS]
    size = -(-len(content) // count)
    make_folder(folder)
    parts = []
    for part in range(count):
        parts.append(folder / f"{path.name}.{digest}.{part + 1}-of-{count}")
        write_file(parts[-1], content[part * size : (part + 1) * size])
    return parts


def join_parts(folder: Path) -> Path:
    """Write the whole file beside its parts; return its path.

    Raises ``DataError`` where parts are missing, or are of another file.
    """
    found = [
        match for path in sorted(folder.glob("*-of-*")) if (match := NAME.fullmatch(path.name))
    ]
    whole = {(match["file"], match["digest"], int(match["count"])) for match in found}
    if len(whole) != 1:
        raise DataError(
            f"{folder} holds the parts of {len(whole)} files, but must hold those of one.",
            "Write the parts with --split, and copy all of them into one empty folder.",
        )
    ((name, digest, count),) = whole
    by_number = {int(match["part"]): folder / match.string for match in found}
    if missing := sorted(set(range(1, count + 1)) - set(by_number)):
        raise DataError(
            f"{folder} has {len(by_number)} of the {count} parts of {name}; missing: "
            f"{', '.join(map(str, missing))}.",
            "Copy them there, too.",
        )
    content = b"".join(by_number[number].read_bytes() for number in range(1, count + 1))
    if hashlib.sha256(content).hexdigest()[:DIGITS] != digest:
        raise DataError(
            f"The parts of {name} in {folder} were changed on the way: their SHA-256 does not "
            f"begin with {digest}.",
            "Write the parts anew with --split, and copy them again.",
        )
    write_file(folder / name, content)
    return folder / name
