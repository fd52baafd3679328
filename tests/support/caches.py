"""Small caches of each profile: their identities, the records put in, and the files on disk."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from bench.support.paths import ROOT
from bench.support.small.caches import make_codec, make_identity, make_shard
from cache.disk import list_file_sizes
from cache.manifest import CacheIdentity
from cache.profiles.table import PROFILES
from cache.records import Records, Sequences

#: The vocabulary of the caches.
V = 300


def identity_of(profile: str, *shape: int, **options: Any) -> CacheIdentity:
    """Return the identity of a small cache.

    Profiles that sample get three draws and two ids that are always kept.
    """
    rules = PROFILES[profile]
    sampled: dict[str, Any] = {"always_keep": (5, 7)} if rules.sampled else {}
    if "draws" in rules.options:
        sampled["draws"] = 3
    return make_identity(*shape, codec=make_codec(profile, **sampled | options))


IDENTITIES = {profile: identity_of(profile) for profile in PROFILES}
IDENTITY = make_identity()


def child(code: str, *arguments: object) -> subprocess.Popen:
    """Start Python code in a process that can import this repository."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True
    )


def content(folder: Path) -> dict[str, bytes]:
    """Return the bytes of each file of a folder."""
    return {name: (folder / name).read_bytes() for name in list_file_sizes(folder)}


def flip(path: Path, bit: int) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def in_one_order(records: Records) -> dict[str, np.ndarray]:
    """Return the columns with the entries of each record sorted by id.

    The order of entries within a record has no meaning.
    """
    columns = dict(records.columns)
    for part in {"head", "tail"} & {name[:4] for name in columns}:
        rows = np.repeat(np.arange(len(records)), columns[f"{part}_count"])
        order = np.lexsort((columns[f"{part}_ids"], rows))
        columns |= {
            name: columns[name][order]
            for name in (f"{part}_ids", f"{part}_logprobs", f"{part}_units", f"{part}_k")
            if name in columns
        }
    return columns


def equal(left: tuple[Sequences, Records], right: tuple[Sequences, Records]) -> bool:
    """Whether both have equal arrays of equal types, apart from the order within a record."""
    for mine, theirs in (
        (vars(left[0]), vars(right[0])),
        (in_one_order(left[1]), in_one_order(right[1])),
    ):
        if mine.keys() != theirs.keys():
            return False
        if not all(
            np.array_equal(array, theirs[name]) and array.dtype == theirs[name].dtype
            for name, array in mine.items()
        ):
            return False
    return True


def picked(records: Records, draw: int) -> Records:
    """Return the records with the tails of one draw only, as a reader returns them.

    Records that have one draw already stay as they are.
    """
    tails = {
        name: column[:, draw]
        for name, column in records.columns.items()
        if name in ("tail_ids", "tail_logprobs") and column.ndim == 2
    }
    return Records(records.columns | tails)


def captured(identity: CacheIdentity, draw: int = 0) -> tuple[Sequences, Records]:
    """Return the sequences and records that ``make_cache`` puts into the cache."""
    shards = [make_shard(identity, index) for index in range(identity.shard_count)]
    return Sequences.concatenate(each[0] for each in shards), picked(
        Records.concatenate(each[1] for each in shards), draw
    )


def tiny(profile: str) -> CacheIdentity:
    """Return a cache of one sequence of four tokens: so small that a test can damage each byte."""
    options = {"k": 2} if profile == "topk" else {"draws": 1} if PROFILES[profile].sampled else {}
    return identity_of(profile, 20, 4, 1, 0, **options)
