"""The positions that are compared: their records, stored and drawn anew, and the teacher's log p.

Shapes: N sampled positions, V vocabulary, D hidden width, R redraws.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cache.codec import Codec
from cache.records import Records, Sequences, find_axis
from cache.store import Cache
from cache.units.dither import DitherTables
from kd.capture.fidelity.live import LiveTeacher
from kd.capture.noise import measure_squared_noise, read_together
from kd.capture.recording import Recorder
from kd.errors import ModelError
from kd.models.lm_head import LMHead

#: Positions of one sequence.
PER_SEQUENCE = 8
#: Sequences that are read together: their logits are in memory at once.
SEQUENCES_PER_READ = 4


@dataclass(frozen=True)
class PositionSample:
    """Some of the compared positions, with their stored records and the teacher's log p.

    ``documents`` holds those of the positions.
    """

    hidden_ND: Tensor
    gold_N: Tensor
    stored: Records
    logp_NV: Tensor
    documents: tuple[_DocumentSample, ...]

    def measure_noise(self, live: LiveTeacher, temperatures: list[float]) -> list[Tensor]:
        """Read each document beside copies of itself; return the squared noise of the positions.

        What stands beside a document in the capture must not change it: that would be no noise.
        Empty where memory holds only one at a time.
        """
        read = (each.read_beside_copies(live) for each in self.documents)
        again = [each for each in read if each is not None]
        if len(again) < len(self.documents):
            return []
        again_NV = live.lm_head.compute_logits(torch.cat(again)).double().log_softmax(1)
        return [measure_squared_noise(self.logp_NV, again_NV, self.gold_N, temperatures)]

    def redraw(
        self,
        codec: Codec,
        lm_head: LMHead,
        number: int,
        redraws: int,
        check_stop: Callable[[], None],
        tables: DitherTables | None = None,
    ) -> Records:
        """Record these positions with R other seeds, and the ``tables`` of the cache's dither.

        The (R * N) records of one seed stand together.
        """
        knots = self.stored["partition"].shape[1] if codec.rules.keeps_partition else 0
        places = np.arange(len(self.gold_N))
        # Seeds that differ from the codec's own: the stored sample is compared apart.
        seeds = [(codec.seed + 1 + redraw) % 2**64 for redraw in range(redraws)]
        written = []
        for seed in seeds:
            check_stop()
            recorder = Recorder(lm_head, replace(codec, seed=seed), knots, tables=tables)
            written.append(recorder.record(self.hidden_ND, self.gold_N, number, places))
        return Records(
            {
                name: column[:, 0] if find_axis(name) == "tail" and column.ndim > 1 else column
                for name, column in Records.concatenate(written).columns.items()
            }
        )


def read_samples(store: Cache, live: LiveTeacher, positions: int) -> Iterator[PositionSample]:
    """Read about ``positions`` positions, from sequences at equal distances over the cache.

    Raises ``ModelError`` if the teacher's logits are not finite.
    """
    numbers = _space_evenly(len(store), math.ceil(positions / PER_SEQUENCE))
    for start in range(0, len(numbers), SEQUENCES_PER_READ):
        chosen = numbers[start : start + SEQUENCES_PER_READ]
        share = math.ceil(positions / len(numbers))
        found = [each for number in chosen for each in _read_positions(store, live, number, share)]
        if not found:
            continue
        hidden_ND = torch.cat([each.hidden_ND for each in found])
        logits_NV = live.lm_head.compute_logits(hidden_ND)
        if not torch.isfinite(logits_NV.logsumexp(1)).all():
            raise ModelError(
                "The teacher's logits are NaN or infinite.", "Run it in float32 or bfloat16."
            )
        yield PositionSample(
            hidden_ND,
            torch.cat([each.gold_N for each in found]),
            Records.concatenate(each.stored for each in found),
            logits_NV.double().log_softmax(1),
            tuple(found),
        )


@dataclass(frozen=True)
class _DocumentSample:
    """Some positions of one document: ``places`` among its positions with a target.

    ``copies`` of it have about as many tokens as a sequence.
    """

    document: Sequences
    copies: int
    places: list[int]
    hidden_ND: Tensor
    gold_N: Tensor
    stored: Records

    def read_beside_copies(self, live: LiveTeacher) -> Tensor | None:
        """Return the hidden states of the positions; None if memory holds only one copy."""
        copies = Sequences.concatenate([self.document] * self.copies)
        hidden_ND = read_together(lambda part: live.compute_states(part)[0], copies)
        return None if hidden_ND is None else hidden_ND[self.places]


def _read_positions(
    store: Cache, live: LiveTeacher, number: int, count: int
) -> Iterator[_DocumentSample]:
    """Read ``count`` positions of sequence ``number``, at equal distances.

    Each document is read alone, so that the records show what stood beside it in the capture.
    """
    sequence, records = store.read([number], draws=number)
    picked = _space_evenly(len(records), count)
    first = 0
    for document in _split_documents(live.find_read(number, sequence)):
        end = first + int(document.target_mask.sum())
        own = [place for place in picked if first <= place < end]
        if own:
            hidden_ND, gold_N = live.compute_states(document)
            places = [place - first for place in own]
            yield _DocumentSample(
                document,
                max(2, sequence.length // document.length),
                places,
                hidden_ND[places],
                gold_N[places],
                Records.concatenate(records.slice(place, place + 1) for place in own),
            )
        first = end


def _split_documents(sequence: Sequences) -> Iterator[Sequences]:
    """Yield each document of one sequence as a sequence of its own."""
    starts = np.flatnonzero(sequence.document_start[0, 1:]) + 1
    fields: tuple[Any, ...] = (sequence.tokens, sequence.document_start, sequence.target_mask)
    for start, stop in itertools.pairwise([0, *starts.tolist(), sequence.length]):
        yield Sequences(*(each[:, start:stop] for each in fields))


def _space_evenly(size: int, count: int) -> list[int]:
    """Return at most ``count`` numbers of ``range(size)``, at equal distances with both ends."""
    return sorted({round(place) for place in np.linspace(0, size - 1, min(size, count)).tolist()})
