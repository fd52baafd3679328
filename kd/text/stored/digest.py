"""The digest of packed text: the data's part in the fingerprint of a cache.

Text that fits one piece has one sha256. A longer text has a tree: the digest of each piece, and a
digest of those with the counts. Pieces are hashed side by side, and none of them is in memory as a
whole.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kd.text.stored.packed import PackedText, iterate

#: Tokens of a piece. It is part of the digest of a longer text, so that it never changes.
PIECE_TOKENS = 1 << 26


def hash_text(parts: Sequence[PackedText], piece_tokens: int = PIECE_TOKENS) -> str:
    """Return the hash of every token, boundary and mask bit of ``parts``, in order."""
    if sum(len(part) * part.length for part in parts) <= piece_tokens:
        return _hash_runs((part, range(len(part))) for part in parts).hex()
    root = hashlib.sha256()
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for part in parts:
            root.update(np.asarray([len(part), part.length, piece_tokens], np.int64).tobytes())
            rows = max(piece_tokens // part.length, 1)
            cuts = [range(len(part))[first : first + rows] for first in range(0, len(part), rows)]
            for digest in threads.map(_hash_runs, ([(part, cut)] for cut in cuts)):
                root.update(digest)
    return root.hexdigest()


def _hash_runs(runs: Iterable[tuple[PackedText, range]]) -> bytes:
    """Hash each run of sequences: its shape, all its tokens, then its boundaries, then its mask."""
    digest = hashlib.sha256()
    for part, rows in runs:
        digest.update(np.asarray([len(rows), part.length], np.int64).tobytes())
        for name in ("tokens", "document_start", "target_mask"):
            for sequences in iterate(part, rows):
                array = getattr(sequences, name)
                plain = array.astype("<u4", copy=False) if name == "tokens" else array
                digest.update(np.ascontiguousarray(plain).data)
    return digest.digest()
