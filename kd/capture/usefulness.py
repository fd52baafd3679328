"""Does the teacher know this text? Its losses on the held-out text beside those of n-grams.

A capture may take days, and a teacher of another domain, a broken tokenizer or a wrong revision
shows only in the student. So the shards with held-out text are captured first, and the teacher is
compared with a bigram that was counted from the training text (``kd.text.ngrams``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import add

from cache.inspection import is_gold_known, sum_gold_losses
from cache.perplexity import BlockLosses, raise_e
from cache.records import Records, Sequences
from kd.capture.plan import CapturePlan
from kd.text.ngrams import NGrams
from kd.text.stored.packed import iterate


@dataclass(frozen=True)
class HeldOutLosses:
    """Losses on the same held-out targets: the teacher's, a unigram's and a bigram's."""

    teacher: BlockLosses = field(default_factory=BlockLosses.none)
    unigram: BlockLosses = field(default_factory=BlockLosses.none)
    bigram: BlockLosses = field(default_factory=BlockLosses.none)

    @classmethod
    def of(cls, sequences: Sequences, records: Records, ngrams: NGrams) -> HeldOutLosses:
        """Sum the losses on ``sequences``, whose records are ``records``."""
        targets_S = sequences.target_mask.sum(axis=1)
        known_NK = records["known"]
        known_N = is_gold_known(known_NK)
        return cls(
            sum_gold_losses(known_NK, targets_S),
            BlockLosses.of(ngrams.score_unigram(sequences), targets_S, known_N),
            BlockLosses.of(ngrams.score_bigram(sequences), targets_S, known_N),
        )

    def __add__(self, other: HeldOutLosses) -> HeldOutLosses:
        return HeldOutLosses(*map(add, vars(self).values(), vars(other).values()))

    @property
    def is_teacher_worse(self) -> bool:
        """True if the teacher is worse than the bigram, beyond the noise of so short a text."""
        difference = self.teacher - self.bigram
        if difference.mean is None or difference.mean <= 0:
            return False
        return difference.interval is None or difference.interval.low > 0


def describe_useless_teacher(teacher: str, unigram: float, bigram: float) -> str:
    """Say that a teacher is worse than the bigram; ``teacher`` is its perplexity as text."""
    return (
        f"The teacher does not know this text: its held-out perplexity is {teacher}, and that of a "
        f"bigram counted from the training text is {bigram:,.2f} (of a unigram {unigram:,.2f}). A "
        "student will learn little from it. Check the teacher's weights and revision, use another "
        "teacher, or give text that is more like its training text."
    )


class HeldOutWatch:
    """Compares the teacher with n-grams as soon as the held-out text of a capture is recorded."""

    def __init__(self, plan: CapturePlan) -> None:
        self._plan = plan
        self._losses = HeldOutLosses()
        self._ngrams: NGrams | None = None

    def holds_out(self, index: int) -> bool:
        """Return whether shard ``index`` has held-out sequences."""
        return self._plan.identity.shard_range(index).stop > len(self._plan.corpus.train)

    def add(self, index: int, sequences: Sequences, records: Records) -> None:
        """Add the held-out part of shard ``index``."""
        if not self.holds_out(index):
            return
        if self._ngrams is None:
            vocabulary = self._plan.identity.tokenizer.vocabulary_size
            self._ngrams = NGrams.of(iterate(self._plan.corpus.train), vocabulary)
        if self._ngrams is None:
            return
        train = max(len(self._plan.corpus.train) - self._plan.identity.shard_range(index).start, 0)
        begin = sequences.select(slice(0, train)).positions
        held_out = sequences.select(slice(train, None))
        self._losses += HeldOutLosses.of(held_out, records.slice(begin, len(records)), self._ngrams)

    def find_warning(self) -> str | None:
        """Return a warning if the teacher is worse than the bigram on all that was added."""
        found = self._losses
        if not found.is_teacher_worse:
            return None
        means = (found.unigram.mean or 0.0, found.bigram.mean or 0.0)
        return describe_useless_teacher(str(found.teacher.perplexity), *map(raise_e, means))
