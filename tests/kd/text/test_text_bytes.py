"""Bytes of the held-out text, from which bits per byte are computed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cache.records import Sequences
from kd.config.jobfile import parse_config
from kd.text.batches import PlainText
from kd.text.corpus import Corpus
from kd.text.packing import Document, pack_documents
from kd.text.text_bytes import compute_bits_per_byte, count_held_out_bytes, count_target_bytes

TEXTS = [
    "It is a truth universally acknowledged,",
    "Straße und Café — naïve 🙂 text.",
    "Anne Elliot\nwas nobody. " * 6,
]


def data_config(length: int = 16, packing: bool = True) -> Any:
    data = {"train": "x", "sequence_length": length, "packing": packing}
    return parse_config({"kind": "precompute", "teacher": {"model": "t"}, "data": data}).data


def ids_of(tokenizer: Any, text: str) -> NDArray[np.uint32]:
    return np.array([*tokenizer(text)["input_ids"], tokenizer.eos_token_id], np.uint32)


def first_bytes(tokenizer: Any, text: str) -> int:
    return len(tokenizer.decode(tokenizer(text)["input_ids"][:1]).encode())


def test_a_document_counts_all_its_bytes_but_those_of_its_first_token(tokenizer: Any) -> None:
    """The first token is no target; the end of text is one, and has no bytes."""
    whole = pack_documents(
        [Document(ids_of(tokenizer, text)) for text in TEXTS], data_config(128, packing=False)
    )
    expected = sum(len(text.encode()) - first_bytes(tokenizer, text) for text in TEXTS)
    assert count_target_bytes(whole, tokenizer) == expected
    assert len(TEXTS[1].encode()) > len(TEXTS[1]), "bytes, not characters"


def test_documents_packed_and_cut_count_the_bytes_of_their_targets(tokenizer: Any) -> None:
    """In English text each character has one byte and is in one token: targets share no byte."""
    texts = [TEXTS[0], TEXTS[2]]
    packed = pack_documents([Document(ids_of(tokenizer, text)) for text in texts], data_config(16))
    assert len(packed) > 2 and packed.document_start[:, 1:].any()
    special = set(tokenizer.all_special_ids)
    expected = sum(
        len(tokenizer.decode([token]))
        for token in packed.find_gold_ids().tolist()
        if token not in special
    )
    assert count_target_bytes(packed, tokenizer) == expected


def test_only_targets_count(tokenizer: Any) -> None:
    """In chats only the answers count, and each is decoded after its prompt."""
    parts = ["What is it? ", "A truth.", " Whose? ", "Nobody's."]
    ids = [tokenizer(part)["input_ids"] for part in parts]
    tokens = np.concatenate(ids).astype(np.uint32)[None]
    trained = np.concatenate(
        [np.full(len(part), number % 2 == 1) for number, part in enumerate(ids)]
    )
    target = np.zeros_like(tokens, dtype=bool)
    target[0, :-1] = trained[1:]
    start = np.zeros_like(target)
    start[0, 0] = True
    sequences = Sequences(tokens, start, target)
    assert count_target_bytes(sequences, tokenizer) == len(parts[1].encode()) + len(
        parts[3].encode()
    )
    assert count_target_bytes(sequences.select(slice(0, 0)), tokenizer) == 0


def test_the_held_out_text_is_counted_and_not_the_training_text(
    tokenizer: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("kd.text.text_bytes._SEQUENCES_AT_ONCE", 2)
    train = pack_documents([Document(ids_of(tokenizer, TEXTS[0]))], data_config(8))
    held_out = pack_documents([Document(ids_of(tokenizer, TEXTS[2]))], data_config(8))
    assert len(held_out) > 4
    assert (
        count_held_out_bytes(PlainText(Corpus(train, held_out)), tokenizer)
        == count_target_bytes(held_out, tokenizer)
        > 0
    )


def test_bits_per_byte() -> None:
    """A uniform model over 256 bytes needs eight bits per byte, with any tokenizer."""
    assert compute_bits_per_byte(math.log(256), 10, 10) == pytest.approx(8.0)
    assert compute_bits_per_byte(3 * math.log(256), 10, 30) == pytest.approx(8.0)
    assert compute_bits_per_byte(1.0, 10, 0) is None
