"""Places in a text, from which its reading goes on after an interruption."""

from __future__ import annotations

from typing import Any, NamedTuple


class TextPlace(NamedTuple):
    """The place of a token in the sources of a text.

    ``source``, ``file`` and ``row`` count from 0; a dataset is one file, and a text file one row.
    ``batch`` is a batch of pieces of a long text (``kd.text.text_encoder``) that the token is in or
    after, and ``before`` the tokens of the row before this batch. ``tokens`` counts the tokens of
    the row before the place.
    """

    source: int = 0
    file: int = 0
    row: int = 0
    batch: int = 0
    before: int = 0
    tokens: int = 0

    def advance(self, tokens: int) -> TextPlace:
        """Return the place ``tokens`` further on in the same row."""
        return self._replace(tokens=self.tokens + tokens)


#: The beginning of a text.
BEGINNING = TextPlace()


class Mark(NamedTuple):
    """Where the packed sequences of a text go on: ``skip`` sequences after ``place``.

    A sequence begins at ``place``.
    """

    place: TextPlace = BEGINNING
    skip: int = 0


class Cursor(NamedTuple):
    """How far a text has been read: a mark for each text of a mixture, and what each has given.

    ``given`` is the state of the mixture: tokens for each unit of weight. Without a mixture there
    is one mark, and nothing in ``given``.
    """

    marks: tuple[Mark, ...]
    given: tuple[float, ...] = ()

    @classmethod
    def begin(cls, texts: int) -> Cursor:
        """Return the cursor at the beginning of ``texts`` texts."""
        return cls((Mark(),) * texts, (0.0,) * texts if texts > 1 else ())

    @classmethod
    def from_json(cls, value: dict[str, list[Any]]) -> Cursor:
        """Read what ``to_json`` returns."""
        marks = tuple(Mark(TextPlace(*place), skip) for place, skip in value["marks"])
        return cls(marks, tuple(value["given"]))

    def to_json(self) -> dict[str, list[Any]]:
        """Return the cursor as JSON: each place as a list of its numbers."""
        return {
            "marks": [[list(mark.place), mark.skip] for mark in self.marks],
            "given": list(self.given),
        }
