"""Draw samples in units, and their tails with shared dither, for profile threshold.

A position has the teacher's distribution p over V tokens, and a threshold tau. The next token and
the always_keep ids keep a rounded log-probability. What these leave of the mass is n units of at
most tau (``cache.profiles.threshold``). One systematic sample gives the n units to

    heads   the tokens with p above a unit, each floor or ceil of its p in units
    tail    all other tokens as a whole: m units, one token each

The m tokens of a tail come out of the candidates of ``cache.units.dither``. The first arrival of a
token of prior b is geometric, so u = 1 - (1 - b)^(k - 1) (1 - b U), with U uniform, is a uniform
number for every b. A token that is not among K candidates has u = 1 - (1 - b)^K (1 - U). Pareto
sampling takes the m tokens with the least odds(u) / odds(pi), pi = m p / R, with R the mass of the
tail (Rosén, "Asymptotic theory for order sampling", Journal of Statistical Planning and Inference
1997). Its chances differ from pi by 1e-3 at most, and the number of tokens is always m, which no
form has that is unbiased exactly at this noise: weights that do not sum to 1 cost students more.

The weights of ids that a server scored come as logits too: their logarithms (``k`` of the codec is
above 0). Their sum beside the known tokens differs from what these leave, and so does the number of
units: it is rounded at random, so that its mean is the sum over the weight of a unit.

A chance above 1 would be cut. So where a token of the tail is heavier than R / ceil(n R / W), with
W the mass beside the known tokens, the tokens above half a unit are sampled as heads, too.

Shapes: N positions, V vocabulary, A known ids, C clusters, Z slots of a table, D hidden width,
K candidates of a position, X tokens above half a unit, H heads, B arrivals, M drawn tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from cache.codec import Codec
from cache.profiles.threshold import KNOWN_STEPS, WHOLE, count_units
from cache.random import PURPOSE_KNOWN_ROUNDING, PURPOSE_TAIL, draw_uniforms
from cache.rounding import KNOWN_STEP, UNKNOWN
from cache.units.dither import (
    PATIENCE,
    DitherTables,
    begin_tokens,
    hash_positions,
    hash_slots,
    hash_tokens,
)
from kd.capture.sampling import BLOCK, Sampler, TokenSizes
from kd.loss.sparse_targets import expect_best_heads, list_masses_on
from kd.text.steps.pinned import copy_to_device

#: The bits of ``hash_tokens``.
_TOKEN_BITS = 52
_STEP = KNOWN_STEP * KNOWN_STEPS
#: Candidates that are looked at together.
CANDIDATES = {"cpu": 2**17, "cuda": 2**24}
#: The ratio of odds below which tokens are looked at first: the least m are nearly always below.
BOUND = 8.0
#: Chances are cut to this, so that log(1 + BOUND odds(pi)) is below ``_SLACK`` BOUND pi.
_MOST_CHANCE = 1.0 - 4e-4
_SLACK = 1.25
#: The largest prior whose -log(1 - b) is a number.
_MOST_PRIOR = 1.0 - 2.0**-53
#: The counter of the random number that rounds the units: no token, and no point of a process.
_ROUNDING = 1 << 41
#: A number above that of every candidate: PATIENCE times the most units.
_LIMIT = 1 << 17


@dataclass(frozen=True)
class UnitRandomness:
    """The random numbers of N positions: for the units, for the known ids, and for tails.

    ``starts_N2`` has the start of the candidates of a position, and that of its tokens.
    """

    uniform_N: Tensor
    rounding_NA: Tensor
    starts_N2: Tensor

    @classmethod
    def of_each(
        cls,
        codec: Codec,
        sequences: Sequence[int],
        positions: Sequence[np.ndarray],
        device: torch.device,
    ) -> list[UnitRandomness]:
        """Derive the random numbers of several sequences, from only (seed, sequence, position)."""
        counts = [len(positions_N) for positions_N in positions]
        number_N = np.repeat(np.array(sequences, np.int64), counts)
        position_N = np.concatenate(positions).astype(np.int64)
        known = np.arange(1 + len(codec.always_keep))
        rows = (number_N[:, None], position_N[:, None], known)
        start_N = hash_positions(codec.seed, number_N, position_N)
        numbers = (
            draw_uniforms(codec.seed, PURPOSE_TAIL, number_N, position_N),
            draw_uniforms(codec.seed, PURPOSE_KNOWN_ROUNDING, *rows),
            np.stack([start_N, begin_tokens(start_N)], 1),
        )
        parts = (copy_to_device(each, device).split(counts) for each in numbers)
        return [cls(*each) for each in zip(*parts, strict=True)]

    @classmethod
    def join(cls, parts: Sequence[UnitRandomness]) -> UnitRandomness:
        """Join the positions of ``parts``, of which there must be at least one, in order."""
        if len(parts) == 1:
            return parts[0]
        columns = ((each.uniform_N, each.rounding_NA, each.starts_N2) for each in parts)
        return cls(*map(torch.cat, zip(*columns, strict=True)))

    def select(self, rows: slice) -> UnitRandomness:
        """Return the random numbers of some of the positions."""
        return UnitRandomness(self.uniform_N[rows], self.rounding_NA[rows], self.starts_N2[rows])


class DeviceTables:
    """The tables of the dither on a device, with the prior of each cluster, (C, V)."""

    def __init__(self, tables: DitherTables, device: torch.device) -> None:
        self.slots_CZ = torch.from_numpy(tables.slots_CZ.astype(np.int32)).to(device)
        self.centres_CD = torch.from_numpy(tables.centres_CD).to(device)
        clusters, size = tables.slots_CZ.shape
        blocks = -(-tables.vocabulary_size // BLOCK)
        #: With padding to whole blocks, as the sizes of a sampler have.
        self.prior_CV = torch.zeros(clusters, blocks * BLOCK, device=device)
        share_CZ = torch.full_like(self.slots_CZ, 1.0 / size, dtype=torch.float32)
        self.prior_CV.scatter_add_(1, self.slots_CZ.long(), share_CZ)
        #: The prior of the token in each slot.
        self.slot_prior_CZ = self.prior_CV.gather(1, self.slots_CZ.long())

    def name_candidates(
        self, cluster_N: Tensor, starts_N: Tensor, k_K: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens of candidates, and the prior of each, (N, K)."""
        size = self.slots_CZ.shape[1]
        places_NK = hash_slots(starts_N[:, None], k_K, size)
        places_NK += (cluster_N * size)[:, None]
        token_NK = self.slots_CZ.view(-1).take(places_NK).long()
        return token_NK, self.slot_prior_CZ.view(-1).take(places_NK)


