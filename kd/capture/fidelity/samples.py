"""The positions that are compared: their records, stored and drawn anew, and the teacher's log p.

Shapes: N sampled positions, V vocabulary, D hidden width, R redraws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache.codec import Codec
from cache.records import AXES, Records, Sequences
from cache.store import Cache
from kd.capture.fidelity.live import LiveTeacher
from kd.capture.noise import (
    measure_squared_noise,
    read_together,
)
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

    ``sequences`` holds the sequences of the positions, and ``rows_N`` the place of each position
    among all targets of these.
    """

    hidden_ND: Tensor
    gold_N: Tensor
    stored: Records
    logp_NV: Tensor
    sequences: Sequences
    rows_N: Tensor

    def measure_noise(self, live: LiveTeacher, temperatures: list[float]) -> list[Tensor]:
        """Read all sequences together; return the squared noise of the positions.

        A lone sequence is read twice at once. Empty where memory holds only one at a time.
        """
        read = self.sequences
        if len(read) == 1:
            read = Sequences.concatenate([read, read])
        hidden_ND = read_together(lambda part: live.compute_states(part)[0], read)
        if hidden_ND is None:
            return []
        again_NV = live.lm_head.compute_logits(hidden_ND[self.rows_N]).double().log_softmax(1)
        return [measure_squared_noise(self.logp_NV, again_NV, self.gold_N, temperatures)]

    def redraw(
        self,
        codec: Codec,
        lm_head: LMHead,
        number: int,
        redraws: int,
        waiting: Callable[[], None],
    ) -> Records:
        """Record these positions with R other seeds.

        The (R * N) records of one seed stand together.
        """
        knots = self.stored["partition"].shape[1] if codec.profile == "tempered" else 0
        places = np.arange(len(self.gold_N))
        # Seeds that differ from the codec's own: the stored sample is compared apart.
        seeds = [(codec.seed + 1 + redraw) % 2**64 for redraw in range(redraws)]
        recorders = (Recorder(lm_head, replace(codec, seed=seed), knots) for seed in seeds)
        written = []
        for recorder in recorders:
            waiting()
            written.append(recorder.record(self.hidden_ND, self.gold_N, number, places))
        joined = Records.concatenate(written).columns
        return Records(
            {
                name: column[:, 0] if AXES[name] == "tail" else column
                for name, column in joined.items()
            }
        )


def read_samples(store: Cache, live: LiveTeacher, positions: int) -> Iterator[PositionSample]:
    """Read about ``positions`` positions, from sequences at equal distances over the cache.

    Raises ``ModelError`` where the teacher's logits are not finite.
    """
    numbers = _space_evenly(len(store), math.ceil(positions / PER_SEQUENCE))
    for start in range(0, len(numbers), SEQUENCES_PER_READ):
        chosen = numbers[start : start + SEQUENCES_PER_READ]
        share = math.ceil(positions / len(numbers))
        found = [_read_positions(store, live, number, share) for number in chosen]
        gold_N = torch.cat([each.gold_N for each in found])
        if len(gold_N) == 0:
            continue
        hidden_ND = torch.cat([each.hidden_ND for each in found])
        logits_NV = live.lm_head.compute_logits(hidden_ND)
        if not torch.isfinite(logits_NV.logsumexp(1)).all():
            raise ModelError(
                "The teacher's logits are NaN or infinite.", "Run it in float32 or bfloat16."
            )
        starts = np.cumsum([0] + [each.targets for each in found])
        rows = [each.places + start for each, start in zip(found, starts, strict=False)]
        yield PositionSample(
            hidden_ND,
            gold_N,
            Records.concatenate(each.stored for each in found),
            logits_NV.double().log_softmax(1),
            Sequences.concatenate(each.sequences for each in found),
            torch.from_numpy(np.concatenate(rows)),
        )


@dataclass(frozen=True)
class _SequenceSample:
    """Some positions of one sequence: ``places`` among its ``targets`` positions with a target."""

    sequences: Sequences
    targets: int
    places: NDArray[np.int64]
    hidden_ND: Tensor
    gold_N: Tensor
    stored: Records


def _read_positions(store: Cache, live: LiveTeacher, number: int, count: int) -> _SequenceSample:
    """Read ``count`` positions of sequence ``number``, at equal distances."""
    sequences, records = store.read([number], draws=number)
    places = _space_evenly(len(records), count)
    hidden_ND, gold_N = live.compute_states(sequences)
    picked = Records.concatenate([records.slice(place, place + 1) for place in places] or [records])
    return _SequenceSample(
        sequences,
        len(records),
        np.array(places, np.int64),
        hidden_ND[places],
        gold_N[places],
        picked,
    )


def _space_evenly(size: int, count: int) -> list[int]:
    """Return at most ``count`` numbers of ``range(size)``, at equal distances with both ends."""
    return sorted({round(place) for place in np.linspace(0, size - 1, min(size, count)).tolist()})
