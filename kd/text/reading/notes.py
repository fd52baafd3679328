"""Notes of what the reading of a text leaves out or changes, counted with an example."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from kd.progress import Notice
from kd.text.stored.places import BEGINNING, TextPlace


@dataclass
class TextNotes:
    """The notices of a text, or of one text of a mixture, whose number ``text`` is.

    A place is counted once, although an interrupted reading goes back a little when it goes on.
    """

    found: dict[tuple[int, str], tuple[Notice, TextPlace]] = field(default_factory=dict)
    text: int = 0

    def of_text(self, number: int) -> TextNotes:
        """Return the notes of one text of a mixture, which are kept among these."""
        return replace(self, text=number)

    def add(self, notice: Notice, place: TextPlace) -> None:
        """Count what was found at ``place``; places come in order for each kind of notice."""
        key = (self.text, notice.what)
        known, last = self.found.get(key, (None, BEGINNING))
        if known is None:
            self.found[key] = (notice, place)
        elif place > last:
            self.found[key] = (replace(known, count=known.count + notice.count), place)

    def list_notices(self) -> Iterator[Notice]:
        """Yield one notice for each kind, whose count is that of all texts."""
        kinds = dict[str, Notice]()
        for (_, what), (notice, _) in self.found.items():
            count = notice.count + (kinds[what].count if what in kinds else 0)
            kinds[what] = replace(kinds.get(what, notice), count=count)
        yield from kinds.values()

    def to_json(self) -> list[Any]:
        """Return all notices with their texts and places, as JSON."""
        return [
            [text, notice.to_json(), list(place)]
            for (text, _), (notice, place) in self.found.items()
        ]

    def recall(self, value: list[Any]) -> None:
        """Take in the notices of an interrupted reading, from their JSON (``to_json``)."""
        for text, notice, place in value:
            found = Notice(**notice)
            self.found[text, found.what] = (found, TextPlace(*place))
