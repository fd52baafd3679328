"""The digest of packed text: one hash for a short text, a tree for a longer one."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.records import Sequences
from kd.text.corpus import Corpus, open_corpus
from kd.text.stored import digest
from kd.text.stored.digest import PIECE_TOKENS, hash_text
from tests.support.kd.text import config


def make(count: int, length: int, seed: int) -> Sequences:
    rng = np.random.default_rng(seed)
    starts = rng.random((count, length)) < 0.3
    mask = ~np.roll(starts, -1, axis=1) & (rng.random((count, length)) < 0.6)
    mask[:, -1] = False
    return Sequences(rng.integers(0, 2**32, (count, length)).astype(np.uint32), starts, mask)


def hash_flat(*parts: Sequences) -> "hashlib._Hash":
    """Hash every part whole: its shape, its tokens, its boundaries, its mask."""
    found = hashlib.sha256()
    for part in parts:
        found.update(np.array(part.tokens.shape, "<i8").tobytes())
        for array in (part.tokens.astype("<u4"), part.document_start, part.target_mask):
            found.update(array.tobytes())
    return found


def hash_tree(parts: list[Sequences], piece_tokens: int) -> str:
    """Hash the digests of pieces of ``piece_tokens`` tokens, and the counts of each part."""
    root = hashlib.sha256()
    for part in parts:
        root.update(np.array([len(part), part.length, piece_tokens], "<i8").tobytes())
        rows = max(1, piece_tokens // part.length)
        for first in range(0, len(part), rows):
            root.update(hash_flat(part.select(slice(first, first + rows))).digest())
    return root.hexdigest()


@settings(max_examples=60, deadline=None)
@given(
    train=st.integers(0, 40), held_out=st.integers(0, 9), length=st.integers(1, 12),
    piece=st.integers(1, 200), at_once=st.integers(1, 100),
)  # fmt: skip
def test_short_text_has_one_hash_and_longer_text_a_tree(train, held_out, length, piece, at_once):
    parts = [make(train, length, 0), make(held_out, length, 1)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kd.text.stored.packed._TOKENS_AT_ONCE", at_once)
        found = hash_text(parts, piece)
    fits = (train + held_out) * length <= piece
    assert found == (hash_flat(*parts).hexdigest() if fits else hash_tree(parts, piece))


def test_every_bit_changes_the_hash_of_a_tree():
    text = make(12, 8, 0)
    hashes = {hash_text([text, text], 16)}
    for name in ("tokens", "document_start", "target_mask"):
        arrays = {field: getattr(text, field).copy() for field in text.__dataclass_fields__}
        row, column = np.argwhere(text.target_mask)[-1]
        arrays["target_mask"][row, column] = False
        arrays[name].flat[-9 if name == "tokens" else -8] ^= 1
        changed = Sequences(**arrays)
        hashes |= {hash_text([changed, text], 16), hash_text([text, changed], 16)}
    halves = [text.select(slice(6)), text.select(slice(6, None))]
    hashes |= {hash_text(halves, 16), hash_text([text], 16), hash_text([text, text], 24)}
    assert len(hashes) == 10


def test_a_piece_never_changes_its_size():
    """It is part of the fingerprints of caches of long texts."""
    assert PIECE_TOKENS == 67_108_864


def test_a_stored_text_has_the_hash_of_its_sequences(tokenizer, tiny_text, tmp_path, monkeypatch):
    monkeypatch.setattr("kd.text.stored.shard_files.SHARD_TOKENS", 16 * 20)
    stored = open_corpus(config(train=str(tiny_text)), tokenizer, tmp_path, size=2048)
    whole = Corpus(*(part.select(slice(None)) for part in (stored.train, stored.validation)))
    parts = (stored.train, stored.validation)
    assert stored.compute_sha256() == hash_flat(whole.train, whole.validation).hexdigest()
    assert hash_text(parts, 1000) == hash_tree([whole.train, whole.validation], 1000)
    assert digest.hash_text((whole.train, whole.validation), 1000) == hash_text(parts, 1000)
