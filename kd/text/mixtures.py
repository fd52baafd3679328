"""Several texts -> one, in the shares of their weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cache.records import Sequences
from kd.config.data import DataConfig, DatasetSpec, TextSources
from kd.text.packing import measure_text_lengths


def mix_texts(
    texts: list[Iterator[Sequences]], weights: list[float], wanted: int | None = None
) -> tuple[Sequences, int | None]:
    """Take ``wanted`` sequences of ``texts``; their shares of the tokens follow ``weights``.

    The next sequence always comes from the text with the fewest tokens for its weight (stride
    scheduling), so that a share is never off by more than a sequence. If that text has no more, the
    mixture ends, because the shares would no longer hold; the number of that text is returned too,
    else None.
    """
    rows = [_split_rows(text) for text in texts]
    given = [0.0] * len(rows)  # tokens taken from each text, divided by its weight
    taken = list[Sequences]()
    while wanted is None or len(taken) < wanted:
        turn = min(range(len(rows)), key=given.__getitem__)
        if (row := next(rows[turn], None)) is None:
            return Sequences.concatenate(taken), turn
        taken.append(row)
        given[turn] += int(measure_text_lengths(row)[0]) / weights[turn]
    return Sequences.concatenate(taken), None


def _split_rows(text: Iterable[Sequences]) -> Iterator[Sequences]:
    return (block.select(slice(row, row + 1)) for block in text for row in range(len(block)))


def is_mixture(sources: TextSources, config: DataConfig) -> bool:
    """Whether the sources are mixed in shares: if one has a weight, or if one is a stream.

    Without a mixture, only the first of several streams would be read.
    """
    weighed = any(get_weight(source) != 1.0 for source in sources)
    return len(sources) > 1 and (weighed or (config.streaming and has_dataset(sources)))


def has_dataset(sources: TextSources) -> bool:
    """Whether one of ``sources`` is a dataset."""
    return any(isinstance(source, DatasetSpec) for source in sources)


def name_source(source: str | DatasetSpec) -> str:
    """Return the path or id of a source."""
    return source if isinstance(source, str) else source.path


def get_weight(source: str | DatasetSpec) -> float:
    """Return the weight of a source in a mixture; files have 1."""
    return source.weight if isinstance(source, DatasetSpec) else 1.0
