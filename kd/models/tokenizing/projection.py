"""Which tokens of a student stand for a token of its teacher at a common boundary.

The text goes on with one token of each. Token i of the teacher has the group

    S_i   the student's tokens j whose longest beginning among the teacher's tokens is i;
          where there are none, the longest beginning of i among the student's tokens

and the student's probability of i is Q_i = c_i sum_{j in S_i} q_j. Each j is in one group of the
first kind, and may stand for tokens i of the second kind too. The factors c keep the sum of all Q
at 1 or less, so that KL(p || Q) is never negative:

    c_i = 1          no j of S_i stands for another i
    c_i = 1/2        some does
    c_i = 1/(2 k)    S_i is of the second kind, and its j stands for k of these

They change no gradient, because within a group they are equal. With the same tokenizer each group
is the token itself. Special tokens are groups by name.

Shapes: V tokens of the teacher, F members of all groups.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from cache.layout import Arrays
from kd.models.tokenizing.pieces import TokenPieces


def make_projection(teacher: TokenPieces, student: TokenPieces) -> Arrays:
    """Return the groups: ``offsets`` (V + 1,) into ``ids`` (F,), ``logs`` of c (V,), ``same`` (V,).

    ``same`` is the student's token of the same bytes, -1 if it has none.
    """
    groups = _find_groups(teacher, student)
    second = _find_beginnings(teacher, student, groups)
    serves: dict[int, int] = defaultdict(int)
    for j in second.values():
        serves[j] += 1
    members = [groups.get(i) or ([second[i]] if i in second else []) for i in range(teacher.size)]
    factors = np.ones(teacher.size)
    for i, group in enumerate(members):
        if i in second:
            factors[i] = 1 / (2 * serves[second[i]])
        elif any(j in serves for j in group):
            factors[i] = 1 / 2
    return {
        "offsets": np.concatenate([[0], np.cumsum([len(each) for each in members])]),
        "ids": np.array([j for group in members for j in group], np.int64),
        "logs": np.log(factors),
        "same": _find_same(teacher, student),
    }


def _find_groups(teacher: TokenPieces, student: TokenPieces) -> dict[int, list[int]]:
    """Put each token of the student into the group that it begins with, by exact matches first."""
    groups: dict[int, list[int]] = defaultdict(list)
    for j, text in student.bytes_of.items():
        # Of several ids with the same bytes the student's own number is the nearest.
        same = teacher.bytes_of.get(j) == text
        first = j if same else teacher.find_longest(text)
        if first is not None:
            groups[first].append(j)
    for i in teacher.special:
        if (pair := teacher.find_special(i, student)) is not None:
            groups[i] = [pair]
    return groups


def _find_beginnings(
    teacher: TokenPieces, student: TokenPieces, groups: dict[int, list[int]]
) -> dict[int, int]:
    """Find the student's token with which each token of the teacher without a group begins."""
    found = {
        i: student.find_longest(text) for i, text in teacher.bytes_of.items() if i not in groups
    }
    return {i: j for i, j in found.items() if j is not None}


def _find_same(teacher: TokenPieces, student: TokenPieces) -> NDArray[np.int64]:
    """Find the student's token of the same bytes, or of the same name, (V,)."""
    same = np.full(teacher.size, -1, np.int64)
    for i, text in teacher.bytes_of.items():
        own = student.bytes_of.get(i) == text
        same[i] = i if own else student.id_of.get(text, -1)
    for i in teacher.special:
        found = teacher.find_special(i, student)
        same[i] = -1 if found is None else found
    return same