#: Makes tables on a device; they are kept, because all recorders of a cache use the same.
put_on_device = functools.lru_cache(maxsize=2)(DeviceTables)


def find_nearest(centres_CD: Tensor, hidden_ND: Tensor) -> Tensor:
    """Return the place of the nearest centre of each state, (N,)."""
    if len(centres_CD) == 1:
        return torch.zeros(len(hidden_ND), dtype=torch.int64, device=hidden_ND.device)
    return (hidden_ND @ centres_CD.T - 0.5 * centres_CD.square().sum(1)).argmax(1)


@dataclass(frozen=True)
class _ReaderView:
    """What a reader finds in the codes of known ids, (N,) each.

    The number of units, the weight of one, and the probability of the heaviest known id.
    """

    number_N: Tensor
    share_N: Tensor
    known_N: Tensor

    def round_units(self, mass_N: Tensor, chance: UnitRandomness) -> Tensor:
        """Round the units that ``mass_N`` makes to a whole number at random, (N,)."""
        counter = torch.full_like(self.number_N, _ROUNDING)
        uniform_N = _draw_uniforms(chance.starts_N2[:, 1], counter)
        units_N = (mass_N / self.share_N.clamp(min=1.0 / WHOLE) + uniform_N).floor().long()
        return torch.where(self.number_N > 0, units_N, 0)


