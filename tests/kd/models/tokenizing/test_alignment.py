"""Two tokenizers of one text: chunks are complete and minimal; special tokens are never text."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from cache.records import Sequences
from kd.errors import ModelError
from kd.models.tokenizers import get_vocabulary_size
from kd.models.tokenizing.alignment import AlignedRow, Aligner, AlignmentCounts, make_encoder
from kd.models.tokenizing.pieces import TokenPieces
from tests.support.each import for_each
from tests.support.kd.tokenizers import NOVEL, train_fallback, train_kind

ODD = (
    "  Leading spaces,\ttabs\r\nand\n\n\nlines 1817. "
    "Naïve cafe\u0301, 日本語 한국어 العربية 👩‍👩‍👧 🙂🙂 \u00a0\ufb01ne <|other|> <s> x "
)
TEXTS = (NOVEL[3000:5000], ODD, "x", "日本語", "🙂")


TOKENIZERS: dict[str, Any] = {}


def load(name: str) -> Any:
    if name not in TOKENIZERS:
        own = {"fallback": True, "unprefixed": False}
        TOKENIZERS[name] = train_fallback(own[name]) if name in own else train_kind(name)
    return TOKENIZERS[name]


def make_aligner(teacher: Any, student: Any) -> Aligner:
    pieces = TokenPieces.of_tokenizer(teacher, get_vocabulary_size(teacher))
    return Aligner.of(pieces, student, get_vocabulary_size(student))


def align(aligner: Aligner, ids: list[int], learned: list[bool] | None = None) -> AlignedRow:
    """Align one document; ``learned`` are the tokens that are targets."""
    tokens = np.array([ids], np.uint32)
    starts = np.arange(len(ids))[None] == 0
    mask = np.roll(np.array([learned or [True] * len(ids)]), -1, axis=1)
    mask[0, -1] = False
    (row,) = aligner.align(Sequences(tokens, starts, mask), AlignmentCounts())
    return row


def list_ends(pieces: TokenPieces, ids: Any) -> list[int]:
    """The byte at which each token ends."""
    return np.cumsum([len(pieces.bytes_of[int(each)]) for each in ids]).tolist()


PAIRS = [
    ("SmolLM 2", "Qwen"), ("Qwen", "Llama 3"), ("GPT-4o", "fallback"), ("fallback", "SmolLM 2"),
    ("unprefixed", "DeepSeek"), ("Falcon", "unprefixed"), ("fallback", "unprefixed"),
]  # fmt: skip


@for_each(PAIRS, "-".join)
def test_chunks_are_all_spans_between_common_boundaries(pair: tuple[str, str]) -> None:
    """Found again by comparing every two boundaries, where nothing normalises the text."""
    teacher, student = map(load, pair)
    aligner = make_aligner(teacher, student)
    normalised = "Qwen" in pair
    for text in TEXTS:
        text = text.replace("e\u0301", "e") if normalised else text
        ids = teacher(text, add_special_tokens=False)["input_ids"]
        if len(ids) < 2 or (aligner.teacher.prefixed and text.startswith(" ")):
            continue  # nothing is predicted; or its own rules forget a space
        row = align(aligner, ids)
        own = aligner.encoder.encode(text, add_special_tokens=False).ids
        assert row.ids_P.tolist() == own, "no token is lost, and none comes twice"
        if aligner.teacher.prefixed:
            continue
        theirs = list_ends(aligner.teacher, ids)
        ours = [0 if each < 0 else each for each in list_ends(aligner.student, own)]
        if ours[-1] != theirs[-1]:
            ours = [each - 1 for each in ours]  # the space before the text
        characters = {len(text[:end].encode()) for end in range(len(text) + 1)}
        shared = sorted(set(theirs) & set(ours) & characters)
        # The first chunk has the first token, which nothing predicts.
        assert row.chunk_L.max() + 1 == len(shared) - 1
        for number, (begin, end) in enumerate(itertools.pairwise(shared)):
            ends_L = np.array(theirs)[row.chunk_L == number]
            ends_P = np.array(ours)[row.chunk_P == number]
            assert ends_L[-1] == ends_P[-1] == end and ends_L[0] > begin < ends_P[0]


def test_the_bytes_of_each_chunk_are_equal_on_both_sides() -> None:
    aligner = make_aligner(load("fallback"), load("SmolLM 2"))
    ids = load("fallback")(ODD * 3, add_special_tokens=False)["input_ids"]
    row = align(aligner, ids)
    for number in range(row.chunk_L.max() + 1):
        theirs = [aligner.teacher.bytes_of[ids[at]] for at in np.flatnonzero(row.chunk_L == number)]
        ours = [aligner.student.bytes_of[at] for at in row.ids_P[row.chunk_P == number].tolist()]
        assert b"".join(theirs) == b"".join(ours)


def test_a_character_that_is_split_or_joined_stays_in_one_chunk() -> None:
    aligner = make_aligner(load("SmolLM 2"), load("Qwen"))
    text = "a cafe\u0301 🙂 b"
    ids = load("SmolLM 2")(text, add_special_tokens=False)["input_ids"]
    row = align(aligner, ids)
    for number in range(row.chunk_L.max() + 1):
        places = np.flatnonzero(row.chunk_L == number)
        part = b"".join(aligner.teacher.bytes_of[ids[at]] for at in places).decode()
        assert part and not part.startswith("\u0301")


def test_a_row_that_begins_and_ends_within_a_character_keeps_what_is_whole() -> None:
    teacher = load("SmolLM 2")
    aligner = make_aligner(teacher, load("Llama 3"))
    ids = teacher("🙂 words of text 🙂", add_special_tokens=False)["input_ids"]
    assert len(aligner.teacher.bytes_of[ids[0]]) < 4, "the character is split"
    row = align(aligner, ids[1:-1])
    said = b"".join(aligner.student.bytes_of[each] for each in row.ids_P.tolist()).decode()
    assert said.strip() == "words of text" and row.targets_P.any()
    # The part of a character at the end of a document is in no chunk either.
    cut = np.array([[*ids[1:-1], *ids[1:-1]]], np.uint32)
    places = np.arange(cut.shape[1])[None]
    starts = (places == 0) | (places == len(ids) - 2)
    (row,) = aligner.align(Sequences(cut, starts, ~np.roll(starts, -1, axis=1)), AlignmentCounts())
    assert row.starts_P.sum() == 2
    for number in range(row.chunk_L.max() + 1):
        theirs = [aligner.teacher.bytes_of[each] for each in cut[0][row.chunk_L == number].tolist()]
        ours = [
            aligner.student.bytes_of[each] for each in row.ids_P[row.chunk_P == number].tolist()
        ]
        assert b"".join(theirs) == b"".join(ours)


def test_special_tokens_are_pairs_by_name_or_by_role_and_never_text() -> None:
    teacher, student = load("SmolLM 2"), load("fallback")
    aligner = make_aligner(teacher, student)
    words = teacher("It is so", add_special_tokens=False)["input_ids"]
    mask = teacher.convert_tokens_to_ids("<mask>")
    counts = AlignmentCounts()
    ids = np.array([[*words, mask, *words, teacher.eos_token_id]], np.uint32)
    starts = np.arange(ids.shape[1])[None] == 0
    learned = np.arange(ids.shape[1])[None] < ids.shape[1] - 1
    (row,) = aligner.align(Sequences(ids, starts, learned), counts)
    assert row.ids_P[-1] == student.eos_token_id
    assert row.chunk_P[-1] == row.chunk_L[-1] >= 0 and row.first_P[-1] == ids.shape[1] - 1
    assert counts.missing == {"<mask>": 1}, "a token that the student lacks is left out"
    # Text that only looks like a special token is text.
    row = align(aligner, teacher("a </s> b", add_special_tokens=False)["input_ids"])
    assert student.eos_token_id not in row.ids_P.tolist()
    again = make_aligner(student, teacher)
    row = align(again, student("a <end> b", add_special_tokens=False)["input_ids"])
    assert teacher.eos_token_id not in row.ids_P.tolist()


def test_what_is_not_learned_stays_so_on_both_sides() -> None:
    """The second half is an answer; a token that reaches over the seam is no target."""
    teacher, student = load("SmolLM 2"), load("fallback")
    aligner = make_aligner(teacher, student)
    ids = teacher("What is she? A sister of Anne.", add_special_tokens=False)["input_ids"]
    for seam in range(1, len(ids)):
        row = align(aligner, ids, [at >= seam for at in range(len(ids))])
        assert (row.chunk_L[:seam] == -1).all()
        ends = list_ends(aligner.teacher, ids)
        own = [max(each - 1, 0) for each in list_ends(aligner.student, row.ids_P)]
        begins = [0, *own[:-1]]
        expected = [
            begin >= ends[seam - 1] and end > begin for begin, end in zip(begins, own, strict=True)
        ]
        assert row.targets_P.tolist() == expected


def test_documents_of_a_row_begin_anew_and_padding_is_left_out() -> None:
    teacher = load("SmolLM 2")
    aligner = make_aligner(teacher, load("Qwen"))
    one = teacher("First words", add_special_tokens=False)["input_ids"]
    two = teacher(" and others", add_special_tokens=False)["input_ids"]
    ids = np.array([[*one, *two, 1, 1, 1]], np.uint32)
    starts = np.isin(np.arange(ids.shape[1])[None], [0, len(one), len(one) + len(two)])
    mask = ~np.roll(starts, -1, axis=1) & (np.arange(ids.shape[1])[None] < len(one) + len(two))
    (row,) = aligner.align(Sequences(ids, starts, mask), AlignmentCounts())
    assert row.starts_P.sum() == 2 and not row.targets_P[row.starts_P].any()
    said = b"".join(aligner.student.bytes_of[each] for each in row.ids_P.tolist())
    assert said == b"First words and others"


def test_a_row_that_is_cut_loses_the_chunk_at_its_end() -> None:
    teacher = load("SmolLM 2")
    aligner = make_aligner(teacher, load("fallback"))
    row = align(aligner, teacher(NOVEL[5000:5400], add_special_tokens=False)["input_ids"])
    for length in range(1, 40):
        cut = row.cut(length)
        kept = set(row.chunk_P[:length].tolist()) - set(row.chunk_P[length:].tolist()) - {-1}
        assert set(cut.chunk_P.tolist()) - {-1} == kept == set(cut.chunk_L.tolist()) - {-1}


def test_a_tokenizer_without_bytes_or_places_is_refused() -> None:
    words = load("BERT cased")
    with pytest.raises(ModelError, match="do not tell their bytes"):
        TokenPieces.of_tokenizer(words, get_vocabulary_size(words))

    # A large vocabulary of words has the letters of all bytes, too.
    letters = [*pre_tokenizers.ByteLevel.alphabet(), *(f"##{a}{b}" for a in "aeiou" for b in "stn")]
    with pytest.raises(ModelError, match="do not tell their bytes"):
        TokenPieces.of_names(dict(enumerate(letters)), len(letters), {})
    alone = dict(enumerate(letters[:256]))
    assert TokenPieces.of_names(alone, 256, {}).id_of.keys() == {
        bytes([byte]) for byte in range(256)
    }

    class Slow:
        """A tokenizer that Python computes."""

    with pytest.raises(ModelError, match=r"Slow does not tell where .* Save it as a fast"):
        make_encoder(Slow())  # type: ignore[arg-type]
