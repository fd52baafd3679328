"""The student's sequences with those that the teacher reads in their place, target for target.

    student   a a a b b c c c c        a = its prompt, b and c = what is learned of a document
    teacher   A A A A A b b c c c c    A = the teacher's prompt

A token store holds both side by side: the student's L positions and then the teacher's M.

Shapes: S sequences, L positions of a sequence of the student's, M of the teacher's, N tokens of one
document.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.records import Sequences
from kd.text.stored.packed import PackedText


@dataclass(frozen=True, eq=False)
class TeacherPrompt:
    """The tokens that the teacher reads in place of the first ``first`` tokens of a document."""

    ids: NDArray[np.uint32]
    first: int

    def advance(self, place: int, ids: NDArray[np.uint32]) -> TeacherPrompt:
        """Return what comes before the rest, from ``place`` on, of a document with these ``ids``.

        The rest alone would be the end of an answer without its beginning.
        """
        if place <= self.first:
            return TeacherPrompt(self.ids, self.first - place)
        return TeacherPrompt(np.concatenate([self.ids, ids[self.first : place]]), 0)


@dataclass(frozen=True, eq=False)
class PairedSequences(Sequences):
    """The student's sequences; ``teacher`` are those that the teacher reads, with equal targets."""

    teacher: Sequences

    @classmethod
    def cut(cls, wide: Sequences, length: int) -> PairedSequences:
        """Cut sequences of both, side by side, after the student's ``length`` positions."""
        parts = (slice(length), slice(length, None))
        student, teacher = (wide.select((slice(None), part)) for part in parts)
        return cls(*student.arrays, teacher)

    def select(self, indices: Any) -> PairedSequences:
        """Return the sequences at ``indices`` (an index array, slice or mask), in that order."""
        return PairedSequences(*super().select(indices).arrays, self.teacher.select(indices))

    @staticmethod
    def concatenate(parts: Iterable[Sequences]) -> Sequences:
        """Join all sequences of ``parts`` (at least one), in order."""
        kept = list(parts)
        joined = Sequences.concatenate(kept)
        return PairedSequences(*joined.arrays, Sequences.concatenate(map(find_teacher_side, kept)))


def find_teacher_side(sequences: Sequences) -> Sequences:
    """Return what the teacher reads: other sequences than the student's only with a context."""
    return sequences.teacher if isinstance(sequences, PairedSequences) else sequences


@dataclass(frozen=True)
class PairedText:
    """Packed text of sequences of ``length`` tokens, with those that the teacher reads.

    ``wide`` has both side by side.
    """

    wide: PackedText
    length: int

    def __len__(self) -> int:
        return len(self.wide)

    @property
    def positions(self) -> int:
        """Number of positions with a record, N."""
        return self.wide.positions // 2

    def select(self, indices: Any) -> PairedSequences:
        """Return the sequences at ``indices`` (an index array or a slice), in that order."""
        return PairedSequences.cut(self.wide.select(indices), self.length)


def widen(
    sequences: Sequences, prompts: Sequence[TeacherPrompt], length: int, pad_id: int
) -> Sequences:
    """Return sequences (S, L + M) of the student and, beside them, of the teacher.

    ``prompts`` has one for each sequence; M is ``length``.
    """
    shape = (len(sequences), length)
    tokens = np.full(shape, pad_id, np.uint32)
    starts, mask = np.zeros(shape, bool), np.zeros(shape, bool)
    starts[:, 0] = True
    for row, prompt in enumerate(prompts):
        targets = np.flatnonzero(sequences.target_mask[row])
        if not len(targets):
            continue
        # Up to the token that the last target predicts: nothing after it can change a record.
        rest = sequences.tokens[row, prompt.first : targets[-1] + 2]
        end = len(prompt.ids) + len(rest)
        tokens[row, :end] = np.concatenate([prompt.ids, rest])
        starts[row, end : end + 1] = True  # padding is a document of its own
        mask[row, targets - prompt.first + len(prompt.ids)] = True
    own = (tokens, starts, mask)
    return Sequences(*map(np.hstack, zip(sequences.arrays, own, strict=True)))
