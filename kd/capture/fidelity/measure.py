"""Compare the records of a cache with the live teacher, on a few positions, before training.

stored    the records of the cache, decoded as for training, are compared with the teacher's
distribution
redrawn   the same positions are recorded again with other seeds; the mean of samples must be
the teacher's (sums.py)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from cache.codec import Codec
from cache.manifest import FidelityRow
from cache.store import Cache
from kd.capture.fidelity.comparison import Measurements, compare_records
from kd.capture.fidelity.decoding import RecordDecoder
from kd.capture.fidelity.live import LiveTeacher
from kd.capture.fidelity.samples import read_samples
from kd.capture.knots import LARGEST_LOG_MASS_ERROR
from kd.capture.noise import choose_allowed_noise, summarise_noise
from kd.loss.whole_targets import decode_lm_head
from kd.models.layers import find_device

#: Positions that are compared by default.
POSITIONS = 32
#: Times that each position is recorded again by default.
REDRAWS = 40


def choose_temperatures(codec: Codec) -> tuple[float, ...]:
    """Return the temperatures at which a cache is measured: those that its profile can serve."""
    if codec.temperatures:
        low, high = codec.temperatures
        return tuple(round(t, 6) for t in np.geomspace(low, high, 5).tolist())
    return (0.5, 1.0, 2.0) if codec.rules.any_temperature else (1.0,)


@dataclass(frozen=True)
class FidelityMeasurement:
    """How close the records are to the teacher, and the teacher's own noise in nats.

    ``rows``: one for each temperature; empty where the chosen sequences have no target.
    """

    rows: tuple[FidelityRow, ...]
    noise: float


@torch.no_grad()
def measure_fidelity(
    store: Cache,
    live: LiveTeacher,
    positions: int = POSITIONS,
    redraws: int = REDRAWS,
    check_stop: Callable[[], None] = lambda: None,
) -> FidelityMeasurement:
    """Compare about ``positions`` positions with the teacher, at each temperature.

    Positions come from sequences at equal distances over the cache. The teacher reads each of their
    documents alone, and once more beside copies of it, which shows its own noise. The same cache
    and teacher always give the same rows. ``check_stop`` is called between the parts of the work,
    and may raise to give up.
    """
    codec = replace(store.codec, draws=1)  # one of the stored draws of each position is read
    lm_head = None
    if codec.rules.needs_lm_head:
        device = find_device(live.model)
        lm_head = decode_lm_head(store.teacher_head(), codec.vocabulary_size, device)
    decoders = [RecordDecoder(codec, lm_head, each) for each in choose_temperatures(codec)]
    found: list[list[Measurements]] = [[] for _ in decoders]
    squared: list[Tensor] = []
    for number, part in enumerate(read_samples(store, live, positions)):
        check_stop()
        again = part.measure_noise(live, [decoder.temperature for decoder in decoders])
        squared += again
        fresh = None
        if codec.rules.sampled:
            tables = store.tables if codec.rules.dithered else None
            fresh = part.redraw(codec, live.lm_head, number, redraws, check_stop, tables)
        for decoder, list_ in zip(decoders, found, strict=True):
            check_stop()
            list_.append(compare_records(part, fresh, decoder, summarise_noise(again)))
    noise = summarise_noise(squared)
    allowed = choose_allowed_noise(store.identity.teacher.dtype, noise)
    rows = tuple(
        _make_row(each, decoder, allowed)
        for each, decoder in zip(found, decoders, strict=True)
        if each
    )
    return FidelityMeasurement(rows, noise)


def _make_row(found: list[Measurements], decoder: RecordDecoder, noise: float) -> FidelityRow:
    """Return the means over all positions and the largest |z| as one row."""
    codec = decoder.codec
    sums = [each.sums for each in found if each.sums is not None]
    positions = sum(len(each.kl_N) for each in found)

    def mean(name: str) -> float:
        return round_number(float(torch.cat([getattr(each, name) for each in found]).nanmean()))

    # NaN where no target shows its most probable token.
    agreement = mean("agrees_N")
    bias_z = stored_z = None
    if sums:
        systematic = positions * LARGEST_LOG_MASS_ERROR if codec.rules.keeps_partition else 0.0
        noise_of_sums = math.sqrt(positions) * noise / decoder.temperature
        scores = sum(sums[1:], sums[0]).compute_scores(systematic, noise_of_sums)
        bias_z, stored_z = map(round_number, scores)
    return FidelityRow(
        temperature=decoder.temperature,
        positions=positions,
        kept_mass=mean("kept_mass_N"),
        kept_error=mean("kept_error_N"),
        kl=None if sums else mean("kl_N"),
        bias_z=bias_z,
        stored_z=stored_z,
        gold_error=mean("gold_error_N"),
        top1_agreement=None if math.isnan(agreement) else agreement,
        entropy_error=mean("entropy_error_N"),
    )


def round_number(value: float) -> float:
    """Round a measured value to the six digits that a manifest keeps."""
    return float(f"{value:.6g}")
