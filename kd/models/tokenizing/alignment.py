"""The tokens of one tokenizer beside those that another one makes of the same text.

A text is encoded once by each. A boundary is a byte at which a token ends and the next one begins;
the span between two boundaries that follow each other among those of both sides is a chunk: it is
minimal, and each token is in one of them. Tokens that split a character have no boundary within it.
Special tokens are pairs by their names, never text, and a text ends at each.

    teacher   |Sir| Walter| El|liot|        chunks: Sir, Walter, Elliot; the second token of the
    student   |Sir| Wal|ter| Elliot|        student begins at no boundary of the teacher

All of a row is laid out in units: a byte of text is one, and so is a special token.

Shapes: L tokens of a row of the teacher, P of the student; U units; K student tokens of one text,
C its characters; S boundaries of both sides.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from cache.records import Sequences
from kd.errors import ModelError
from kd.models.tokenizing.pieces import TokenPieces

#: The version of the rules here: what is read by other rules has another fingerprint.
VERSION = 1
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


def make_encoder(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """Copy the tokenizer that turns text into tokens, without what adds or knows special ones.

    Raises ``ModelError`` for one that does not tell where in the text its tokens are.
    """
    library = getattr(tokenizer, "backend_tokenizer", None)
    if library is None:
        raise ModelError(
            f"{type(tokenizer).__name__} does not tell where in a text its tokens are.",
            "Save it as a fast tokenizer: it needs a tokenizer.json.",
        )
    content = json.loads(library.to_str())
    content |= {"post_processor": None, "truncation": None, "padding": None}
    special, added = {*tokenizer.all_special_ids}, content["added_tokens"]
    kept = [each for each in added if not each["special"] and each["id"] not in special]
    return Tokenizer.from_str(json.dumps(content | {"added_tokens": kept}))


@dataclass
class AlignmentCounts:
    """Rows with targets, and those of them that have no chunk of targets."""

    rows: int = 0
    apart: int = 0
    #: Special tokens of the teacher that the student does not have, by name.
    missing: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class AlignedRow:
    """The student's tokens of one row of the teacher, in the same order.

    ``chunk_P`` is the number of the chunk that a token is in, ``targets_P`` whether the student
    learns it: where all of it is text that the teacher has learned. ``first_P`` is the teacher's
    token that begins where it begins, -1 if none does. ``chunk_L`` are the chunks of the teacher's
    tokens. A chunk has a number if all its tokens are targets, on both sides; otherwise it is -1.
    """

    ids_P: Ints
    starts_P: Flags
    targets_P: Flags
    chunk_P: Ints
    first_P: Ints
    chunk_L: Ints

    def cut(self, length: int) -> AlignedRow:
        """Keep the first ``length`` tokens; the chunk that is cut is none."""
        lost = np.unique(self.chunk_P[length:])
        chunk_P, chunk_L = (
            np.where(np.isin(each, lost), -1, each) for each in (self.chunk_P, self.chunk_L)
        )
        part = slice(length)
        flags = self.starts_P[part], self.targets_P[part]
        return AlignedRow(self.ids_P[part], *flags, chunk_P[part], self.first_P[part], chunk_L)


class _Run(NamedTuple):
    """The student's tokens of a text or for a special token.

    ``clean`` tells where a token ends with a boundary, ``begins`` whether a document begins here.
    """

    ids: Ints
    spans: Ints
    clean: Flags
    unit: int
    begins: bool = False


@dataclass(frozen=True, eq=False)
class Aligner:
    """Aligns rows of a teacher's tokens with those of a student's tokenizer."""

    teacher: TokenPieces
    student: TokenPieces
    encoder: Tokenizer

    @classmethod
    def of(
        cls, teacher: TokenPieces, tokenizer: PreTrainedTokenizerBase, vocabulary: int
    ) -> Aligner:
        """Align with a student's ``tokenizer`` of ``vocabulary`` ids.

        Raises ``ModelError`` if it does not tell the bytes of its tokens or their places in a text.
        """
        student = TokenPieces.of_tokenizer(tokenizer, vocabulary)
        return cls(teacher, student, make_encoder(tokenizer))

    def align(self, sequences: Sequences, counts: AlignmentCounts) -> list[AlignedRow]:
        """Align each row of ``sequences``; ``counts`` grow."""
        return [self._align_row(*row, counts) for row in zip(*sequences.arrays, strict=True)]

    def _align_row(
        self, tokens_L: NDArray[np.uint32], start_L: Flags, mask_L: Flags, counts: AlignmentCounts
    ) -> AlignedRow:
        """Align the documents of a row; one without targets, as padding is, is left out."""
        target_L = np.concatenate([[False], mask_L[:-1]])
        runs: list[_Run] = []
        widths: list[int] = []
        cuts = np.flatnonzero(start_L).tolist()
        for begin, end in itertools.pairwise([*cuts, len(tokens_L)]):
            ids = tokens_L[begin:end].tolist()
            if target_L[begin:end].any():
                first, *rest = self._lay_out(ids, widths, counts)
                runs += [first._replace(begins=True), *rest]
            else:
                widths += [0] * len(ids)
        found = _compare(np.array(widths, np.int64), target_L, runs)
        counts.rows += bool(target_L.any())
        counts.apart += bool(target_L.any() and (found.chunk_L < 0).all())
        return found

    def _lay_out(self, ids: list[int], widths: list[int], counts: AlignmentCounts) -> list[_Run]:
        """Return the runs of a document, at least one; ``widths`` grow by the teacher's tokens."""
        runs: list[_Run] = []
        ordinary = self.teacher.bytes_of
        prefixed = self.teacher.prefixed
        for is_text, group in itertools.groupby(ids, ordinary.__contains__):
            unit = sum(widths)
            if not is_text:
                special = [self._pair(each, at, counts) for at, each in enumerate(group, unit)]
                widths += [1] * len(special)
                runs += special
                continue
            pieces = [ordinary[number] for number in group]
            if prefixed and pieces[0].startswith(b" "):
                pieces[0] = pieces[0][1:]
            prefixed = False
            widths += map(len, pieces)
            runs.append(self._encode(b"".join(pieces), unit))
        return runs

    def _pair(self, number: int, unit: int, counts: AlignmentCounts) -> _Run:
        """Return the student's token for a special one; empty for one that it lacks."""
        known = number in self.teacher.special
        found = self.teacher.find_special(number, self.student) if known else None
        if found is not None:
            return _Run(np.array([found]), np.array([[0, 1]]), np.array([True]), unit)
        name = self.teacher.special.get(number, f"<{number}>")
        counts.missing[name] = counts.missing.get(name, 0) + 1
        return _make_empty(unit)

    def _encode(self, data: bytes, unit: int) -> _Run:
        """Encode a text; the span of a token is that of the characters of which it has a part."""
        # A row may begin and end within a character. Bytes in the middle that are none are no text.
        lead = next((at for at in range(len(data)) if data[at] & 0xC0 != 0x80), len(data))
        text = data[lead:].decode(errors="ignore")
        if not text or not data[lead:].startswith(text.encode()):
            return _make_empty(unit)
        found = self.encoder.encode(text, add_special_tokens=False)
        spans_K2 = np.array(found.offsets, np.int64).reshape(-1, 2)
        # A mark before the text, which has no character of it, is a part of the token after it.
        is_mark_K = np.maximum.accumulate(spans_K2[:, 1]) == 0
        spans_K2[is_mark_K] = spans_K2[np.argmin(is_mark_K)]
        ends_K = np.maximum.accumulate(spans_K2[:, 1])
        nexts_K = np.append(spans_K2[1:, 0], len(text))
        # A character that a normaliser has joined to the one before it is in no span.
        for at in np.flatnonzero(nexts_K > ends_K):
            if not text[ends_K[at]].isspace():
                spans_K2[at, 1] = ends_K[at] = nexts_K[at]
        clean_K = nexts_K >= ends_K
        codes_C = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        widths_C = 1 + (codes_C > 0x7F) + (codes_C > 0x7FF) + (codes_C > 0xFFFF)
        units_C = np.concatenate([[0], np.cumsum(widths_C)])
        return _Run(np.array(found.ids, np.int64), units_C[spans_K2], clean_K, unit + lead)


