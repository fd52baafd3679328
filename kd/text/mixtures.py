"""Packed text, read from a place on: one text, or several in the shares of their weights."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from cache.records import Sequences
from kd.config.data import DataConfig, DatasetSpec, TextSources
from kd.text.packing import Block, measure_text_lengths
from kd.text.stored.places import Cursor, Mark, TextPlace

#: Packs a text from a place on.
Packer = Callable[[TextPlace], Iterator[Block]]


class MarkedText:
    """The sequences of one text from ``mark`` on, and the mark of the next one."""

    def __init__(self, pack: Packer, mark: Mark) -> None:
        self._blocks = pack(mark.place)
        self._sequences: Sequences | None = None
        self._begin = self._end = mark.place
        self._next = mark.skip

    @property
    def mark(self) -> Mark:
        """Where the next sequence begins."""
        return Mark(self._begin, self._next)

    def read(self, most: int) -> Sequences | None:
        """Return at least one and at most ``most`` sequences; None if there are no more."""
        while self._sequences is None or self._next >= len(self._sequences):
            block = next(self._blocks, None)
            if block is None:
                return None
            if self._sequences is not None:
                self._next -= len(self._sequences)
                self._begin = self._end
            self._sequences, self._end = block
        found = self._sequences.select(slice(self._next, self._next + most))
        self._next += len(found)
        return found


class TextReader:
    """Reads one text, or mixes several: their shares of the tokens follow their weights.

    The next sequence always comes from the text with the fewest tokens for its weight (stride
    scheduling), so that a share is never off by more than a sequence. If that text has no more, the
    mixture ends, because the shares would no longer hold; ``ended`` is the number of that text
    then, else None. The first ``length`` positions of a sequence count, which are the student's.
    """

    def __init__(
        self,
        texts: list[Packer],
        weights: list[float],
        cursor: Cursor | None = None,
        length: int | None = None,
    ) -> None:
        start = cursor or Cursor.begin(len(texts))
        self._texts = [MarkedText(*each) for each in zip(texts, start.marks, strict=True)]
        self._weights = weights
        self._counted = (slice(None), slice(length))
        self._given = list(start.given)  # tokens taken from each text, divided by its weight
        self.ended: int | None = None

    @property
    def cursor(self) -> Cursor:
        """Where the next sequence begins."""
        return Cursor(tuple(text.mark for text in self._texts), tuple(self._given))

    def read(self, most: int) -> Sequences | None:
        """Return at least one and at most ``most`` sequences; None if there are no more."""
        if not self._given:
            return self._texts[0].read(most)
        turn = min(range(len(self._texts)), key=self._given.__getitem__)
        row = self._texts[turn].read(1)
        if row is None:
            self.ended = turn
            return None
        tokens = int(measure_text_lengths(row.select(self._counted))[0])
        self._given[turn] += tokens / self._weights[turn]
        return row

    def read_all(self, wanted: int | None = None) -> Iterator[Sequences]:
        """Yield what is left of the text, or its next ``wanted`` sequences."""
        most = sys.maxsize if wanted is None else wanted
        while most > 0 and (part := self.read(most)) is not None:
            yield part
            most -= len(part)


def is_mixture(sources: TextSources, config: DataConfig) -> bool:
    """Return whether the sources are mixed in shares: if one has a weight, or if one is a stream.

    Without a mixture, only the first of several streams would be read.
    """
    weighed = any(get_weight(source) != 1.0 for source in sources)
    return len(sources) > 1 and (weighed or (config.streaming and has_dataset(sources)))


def has_dataset(sources: TextSources) -> bool:
    """Return whether one of ``sources`` is a dataset."""
    return any(isinstance(source, DatasetSpec) for source in sources)


def name_source(source: str | DatasetSpec) -> str:
    """Return the path or id of a source."""
    return source if isinstance(source, str) else source.path


def get_weight(source: str | DatasetSpec) -> float:
    """Return the weight of a source in a mixture; files have 1."""
    return source.weight if isinstance(source, DatasetSpec) else 1.0