@dataclass(frozen=True)
class _Heads:
    """Heads (H,) with p and units, and of each position the units and the mass of its tail."""

    rows_H: Tensor
    ids_H: Tensor
    p_H: Tensor
    units_H: Tensor
    tail_count_N: Tensor
    tail_mass_N: Tensor

    def mark(self, top_N: Tensor, known_N: Tensor, reader: _ReaderView) -> Tensor:
        """Return which heads are marked, (H,): those that a reader would not take for the best.

        ``top_N`` is the largest p of each position, ``known_N`` that of its known ids. If a known
        id is the best, the head that a reader would take for it is marked.
        """
        rows_H = self.rows_H
        heads = (rows_H, self.ids_H, self.units_H)
        is_expected_H = expect_best_heads(*heads, reader.share_N, reader.known_N)
        is_best_H = self.p_H >= top_N.masked_fill(known_N >= top_N, math.inf)[rows_H]
        # 3 is the best as expected, 2 the best, 1 another that is expected: the first of them says
        # which head of a position is marked, and 3 that none is.
        rank_H = is_best_H * 2 + is_expected_H
        rank_N = rows_H.new_zeros(len(top_N)).scatter_reduce_(0, rows_H, rank_H, "amax")
        return (rank_H == rank_N[rows_H]) & (is_best_H ^ is_expected_H)


