"""A unigram and a bigram of the training text: the least that a teacher must know better.

They are counted, not trained, and smoothed as Witten and Bell 1991 do:

    p(w)     = (c(w) + T / V) / (C + T)                 T different tokens among C
    p(w | h) = (c(h w) + T(h) p(w)) / (c(h) + T(h))     T(h) different tokens after h

A teacher that predicts a text no better than the bigram has nothing to teach about it.

Shapes: N targets, V vocabulary, P different pairs of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cache.records import Sequences
from cache.shard import PER_SEQUENCE
from cache.store import Cache
from kd.text.batches import Source, list_held_out, read_in_parts

#: The most targets that are counted: the first ones of the training text.
COUNTED_TARGETS = 1 << 22
#: Sequences that are read at once.
_SEQUENCES_AT_ONCE = 256
#: Sequences that are read at once where their records come with them.
_RECORDS_AT_ONCE = 16


@dataclass(frozen=True, eq=False)
class NGrams:
    """The counts of a text, and the losses of other text by them.

    ``pairs_P`` are the codes h V + w of the pairs, sorted, and ``count_P`` how often they occur;
    ``follows_V`` counts the targets after each token, ``kinds_V`` the different ones of them.
    """

    tokens: int
    probability_V: NDArray[np.float64]
    pairs_P: NDArray[np.int64]
    count_P: NDArray[np.int64]
    follows_V: NDArray[np.int64]
    kinds_V: NDArray[np.int64]

    @classmethod
    def of(cls, parts: Iterable[Sequences], vocabulary: int) -> NGrams | None:
        """Count the targets of ``parts``; None if there are none."""
        pairs = [(np.empty(0, np.int64), np.empty(0, np.int64))]
        left = COUNTED_TARGETS
        for part in parts:
            before_N, gold_N = _find_pairs(part)
            pairs.append((before_N[:left], gold_N[:left]))
            left -= len(pairs[-1][1])
            if not left:
                break
        before_N, gold_N = (np.concatenate(each) for each in zip(*pairs, strict=True))
        if not len(gold_N):
            return None
        pairs_P, count_P = np.unique(before_N * vocabulary + gold_N, return_counts=True)
        count_V = np.bincount(gold_N, minlength=vocabulary)
        kinds = np.count_nonzero(count_V)
        return cls(
            tokens=len(gold_N),
            probability_V=(count_V + kinds / vocabulary) / (len(gold_N) + kinds),
            pairs_P=pairs_P,
            count_P=count_P,
            follows_V=np.bincount(before_N, minlength=vocabulary),
            kinds_V=np.bincount(pairs_P // vocabulary, minlength=vocabulary),
        )

    def score_unigram(self, sequences: Sequences) -> NDArray[np.float64]:
        """Compute the unigram's loss on each target of ``sequences`` in nats, (N,)."""
        _, gold_N = _find_pairs(sequences)
        return -np.log(self.probability_V[gold_N])

    def score_bigram(self, sequences: Sequences) -> NDArray[np.float64]:
        """Compute the bigram's loss on each target of ``sequences`` in nats, (N,)."""
        before_N, gold_N = _find_pairs(sequences)
        kinds_N = self.kinds_V[before_N]
        # A token that never had a successor says nothing: only the unigram counts.
        weight_N = np.where(kinds_N, kinds_N, 1)
        pair_N = before_N * len(self.probability_V) + gold_N
        place_N = np.minimum(np.searchsorted(self.pairs_P, pair_N), len(self.pairs_P) - 1)
        counts_N = np.where(self.pairs_P[place_N] == pair_N, self.count_P[place_N], 0)
        seen_N = counts_N + weight_N * self.probability_V[gold_N]
        return -np.log(seen_N / (self.follows_V[before_N] + weight_N))

    def measure_held_out(self, source: Source) -> tuple[float, float] | None:
        """Compute the mean losses of unigram and bigram on the held-out text, in nats."""
        total = np.zeros(2)
        count = 0
        # Few at once: the records are read with them, and those of profile hidden are large.
        for part, _ in read_in_parts(source, list_held_out(source), _RECORDS_AT_ONCE):
            total += self.score_unigram(part).sum(), self.score_bigram(part).sum()
            count += part.positions
        return (float(total[0]) / count, float(total[1]) / count) if count else None


def count_ngrams(source: Source, vocabulary: int) -> NGrams | None:
    """Count the beginning of the training text of ``source``; None if it has no target."""
    if isinstance(source, Cache):
        return NGrams.of(read_stored_tokens(source), vocabulary)
    parts = read_in_parts(source, range(source.train_count), _SEQUENCES_AT_ONCE)
    return NGrams.of((sequences for sequences, _ in parts), vocabulary)


def read_stored_tokens(source: Cache) -> Iterator[Sequences]:
    """Yield the training sequences of each shard, without their records, which are many times as
    large.
    """
    for first in range(0, source.train_count, source.shard_sequences):
        rows = range(first, min(first + source.shard_sequences, source.train_count))
        tokens, starts, targets = source.read_columns(rows, PER_SEQUENCE).values()
        yield Sequences(tokens.astype(np.uint32), starts, targets)


def _find_pairs(sequences: Sequences) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find the targets of ``sequences`` and the token before each, (N,) each."""
    before_N = sequences.tokens[sequences.target_mask].astype(np.int64)
    return before_N, sequences.find_gold_ids().astype(np.int64)
