"""Sealed folders of a complete cache: which there are, their seals and their arrays."""

from __future__ import annotations

from pathlib import Path

from cache.errors import CacheCorrupt, CacheIncomplete
from cache.layout import Arrays
from cache.manifest import FolderEntry, Manifest, encode_canonical_json
from cache.reading.arrays import ArrayFolder
from cache.reading.file_reads import DiskReads
from cache.remote.mirror import Mirror, MirrorReads
from cache.shard import RECAPTURE_REMEDY, Seal
from cache.shards.entries import PieceIndex
from cache.shards.manifest_pieces import name_piece
from cache.shards.names import (
    DITHER,
    FIRST_TAILS,
    GROUP_FILE,
    LM_HEAD,
    TAIL_MEAN,
    TOKEN_MAP,
    locate_seal,
)

#: The metadata of the Zarr group that holds the shards.
GROUP_METADATA = encode_canonical_json({"attributes": {}, "node_type": "group", "zarr_format": 3})


def open_reads(mirror: Mirror | None) -> DiskReads:
    """Return what counts the reads of a cache, and gets from a bucket what its mirror lacks."""
    return DiskReads() if mirror is None else MirrorReads(mirror)


def list_pieces(index: PieceIndex) -> dict[str, str]:
    """Map the names of the pieces to their sha256."""
    return {name_piece(number): sha256 for number, sha256 in enumerate(index.sha256)}


def read_arrays(
    folder: Path, seal: Seal, arrays: tuple[str, ...], reads: DiskReads | None = None
) -> Arrays:
    """Read arrays of a sealed folder."""
    opened = ArrayFolder(folder, seal, reads=reads)
    return {array: opened.read_array(array) for array in arrays}


def list_sealed_folders(manifest: Manifest) -> dict[str, FolderEntry]:
    """List the sealed folders beside the shards, each with its entry in the manifest."""
    folders = {
        LM_HEAD: manifest.head,
        TOKEN_MAP: manifest.token_map,
        TAIL_MEAN: manifest.tail_mean,
        FIRST_TAILS: manifest.first_tails,
        DITHER: manifest.dither,
    }
    return {name: entry for name, entry in folders.items() if entry.digest}


def read_seal(folder: Path, name: str, digest: str) -> Seal:
    """Read the seal of a folder of arrays; raise unless it is the one that the manifest names."""
    path = folder / locate_seal(name)
    if not (folder / name).is_dir():
        raise CacheIncomplete(
            f"{folder / name} is missing, but the manifest names it.", RECAPTURE_REMEDY
        )
    if not path.is_file():
        raise CacheCorrupt(f"{path} is missing, but the manifest names it.", RECAPTURE_REMEDY)
    seal = Seal.from_bytes(path.read_bytes(), str(path))
    if seal.digest != digest:
        raise CacheCorrupt(f"{path} is not the seal that the manifest names.", RECAPTURE_REMEDY)
    return seal


def check_group(folder: Path) -> list[str]:
    """Return a line if the metadata of the group of shards is missing or damaged."""
    group = folder / GROUP_FILE
    if not group.is_file():
        return [f"{GROUP_FILE}: missing"]
    if group.read_bytes() != GROUP_METADATA:
        return [f"{GROUP_FILE}: content differs from what was written"]
    return []
