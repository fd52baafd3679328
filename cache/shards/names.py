"""The names of a cache's folder and of what it consists of. Imports nothing heavy."""

from __future__ import annotations

import re

#: The name of a cache's folder.
FINGERPRINT = re.compile(r"[0-9a-f]{32}")
#: The file that is written last: with it a cache is complete.
MANIFEST = "manifest.json"
#: Metadata of the Zarr group that holds the shards.
GROUP_FILE = "shards/zarr.json"
#: The folder with the teacher's LM head.
LM_HEAD = "head"
#: The folder with the tokens of all ids.
TOKEN_MAP = "token_map"  # noqa: S105 (no password)
#: The folder with the mean tail of profile threshold.
TAIL_MEAN = "tail_mean"
#: The folder with the tables of the dither.
DITHER = "dither"
#: The folder with the sums of each shard that the mean is made of, until the cache is sealed.
TAIL_SUMS = "tail_sums"
#: The folder with the sums of the lasting shards, for a cache that extends this one.
FIRST_TAILS = "first_tails"


def name_shard(index: int) -> str:
    """Return the folder of a shard."""
    return f"shards/{index:06d}"


def name_tail_sums(index: int) -> str:
    """Return the folder with the sums of the tails of a shard."""
    return f"{TAIL_SUMS}/tails-{index:06d}"


def locate_seal(name: str) -> str:
    """Return the file with the seal of a folder of arrays."""
    room, _, last = name.rpartition("/")
    # The sums of tails are removed together with their seals.
    return f"{TAIL_SUMS if room == TAIL_SUMS else 'seals'}/{last}.json"