def _make_empty(unit: int) -> _Run:
    none = np.empty(0, np.int64)
    return _Run(none, none.reshape(0, 2), none.astype(bool), unit)


def _compare(widths_L: Ints, target_L: Flags, runs: list[_Run]) -> AlignedRow:
    """Find the chunks of a row, and what each of the student's tokens is."""
    runs = [_make_empty(0), *runs]
    ids_P = np.concatenate([run.ids for run in runs])
    spans_P2 = np.concatenate([run.spans + run.unit for run in runs])
    ends_L = np.cumsum(widths_L)
    ends_P = np.maximum.accumulate(spans_P2[:, 1])
    counts = np.cumsum([0, *(len(run.ids) for run in runs[:-1])])
    starts_P = np.isin(np.arange(len(ids_P)), counts[[run.begins for run in runs]])
    covered_U = np.concatenate([[0], np.cumsum(np.repeat(target_L, widths_L))])
    sizes_P = spans_P2[:, 1] - spans_P2[:, 0]
    learned_P = covered_U[spans_P2[:, 1]] - covered_U[spans_P2[:, 0]]
    # The first token of a document is not predicted.
    targets_P = (learned_P == sizes_P) & (sizes_P > 0) & ~starts_P
    ends = ends_P[np.concatenate([run.clean for run in runs])]
    ours = np.concatenate([[run.unit for run in runs], ends])
    shared_S = np.intersect1d(np.concatenate([[0], ends_L]), ours)
    at_L, at_P = (np.searchsorted(each, shared_S, side="right") for each in (ends_L, ends_P))
    some = (np.diff(at_L) > 0) & (np.diff(at_P) > 0)
    spans = [(at[:-1][some], at[1:][some]) for at in (at_L, at_P)]
    (begin_L, _), (begin_P, _) = spans
    first_P = np.full(len(ids_P), -1, np.int64)
    predicted = target_L[begin_L] & targets_P[begin_P]
    first_P[begin_P[predicted]] = begin_L[predicted]
    whole = _are_all(target_L, *spans[0]) & _are_all(targets_P, *spans[1])
    # A text that ends within a character ends before the teacher's last token does.
    whole &= ends_P[spans[1][1] - 1] == shared_S[1:][some]
    numbers = np.where(whole, np.cumsum(whole) - 1, -1)
    chunk_L, chunk_P = (
        _spread(numbers, *span, len(each))
        for span, each in zip(spans, (widths_L, ids_P), strict=True)
    )
    return AlignedRow(ids_P, starts_P, targets_P, chunk_P, first_P, chunk_L)


def _are_all(true_K: Flags, begin_S: Ints, end_S: Ints) -> Flags:
    """Find the spans in which all are True."""
    false_K = np.concatenate([[0], np.cumsum(~true_K)])
    found: Flags = false_K[begin_S] == false_K[end_S]
    return found


def _spread(numbers_S: Ints, begin_S: Ints, end_S: Ints, length: int) -> Ints:
    """Give each place of the spans the number of its span, and -1 to all others."""
    change = np.zeros(length + 1, np.int64)
    np.add.at(change, begin_S, numbers_S + 1)
    np.add.at(change, end_S, -numbers_S - 1)
    return np.cumsum(change)[:-1] - 1
