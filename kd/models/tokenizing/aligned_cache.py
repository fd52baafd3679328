"""A cache whose teacher has another tokenizer, as a source of a student's sequences.

The cache is an ordinary one. Its rows are aligned with the student's tokenizer when they are read
(``kd.models.tokenizing.alignment``). A batch is as wide as its longest row. Columns of its records:

    projected   those of the teacher's records, with one for each target of the student, and
                ``teacher_gold``, the teacher's next token there, -1 where it has no record
    by chunks   ``chunk``, the number of the target's chunk in the batch, -1 for none, and
                ``chunk_logprob``, the teacher's log-probability of that chunk
    both        ``entropy``, unknown where the teacher has no record

Shapes: N targets of the student, R records of the teacher.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from cache.codec import Codec
from cache.inspection import is_gold_known
from cache.layout import Arrays
from cache.reading.file_reads import DiskReads
from cache.records import Records, Sequences, compute_offsets, find_axis
from cache.rounding import KNOWN_STEP, UNKNOWN_ENTROPY
from cache.store import Cache
from kd.errors import ConfigError
from kd.models.tokenizers import hash_tokenizer
from kd.models.tokenizing.alignment import (
    VERSION,
    AlignedRow,
    Aligner,
    AlignmentCounts,
    Ints,
)
from kd.models.tokenizing.pieces import TokenPieces
from kd.models.tokenizing.projection import make_projection
from kd.progress import Notice
from kd.text.batches import Source, list_held_out
from kd.text.tokens import choose_pad_id

#: Tokens of a student's row for each of the teacher's; what is beyond is cut off.
MOST_TOKENS = 2
#: Rows that are aligned to find out whether two tokenizers have boundaries in common, and the share
#: of them that may have none.
SAMPLE_ROWS = 64
MOST_APART = 0.1
#: The width of a batch is a multiple of it.
_STEP = 8


def find_cache(source: Source) -> Cache | None:
    """Find the cache that ``source`` is or aligns; None if it has none."""
    if isinstance(source, AlignedCache):
        return source.store
    return source if isinstance(source, Cache) else None


def require_aligned(
    aligner: Aligner, sequences: Sequences, limit: int, note: Callable[[Notice], None]
) -> None:
    """Align a sample, and note what is left out; raise ``ConfigError`` if too much is apart.

    Rows are cut after ``limit`` tokens of the student.
    """
    counts = AlignmentCounts()
    cut = sum(len(row.ids_P) > limit for row in aligner.align(sequences, counts))
    if counts.apart > MOST_APART * counts.rows:
        raise ConfigError.of_field(
            "/loss/tokenizers",
            f"the tokenizers of teacher and student have no common boundary in {counts.apart} of "
            f"{counts.rows} sampled rows; at most {MOST_APART:.0%} may have none.",
            "Use a student whose tokenizer makes tokens of the same text, or longer rows.",
        )
    apart = "sampled rows in which the tokenizers have no common boundary"
    longer = f"sampled rows with more than {limit} of the student's tokens, cut there"
    lost = "special tokens of the teacher that the student's tokenizer does not have, left out"
    rows = f"of {counts.rows}"
    notices = [
        Notice(apart, counts.apart, rows, "They teach hard labels."),
        Notice(longer, cut, rows, "Use a shorter data.sequence_length."),
        Notice(lost, sum(counts.missing.values()), ", ".join(sorted(counts.missing)[:3])),
    ]
    for notice in notices:
        if notice.count:
            note(notice)


@dataclass(frozen=True, eq=False)
class AlignedCache:
    """The sequences of a cache in the student's tokens, with what its records say of them.

    It is a ``kd.text.batches.Source``. No row has more than ``length`` tokens.
    """

    store: Cache
    aligner: Aligner
    by_chunks: bool
    length: int
    pad_id: int
    fingerprint: str
    train_count: int
    validation_count: int
    shard_sequences: int
    sequence_bytes: int
    #: That of the cache, with V of the student.
    codec: Codec
    disk_reads: DiskReads | None

    @classmethod
    def of(
        cls,
        store: Cache,
        tokenizer: PreTrainedTokenizerBase,
        vocabulary: int,
        by_chunks: bool,
        length: int,
    ) -> AlignedCache:
        """Align ``store`` with a student's ``tokenizer`` of ``vocabulary`` ids.

        ``by_chunks`` compares chunks, else tokens are projected.
        """
        parts = (store.fingerprint, hash_tokenizer(tokenizer), by_chunks, length, VERSION)
        return cls(
            store,
            Aligner.of(TokenPieces.of_cache(store), tokenizer, vocabulary),
            by_chunks,
            length,
            choose_pad_id(tokenizer, vocabulary),
            hashlib.sha256(" ".join(map(str, parts)).encode()).hexdigest(),
            store.train_count,
            store.validation_count,
            store.shard_sequences,
            store.sequence_bytes,
            replace(store.codec, vocabulary_size=vocabulary),
            store.disk_reads,
        )

    def count_held_out(self) -> tuple[int, int, int]:
        """Count the held-out bytes that the teacher has learned, and the student; its targets."""
        sizes = [0, 0]
        targets = 0
        for number in list_held_out(self):
            pair = (self.store.read(np.array([number]))[0], self.read(np.array([number]))[0])
            for side, (part, known) in enumerate(
                zip(pair, (self.aligner.teacher, self.aligner.student), strict=True)
            ):
                ids = part.find_gold_ids().tolist()
                sizes[side] += sum(len(known.bytes_of.get(each, b"")) for each in ids)
            targets += pair[1].positions
        return sizes[0], sizes[1], targets

    def teacher_head(self) -> dict[str, NDArray[Any]]:
        """Return the teacher's LM head, if the records are its hidden states."""
        return self.store.teacher_head()

    def tail_mean(self) -> None:
        """Return None: the mean tail is one of the teacher's tokens."""

    def projection(self) -> Arrays | None:
        """Return how the teacher's tokens become the student's; None if chunks are compared."""
        return None if self.by_chunks else self._projection

    @cached_property
    def _projection(self) -> Arrays:
        return make_projection(self.aligner.teacher, self.aligner.student)

    def read(
        self, indices: np.ndarray, draws: np.ndarray | int = 0
    ) -> tuple[Sequences, Records | None]:
        """Return the sequences of ``indices`` in the student's tokens, and their records."""
        theirs, records = self.store.read(indices, draws)
        rows = [each.cut(self.length) for each in self.aligner.align(theirs, AlignmentCounts())]
        # The record of a token is that of the position before it.
        record_L = np.roll(np.cumsum(theirs.target_mask) - 1, 1).reshape(theirs.tokens.shape)
        make = _make_chunks if self.by_chunks else _take_records
        return self._join(rows), make(rows, record_L, theirs, records)

    def _join(self, rows: list[AlignedRow]) -> Sequences:
        """Join rows to sequences; what is left of a row is a document of padding."""
        widest = max(len(row.ids_P) for row in rows)
        shape = (len(rows), -(-max(widest, 1) // _STEP) * _STEP)
        tokens = np.full(shape, self.pad_id, np.uint32)
        starts, masks = np.zeros(shape, bool), np.zeros(shape, bool)
        for number, row in enumerate(rows):
            count = len(row.ids_P)
            tokens[number, :count] = row.ids_P
            starts[number, :count] = row.starts_P
            starts[number, count : count + 1] = True
            # The position before a target predicts it.
            masks[number, : max(count - 1, 0)] = row.targets_P[1:]
        return Sequences(tokens, starts, masks)


def _make_chunks(
    rows: list[AlignedRow], record_L: Ints, theirs: Sequences, records: Records
) -> Records:
    """Number the chunks of all rows, and sum the teacher's log-probabilities of each."""
    known = records["known"]
    chunks, logprobs = [np.empty(0, np.int64)], [np.empty(0)]
    count = 0
    for row, own_L in zip(rows, record_L, strict=True):
        inside = row.chunk_L >= 0
        terms = known[own_L[inside]]
        chunk_N = row.chunk_P[row.targets_P]
        size = row.chunk_L.max(initial=-1) + 2  # the last one is none
        sums = np.bincount(row.chunk_L[inside], terms[:, 0] * -KNOWN_STEP, minlength=size)
        # An import may lack values.
        lost = np.bincount(row.chunk_L[inside], ~is_gold_known(terms), minlength=size)
        chunks.append(np.where((chunk_N >= 0) & (lost[chunk_N] == 0), chunk_N + count, -1))
        logprobs.append(sums[chunk_N].astype(np.float64))
        count += size
    chunk_N = np.concatenate(chunks)
    # A chunk that is cut off or not known has a number, but no position.
    chunk_N[chunk_N >= 0] = np.unique(chunk_N[chunk_N >= 0], return_inverse=True)[1]
    return Records(
        {
            "entropy": np.full(len(chunk_N), UNKNOWN_ENTROPY, np.uint8),
            "chunk": chunk_N,
            "chunk_logprob": np.concatenate(logprobs),
        }
    )


def _take_records(
    rows: list[AlignedRow], record_L: Ints, theirs: Sequences, records: Records
) -> Records:
    """Take the record of each target; one that has none has no entries and no entropy."""
    firsts = [row.first_P[row.targets_P] for row in rows]
    record_N = np.concatenate([own_L[each] for own_L, each in zip(record_L, firsts, strict=True)])
    gold_N = np.concatenate(
        [own_L[each] for own_L, each in zip(theirs.tokens, firsts, strict=True)]
    )
    none_N = np.concatenate(firsts) < 0
    record_N = np.where(none_N, 0, record_N)
    places = {"position": record_N}
    for axis in ("head", "tail"):
        if (counts := records.columns.get(f"{axis}_count")) is not None:
            counts_N = np.where(none_N, 0, counts[record_N].astype(np.int64))
            shifts_N = compute_offsets(counts)[:-1][record_N] - (np.cumsum(counts_N) - counts_N)
            places[axis] = np.repeat(shifts_N, counts_N) + np.arange(counts_N.sum())
    columns = {name: each[places[find_axis(name)]] for name, each in records.columns.items()}
    for name in ("head_count", "tail_count"):
        if name in columns:
            columns[name][none_N] = 0
    columns["entropy"][none_N] = UNKNOWN_ENTROPY
    return Records(columns | {"teacher_gold": np.where(none_N, -1, gold_N.astype(np.int64))})
