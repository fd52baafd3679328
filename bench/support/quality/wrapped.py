"""A source whose every answer is that of another; a subclass changes some of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from kd.text.batches import Source


@dataclass(frozen=True)
class WrappedSource:
    """Answers as ``source`` does."""

    source: Source

    train_count = property(lambda self: self.source.train_count)
    validation_count = property(lambda self: self.source.validation_count)
    shard_sequences = property(lambda self: self.source.shard_sequences)
    sequence_bytes = property(lambda self: self.source.sequence_bytes)
    fingerprint = property(lambda self: self.source.fingerprint)
    codec = property(lambda self: self.source.codec)
    disk_reads = property(lambda self: self.source.disk_reads)

    def teacher_head(self) -> dict[str, NDArray[Any]]:
        """Return the teacher's LM head, if the records are its hidden states."""
        return self.source.teacher_head()

    def tail_mean(self) -> dict[str, NDArray[Any]] | None:
        """Return the mean tail of the records, if they have one."""
        return self.source.tail_mean()

    def projection(self) -> dict[str, NDArray[Any]] | None:
        """Return how the tokens of the records become the student's."""
        return self.source.projection()

    def read(self, indices: NDArray[Any], draws: NDArray[Any] | int = 0) -> Any:
        """Read the sequences of ``indices`` and their records."""
        return self.source.read(indices, draws)