class UnitSampler(Sampler):
    """Draws samples in units from logits."""

    def __init__(self, codec: Codec, tables: DitherTables) -> None:
        super().__init__(codec)
        self._tables = tables

    def find_clusters(self, hidden_ND: Tensor) -> Tensor:
        """Return the cluster of each state, (N,): the nearest centre.

        One product for the positions given, whose bits depend on their number: callers give the
        same positions together each time.
        """
        tables = put_on_device(self._tables, hidden_ND.device)
        return find_nearest(tables.centres_CD, hidden_ND.float())

    def draw_units(
        self, logits_NV: Tensor, gold_N: Tensor, cluster_N: Tensor, chance: UnitRandomness
    ) -> dict[str, Tensor]:
        """Draw the sample of N positions, as tensors named as in ``UnitSample``.

        Raises ``ModelError`` for NaN and +inf.
        """
        s_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
        sizes = self._read(s_NV)
        known_NA = self.list_known(gold_N)
        p_NV = sizes.size_NQU.flatten(1)  # with the padding of the last block, which is 0
        best_known_N = p_NV.gather(1, known_NA).amax(1)
        p_NV.scatter_(1, known_NA, 0.0)
        mass_N = sizes.sums_NQ.sum(1, dtype=torch.float64)
        logp_NA = s_NV.gather(1, known_NA)
        if not self.codec.rules.counts_units:
            logp_NA -= sizes.lse_N[:, None]
        codes_NA = self._round_known(logp_NA, known_NA, chance.rounding_NA)
        # Where nothing is beside the known ids no unit may be left: a reader gives the rest, which
        # is rounding, to the next token.
        codes_NA[:, 0].masked_fill_(mass_N <= 0, 0)
        reader = self._read_known(codes_NA, known_NA)
        number_N = reader.number_N
        if self.codec.rules.counts_units:
            number_N = reader.round_units(mass_N * sizes.lse_N.double().exp(), chance)
        heads = separate_heads(sizes, mass_N, number_N, chance.uniform_N)
        # Sizes are 0 outside the tail now.
        self.tails = sizes
        count_N = heads.tail_count_N
        ids_M, k_M = self._draw_tails(p_NV, heads, cluster_N, chance.starts_N2)
        is_marked_H = heads.mark(sizes.largest_NQ.amax(1), best_known_N, reader)
        ones_H = torch.ones_like(heads.rows_H)
        return {
            "known_logprobs": codes_NA * -KNOWN_STEP,
            "entropy": sizes.entropy_N.clone(),  # the next call writes over it
            "cluster": cluster_N,
            "head_count": torch.zeros_like(count_N).scatter_add_(0, heads.rows_H, ones_H),
            "head_ids": heads.ids_H,
            "head_units": torch.add(is_marked_H, heads.units_H, alpha=2),
            "tail_count": count_N,
            "tail_ids": ids_M,
            "tail_k": k_M,
        }

    def _round_known(self, logp_NA: Tensor, known_NA: Tensor, uniform_NA: Tensor) -> Tensor:
        """Round the known tokens to codes, (N, A): the next token in what the others leave."""
        codes_NA = round_known(logp_NA, uniform_NA)
        if self.codec.always_keep:
            kept_N = _weigh_known(codes_NA, known_NA)[:, 1:].sum(1)
            room_N1 = (1.0 - kept_N.double() / WHOLE).clamp(min=0.0)[:, None]
            codes_NA[:, :1] = round_known(logp_NA[:, :1], uniform_NA[:, :1], room_N1)
        return codes_NA

    def _read_known(self, codes_NA: Tensor, known_NA: Tensor) -> _ReaderView:
        mass_NA = _weigh_known(codes_NA, known_NA)
        rest_N, number_N = count_units(mass_NA.sum(1), self.codec.threshold)
        share_N = rest_N.double() / (number_N.clamp(min=1) * WHOLE)
        return _ReaderView(number_N, share_N, mass_NA.amax(1).double() / WHOLE)

    def _draw_tails(
        self, p_NV: Tensor, heads: _Heads, cluster_N: Tensor, starts_N2: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Draw the tokens of tails, which have ``p_NV`` above 0, row by row.

        Returns their ids and the candidate that brought each, 0 for none, (M,).
        """
        count_N = heads.tail_count_N
        most = int(count_N.max()) if len(count_N) else 0
        if not most:
            return count_N.new_empty(0), count_N.new_empty(0)
        tables = put_on_device(self._tables, p_NV.device)
        race = _Race(tables, p_NV, heads.tail_mass_N, count_N, cluster_N, starts_N2)
        step = max(CANDIDATES[p_NV.device.type] // (PATIENCE * most), 1)
        starts = range(0, len(p_NV), step)
        drawn_Nm2 = torch.cat([race.select(slice(at, at + step)).draw(most) for at in starts])
        taken_Nm = torch.arange(most, device=count_N.device) < count_N[:, None]
        # Each in memory of its own: a copy to the host packs bytes.
        ids_M, k_M = drawn_Nm2[taken_Nm].T.contiguous().unbind(0)
        return ids_M, k_M


@dataclass(frozen=True)
class _Entrants:
    """Tokens that may be drawn: row, id, candidate (0 for none) and -log(1 - u), (B,)."""

    rows_B: Tensor
    ids_B: Tensor
    k_B: Tensor
    wait_B: Tensor

    def join(self, other: _Entrants, vocabulary: int) -> _Entrants:
        """Return both in the order of their rows, each token once: by its first candidate."""
        columns = ((each.rows_B, each.ids_B, each.k_B, each.wait_B) for each in (self, other))
        rows_B, ids_B, k_B, wait_B = (torch.cat(pair) for pair in zip(*columns, strict=True))
        # Row, token and candidate in one number: those without a candidate come last.
        keys_B, order_B = ((rows_B * vocabulary + ids_B) * _LIMIT + (k_B - 1) % _LIMIT).sort()
        tokens_B = keys_B // _LIMIT
        kept_B = order_B[_are_first(tokens_B)]
        return _Entrants(rows_B[kept_B], ids_B[kept_B], k_B[kept_B], wait_B[kept_B])


@dataclass(frozen=True)
class _Race:
    """The tokens of N tails, which compete for ``count_N`` places."""

    tables: DeviceTables
    p_NV: Tensor
    mass_N: Tensor
    count_N: Tensor
    cluster_N: Tensor
    starts_N2: Tensor

    def draw(self, most: int) -> Tensor:
        """Return id and candidate of the tokens that are drawn, (N, m, 2); m is ``most``.

        Those without a candidate come first, then the candidates in their order. What follows the
        count of a position is arbitrary. Only tokens whose ratio of odds may be below ``BOUND``
        are looked at; all are where the largest ratio that is drawn is not below.
        """
        come = self._find_arrivals(BOUND)
        late = self._make_late(*self._points)
        drawn_Nm2, largest_N = self._take_least(come.join(late, self._vocabulary), most)
        short_N = (largest_N > BOUND) & (self.count_N > 0)
        if short_N.any():
            race = self.select(short_N)
            every = race._find_arrivals(math.inf).join(race._find_all_late(), self._vocabulary)
            drawn_Nm2[short_N] = race._take_least(every, most)[0]
        return drawn_Nm2

    def select(self, rows: slice | Tensor) -> _Race:
        """Return the race of some of the tails."""
        columns = (self.p_NV, self.mass_N, self.count_N, self.cluster_N, self.starts_N2)
        return _Race(self.tables, *(column[rows] for column in columns))

    @property
    def _vocabulary(self) -> int:
        return self.p_NV.shape[1]

    @cached_property
    def _rate_N1(self) -> Tensor:
        """The chance pi of a token for each unit of p: m / R."""
        return (self.count_N / self.mass_N.clamp(min=1e-300))[:, None]

    @cached_property
    def _limit_N1(self) -> Tensor:
        """The number of candidates of each position, K."""
        return (PATIENCE * self.count_N)[:, None]

    def _find_arrivals(self, bound: float) -> _Entrants:
        """Find the candidates whose token may have a ratio below ``bound``."""
        k_K = torch.arange(1, int(self._limit_N1.max()) + 1, device=self.count_N.device)
        token_NK, prior_NK = self.tables.name_candidates(self.cluster_N, self.starts_N2[:, 0], k_K)
        p_NK = self.p_NV.gather(1, token_NK)
        wins_NK = (k_K <= self._limit_N1) & (p_NK > 0)
        if bound < math.inf:
            wins_NK &= (k_K - 1) * prior_NK < p_NK * (_SLACK * bound * self._rate_N1).to(p_NK.dtype)
        rows_B, place_B = wins_NK.nonzero(as_tuple=True)
        ids_B, prior_B = token_NK[rows_B, place_B], prior_NK[rows_B, place_B].double()
        uniform_B = _draw_uniforms(self.starts_N2[rows_B, 1], ids_B)
        wait_B = place_B * _wait_one(prior_B) - torch.log1p(-prior_B * uniform_B)
        return _Entrants(rows_B, ids_B, place_B + 1, wait_B)

    @cached_property
    def _span_NV(self) -> Tensor:
        """What a token without a candidate may wait more than K candidates, if its ratio is below
        ``BOUND``: at least log(1 + BOUND odds(pi)) + K log(1 - b), and 0 where that is negative.
        """
        span_NV = self.tables.prior_CV[self.cluster_N]
        span_NV *= -self._limit_N1.to(span_NV.dtype)
        span_NV.addcmul_(self.p_NV, (_SLACK * BOUND * self._rate_N1).to(span_NV.dtype))
        return span_NV.clamp_(min=0.0)

    @cached_property
    def _points(self) -> tuple[Tensor, Tensor, Tensor]:
        """The first points of a Poisson process along the spans of all tokens, laid end to end.

        -log(1 - U) of a token is exponential, so it is where such a process has its first point.
        """
        span_NQU = self._span_NV.unflatten(1, (-1, BLOCK))
        blocks = span_NQU.shape[1]
        running_NQ = span_NQU.sum(-1).cumsum(1, dtype=torch.float64)
        length_N1 = running_NQ[:, -1:]
        longest = float(length_N1.max())
        points = math.ceil(longest + 7 * math.sqrt(longest) + 12)
        # Counters that are no tokens.
        counters = torch.arange(points, device=self.count_N.device) + (1 << 40)
        gaps_NP = -_draw_uniforms(self.starts_N2[:, 1:], counters).log()
        point_NP = gaps_NP.cumsum(1)
        rows_B, place_B = (point_NP < length_N1).nonzero(as_tuple=True)
        block_NP = torch.searchsorted(running_NQ, point_NP, right=True).clamp_(max=blocks - 1)
        before_NP = torch.nn.functional.pad(running_NQ, (1, -1)).gather(1, block_NP)
        block_B = block_NP[rows_B, place_B]
        offset_B = (point_NP - before_NP)[rows_B, place_B]
        inside_BU = span_NQU[rows_B, block_B].double().cumsum(1)
        token_B = (inside_BU <= offset_B[:, None]).sum(1)
        token_B = torch.minimum(token_B, (inside_BU < inside_BU[:, -1:]).sum(1))
        begin_BU = torch.nn.functional.pad(inside_BU, (1, -1))
        more_B = (offset_B - begin_BU.gather(1, token_B[:, None])[:, 0]).clamp(min=0.0)
        ids_B = block_B * BLOCK + token_B
        # The first point of each token: points of a row ascend.
        keys_B = rows_B * self._vocabulary + ids_B
        kept = _are_first(keys_B).nonzero()[:, 0]
        return rows_B[kept], ids_B[kept], more_B[kept]

    def _make_late(self, rows_B: Tensor, ids_B: Tensor, more_B: Tensor) -> _Entrants:
        """Return tokens that wait ``more_B`` than their K candidates."""
        prior_B = self.tables.prior_CV[self.cluster_N[rows_B], ids_B].double()
        wait_B = self._limit_N1[rows_B, 0] * _wait_one(prior_B) + more_B
        return _Entrants(rows_B, ids_B, torch.zeros_like(ids_B), wait_B)

    def _find_all_late(self) -> _Entrants:
        """Find all tokens without a candidate: those without a point wait beyond their span."""
        rows_B, ids_B = (self.p_NV > 0).nonzero(as_tuple=True)
        more_NV = self._span_NV.double()
        more_NV[rows_B, ids_B] -= _draw_uniforms(self.starts_N2[rows_B, 1], ids_B).log()
        found_B, token_B, more_B = self._points
        more_NV[found_B, token_B] = more_B
        return self._make_late(rows_B, ids_B, more_NV[rows_B, ids_B])

    def _take_least(self, entrants: _Entrants, most: int) -> tuple[Tensor, Tensor]:
        """Return id and candidate of the least ratios of odds, (N, m, 2), and the largest, (N,)."""
        rows_B = entrants.rows_B
        pi_B = self.p_NV[rows_B, entrants.ids_B].double() * self._rate_N1[rows_B, 0]
        pi_B.clamp_(max=_MOST_CHANCE)
        ratio_B = torch.expm1(entrants.wait_B) * (1.0 - pi_B) / pi_B
        entrants_N = torch.bincount(rows_B, minlength=len(self.count_N))
        first_N = entrants_N.cumsum(0) - entrants_N
        width = max(int(entrants_N.max()), most)
        place_B = torch.arange(len(rows_B), device=rows_B.device) - first_N[rows_B]
        ratio_NX = ratio_B.new_full((len(self.count_N), width), math.inf)
        pairs_NX2 = rows_B.new_zeros(len(self.count_N), width, 2)
        ratio_NX[rows_B, place_B] = ratio_B
        pairs_NX2[rows_B, place_B] = torch.stack([entrants.ids_B, entrants.k_B], 1)
        ratio_Nm, place_Nm = ratio_NX.topk(most, dim=1, largest=False)
        absent_Nm = torch.arange(most, device=rows_B.device) >= self.count_N[:, None]
        pairs_Nm2 = pairs_NX2.gather(1, place_Nm[:, :, None].expand(-1, -1, 2))
        order_Nm = pairs_Nm2[..., 1].masked_fill(absent_Nm, _LIMIT).argsort(dim=1, stable=True)
        largest_N = ratio_Nm.masked_fill(absent_Nm, 0.0).amax(1)
        return pairs_Nm2.gather(1, order_Nm[:, :, None].expand(-1, -1, 2)), largest_N


def _draw_uniforms(begins: Tensor, counters: Tensor) -> Tensor:
    """Draw uniform numbers in (0, 1), float64, from ``begin_tokens`` of positions and counters."""
    return (hash_tokens(begins, counters).double() + 0.5) * 2.0**-_TOKEN_BITS


def _are_first(keys_B: Tensor) -> Tensor:
    """Return which keys, which are in order, differ from the one before, (B,)."""
    first_B = torch.ones_like(keys_B, dtype=torch.bool)
    first_B[1:] = keys_B[1:] != keys_B[:-1]
    return first_B


def _wait_one(prior_B: Tensor) -> Tensor:
    """Return -log(1 - b): how long a candidate takes. A token may have all slots of its table."""
    return -torch.log1p(-prior_B.clamp(max=_MOST_PRIOR))


def round_known(logp_NA: Tensor, uniform_NA: Tensor, room_N1: Tensor | None = None) -> Tensor:
    """Round log-probabilities at random to the codes of ``known``, without bias in p, (N, A).

    As ``cache.rounding.round_stochastically`` does, in steps of ``KNOWN_STEPS``. A code above
    ``room_N1`` weighs the room: a reader takes what is too much from the next token.
    """
    logp_NA = logp_NA.double().clamp(-UNKNOWN * KNOWN_STEP, 0.0)  # -inf has no code
    upper_NA = (logp_NA / -_STEP).floor()
    high_NA, low_NA = (upper_NA * -_STEP).exp(), ((upper_NA + 1) * -_STEP).exp()
    if room_N1 is not None:
        high_NA, low_NA = high_NA.clamp(max=room_N1), low_NA.clamp(max=room_N1)
    takes_upper_NA = uniform_NA * (high_NA - low_NA) < logp_NA.exp() - low_NA
    steps_NA = upper_NA.long() + ~takes_upper_NA
    return (steps_NA * KNOWN_STEPS).clamp_(max=UNKNOWN - KNOWN_STEPS + 1)


def _weigh_known(codes_NA: Tensor, known_NA: Tensor) -> Tensor:
    """Return the mass of each known token, (N, A): a next token that is always kept counts once."""
    mass_NA: Tensor = list_masses_on(codes_NA.device)[codes_NA]
    mass_NA[:, 1:].masked_fill_(known_NA[:, 1:] == known_NA[:, :1], 0)
    return mass_NA


def separate_heads(
    sizes: TokenSizes, mass_N: Tensor, number_N: Tensor, uniform_N: Tensor
) -> _Heads:
    """Give ``number_N`` units to heads and tails, and set the sizes of heads to 0.

    ``mass_N`` is the sum of the sizes, and ``uniform_N`` the start of the systematic sample.
    """
    unit_N = mass_N / number_N
    half_N1 = 0.5 * unit_N[:, None]
    rows_q, blocks_q = (sizes.largest_NQ > half_N1).nonzero(as_tuple=True)
    size_qU = sizes.size_NQU[rows_q, blocks_q].double()
    which_X, place_X = (size_qU > half_N1[rows_q]).nonzero(as_tuple=True)
    rows_X, p_X = rows_q[which_X], size_qU[which_X, place_X]
    ids_X = blocks_q[which_X] * BLOCK + place_X
    # A mask as an index would wait for a GPU each time.
    kept = _choose_heads(rows_X, p_X, mass_N, unit_N).nonzero()[:, 0]
    rows_X, p_X, ids_X = rows_X[kept], p_X[kept], ids_X[kept]
    sizes.size_NQU.flatten(1)[rows_X, ids_X] = 0.0
    rest_N = sizes.sums_NQ.sum(1, dtype=torch.float64)
    heads_N = torch.zeros_like(number_N).scatter_add_(0, rows_X, torch.ones_like(rows_X))
    first_N = heads_N.cumsum(0) - heads_N
    # Row by row, so that the sums do not depend on the other rows.
    table = p_X.new_zeros(len(mass_N), max(int(heads_N.max()) if len(heads_N) else 0, 1))
    column_X = torch.arange(len(rows_X), device=rows_X.device) - first_N[rows_X]
    table[rows_X, column_X] = p_X
    running = table.cumsum(1)
    whole_N = (running[:, -1] + rest_N).clamp(min=1e-300)
    # Without a tail the last head gets what rounding left.
    is_last = (rest_N <= 0)[:, None] & (running >= running[:, -1:])
    ends = torch.floor(running * (number_N / whole_N)[:, None] + uniform_N[:, None]).long()
    ends = torch.where(is_last, number_N[:, None], torch.minimum(ends, number_N[:, None]))
    units_X = ends.diff(dim=1, prepend=torch.zeros_like(ends[:, :1]))[rows_X, column_X]
    drawn = (units_X > 0).nonzero()[:, 0]
    left_N = number_N - ends[:, -1]
    return _Heads(rows_X[drawn], ids_X[drawn], p_X[drawn], units_X[drawn], left_N, rest_N)


def _choose_heads(rows_X: Tensor, p_X: Tensor, mass_N: Tensor, unit_N: Tensor) -> Tensor:
    """Return which tokens above half a unit are heads, (X,), so that no chance exceeds 1."""
    above_X = p_X > unit_N[rows_X]
    heads_N = torch.zeros_like(mass_N).index_add_(0, rows_X, p_X * above_X)
    rest_N = (mass_N - heads_N).clamp(min=0.0)
    limit_N = rest_N / torch.ceil(rest_N / unit_N).clamp(min=1.0)
    too_heavy_X = ~above_X & (p_X > limit_N[rows_X])
    unfit_N = torch.zeros_like(mass_N).index_add_(0, rows_X, too_heavy_X.double()) > 0
    return above_X | unfit_N[rows_X]
