"""Measure the bias of sampled records: draw, round and decode them again and again.

Every round records the same positions as another sequence, so with other random numbers, and takes
several draws: those of a record, or for profile threshold the records of several sequences. Sums
of the decoded weights over tokens of similar probability should be the sums of p_T. Only tokens of
the tail are summed: the others are in every record. Rounds are independent of each other, so their
spread gives the standard error.

A mean over draws is unbiased where a weight is p over the chance of being drawn. Two parts of
profile tempered are not: p / g, a ratio of rounded numbers (``bound_rounding``), and the tail's
log-partition, which is interpolated (``kd.capture.knots.LARGEST_LOG_MASS_ERROR`` at most, in the
mean). The chances of profile threshold differ by 1e-3 at most (``kd.capture.units.drawing``).

Shapes: N positions, V vocabulary, R draws of a round, E entries, D decades of probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cache.codec import Codec
from cache.profiles.threshold import UnitSample
from cache.records import Records, find_axis
from cache.rounding import RecordPositions
from cache.units.dither import DitherTables
from kd.capture.sampling import Randomness, Sampler
from kd.capture.units.drawing import UnitRandomness, UnitSampler
from kd.capture.units.fitting import make_tables
from kd.loss.decoder import TargetDecoder
from kd.loss.sparse_targets import SparseTarget

#: Decades of a token's probability at T = 1 by their lower end; the last holds all below 1e-6.
DECADES = ("1e-1", "1e-2", "1e-3", "1e-4", "1e-5", "1e-6", "less")


@dataclass(frozen=True, eq=False)
class BiasRow:
    """The bias of one codec at one temperature.

    ``bias_D`` and ``error_D`` are the relative error of the mean weight of each decade, and its
    standard error; NaN where no token is in the decade. ``z`` has one number for each position and
    decade: the error of the mean over its standard error.
    """

    temperature: float
    bias_D: np.ndarray
    error_D: np.ndarray
    z: np.ndarray

    @property
    def rms_z(self) -> float:
        """The root mean square of all z; 1 where there is no bias."""
        return float(np.sqrt(np.mean(self.z**2)))

    @property
    def largest_z(self) -> float:
        """The largest |z| of any position and decade, or of a decade as a whole."""
        whole = self.bias_D[self.error_D > 0] / self.error_D[self.error_D > 0]
        return float(np.abs(np.concatenate([self.z, whole])).max())


@torch.no_grad()
def measure_bias(
    codec: Codec,
    logits_NV: Tensor,
    gold_N: Tensor,
    temperatures: Sequence[float],
    rounds: int,
    draws: int,
    knots: int = 0,
) -> list[BiasRow]:
    """Measure the bias of ``codec`` at each temperature; a round has so many ``draws``.

    They are the codec's own, except for profile threshold, whose records have one.
    """
    tables = fit_to_logits(codec, logits_NV) if codec.rules.dithered else None
    repeated_N = gold_N.repeat(draws)
    decade_NV = find_tail_decades(codec, logits_NV, gold_N)
    sums = {temperature: [] for temperature in temperatures}  # type: dict[float, list[Tensor]]
    for number in range(rounds):
        if tables is None:
            repeated = _repeat_draws(_record(codec, logits_NV, gold_N, knots, number), draws)
        else:
            numbers = range(number * draws, (number + 1) * draws)
            repeated = _record_units(codec, logits_NV, gold_N, tables, numbers)
        for temperature, found in sums.items():
            target = TargetDecoder(codec).decode(repeated_N, repeated, temperature).teacher
            assert isinstance(target, SparseTarget)
            found.append(_sum_by_decade(target, decade_NV, draws))
    return [
        _make_row(temperature, torch.stack(found), logits_NV, decade_NV)
        for temperature, found in sums.items()
    ]


def bound_rounding(codec: Codec, temperature: float) -> float:
    """Return the largest relative bias of one token's weight by the rounding of its value.

    A weight is about exp(c l) of the rounded l, with c = 1/T less the mean of 1/T over the
    temperatures that the tail was drawn at. It has the mean factor 1 + c (c - 1) v / 2, where v is
    the variance of the rounding, 0 to step^2 / 4. The decoder divides by the factor for step^2 / 6,
    the mean. A sum over tokens of similar probability has almost none of this bias.
    """
    if codec.profile == "threshold":
        return 0.0
    betas = codec.proposal_betas
    ends = np.array([1 / temperature - betas[-1], 1 / temperature - betas[0]])
    # c (c - 1) is a parabola: its extremes are at the ends or at c = 1/2.
    c = np.append(ends, np.clip(0.5, *ends))
    return float(np.abs(c * (c - 1)).max() / 2 * codec.tail_step**2 / 6)


def find_tail_decades(codec: Codec, logits_NV: Tensor, gold_N: Tensor) -> Tensor:
    """Return the index in ``DECADES`` of each token's probability at T = 1, (N, V).

    Tokens outside the tail have the index after the last.
    """
    log10_NV = torch.log_softmax(logits_NV.double(), 1) / np.log(10)
    sampler = Sampler(codec)
    sizes, _ = sampler.split(logits_NV, sampler.list_known(gold_N))
    in_tail_NV = sizes.size_NQU.flatten(1)[:, : logits_NV.shape[1]] > 0
    decade_NV = (-log10_NV).ceil().clamp(1, len(DECADES)).long() - 1
    return decade_NV.where(in_tail_NV, len(DECADES))


def _record(codec: Codec, logits_NV: Tensor, gold_N: Tensor, knots: int, number: int) -> Records:
    positions_N = np.arange(len(gold_N))
    chance = Randomness.of_each(codec, [number], [positions_N], logits_NV.device)[0]
    places = RecordPositions(np.full(len(gold_N), number), positions_N)
    return codec.encode(Sampler(codec, knots).sample(logits_NV, gold_N, chance), places)


def fit_to_logits(codec: Codec, logits_NV: Tensor) -> DitherTables:
    """Fit the tables of profile threshold to these positions: each cluster has the same."""
    p_NV = torch.softmax(logits_NV.double(), 1)
    heads_NV = p_NV > codec.threshold
    tails_V = p_NV.masked_fill(heads_NV, 0.0).sum(0).numpy()
    shape = (codec.clusters, 1)
    return make_tables(
        np.tile(tails_V, shape),
        np.tile(heads_NV.sum(0).numpy(), shape),
        np.zeros(shape, np.float32),
    )


def _record_units(
    codec: Codec, logits_NV: Tensor, gold_N: Tensor, tables: DitherTables, numbers: range
) -> dict[str, Tensor]:
    """Return the columns of the same positions as sequences ``numbers``, one after the other."""
    sampler = UnitSampler(codec, tables)
    positions_N = np.arange(len(gold_N))
    cluster_N = torch.zeros_like(gold_N)
    chances = UnitRandomness.of_each(
        codec, list(numbers), [positions_N] * len(numbers), logits_NV.device
    )
    found = []
    for number, chance in zip(numbers, chances, strict=True):
        drawn = sampler.draw_units(logits_NV, gold_N, cluster_N, chance)
        sample = UnitSample(**{name: each.numpy() for name, each in drawn.items()})
        places = RecordPositions(np.full(len(gold_N), number), positions_N)
        found.append(codec.encode(sample, places))
    columns = Records.concatenate(found).columns
    return {name: torch.from_numpy(column) for name, column in columns.items()}


def _repeat_draws(records: Records, draws: int) -> dict[str, Tensor]:
    """Return the columns of R N records: those of the first draw, then the next."""
    columns = {}
    for name, column in records.columns.items():
        each = (column[:, draw] if find_axis(name) == "tail" else column for draw in range(draws))
        columns[name] = torch.from_numpy(np.concatenate(list(each)))
    return columns


def _sum_by_decade(target: SparseTarget, decade_NV: Tensor, draws: int) -> Tensor:
    """Return the mean over the draws of the sum of weights by position and decade, (N, D)."""
    rows_E = target.rows_E % len(decade_NV)
    width = len(DECADES) + 1  # the last column is for tokens outside the tail
    place_E = rows_E * width + decade_NV[rows_E, target.ids_E]
    sums = target.weights_E.new_zeros(len(decade_NV) * width)
    return sums.index_add_(0, place_E, target.weights_E).view(-1, width)[:, :-1] / draws


def _make_row(
    temperature: float, found_SND: Tensor, logits_NV: Tensor, decade_NV: Tensor
) -> BiasRow:
    """Compare the sums of S rounds with those of p_T."""
    p_NV = torch.softmax(logits_NV.double() / temperature, 1)
    sums_ND = p_NV.new_zeros(len(p_NV), len(DECADES) + 1).scatter_add_(1, decade_NV, p_NV)
    exact_ND = sums_ND[:, :-1]
    rounds = len(found_SND)
    whole_SD = found_SND.sum(1)
    exact_D = exact_ND.sum(0)
    error_D = whole_SD.std(0) / rounds**0.5
    error_ND = found_SND.std(0) / rounds**0.5
    drawn_ND = error_ND > 0.0
    z = (found_SND.mean(0) - exact_ND)[drawn_ND] / error_ND[drawn_ND]
    return BiasRow(
        temperature,
        (whole_SD.mean(0) / exact_D - 1.0).numpy(),
        (error_D / exact_D).numpy(),
        z.numpy(),
    )
